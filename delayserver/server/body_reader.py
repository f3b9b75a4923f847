"""The bodies of rows that leave: at once where they are in memory, else by the reader thread.

Cost: that of `Reader`. Threads: belongs to the event loop.
"""

from collections.abc import Callable

from delayserver.delivery.broker_bodies import BrokerBodies
from delayserver.delivery.handout import Handout
from delayserver.delivery.reader import FetchedBodies, FoundRow, Reader
from delayserver.records.message import ScheduleEntry
from delayserver.schedule.wheel_rows import PAYLOAD_MAX_BYTES
from delayserver.server.engine import Engine
from delayserver.server.threads import CallRequest, HandoutRequest


class BodyReader:
    """Reads for the event loop, which never waits."""

    def __init__(
        self,
        engine: Engine,
        reader: Reader,
        broker_bodies: BrokerBodies,
        clock: Callable[[], int],
        put: Callable[[HandoutRequest | CallRequest], None],
    ) -> None:
        """`engine`: has the bodies that are not filed. `reader`: of the event loop alone. `put`:
        gives the reader thread a request."""
        self._engine = engine
        self._reader = reader
        self._broker_bodies = broker_bodies
        self._clock = clock
        self._put = put

    def read(self, handout: Handout) -> None:
        """Read the bodies of a handout, now or in the reader thread, and answer it."""
        self._broker_bodies.take(handout.subscription_id, handout.broker_bytes)
        unfiled: dict[int, bytes] = {}
        for batch in handout.slices:
            is_unfiled = batch.rows["locator"] <= PAYLOAD_MAX_BYTES
            for seq in batch.rows["seq"][is_unfiled].tolist():
                found = self._engine.groups.payload(seq)
                if found is not None:
                    unfiled[seq] = found[0]
        fetched = self._reader.fetch_now(handout, unfiled)
        if fetched is not None:
            self._on_fetched(handout, fetched)
        else:
            self._put(HandoutRequest(handout, unfiled, self._on_fetched))

    def _on_fetched(self, handout: Handout, fetched: FetchedBodies) -> None:
        deliveries = self._reader.open(handout, fetched)
        self._broker_bodies.give_back(handout.subscription_id, handout.broker_bytes)
        handout.answer(deliveries, self._clock())

    def unfiled(self, entry: ScheduleEntry) -> FoundRow | None:
        """Payload and subject of a schedule row that is not in its hour's file yet."""
        found = self._engine.groups.payload(entry.seq)
        if found is None:
            return None
        sealed, subject_id = found
        return FoundRow(self._reader.decode(entry, sealed, "messages"), subject_id, 0)

    def release(self, hours: list[int]) -> None:
        """The files of these hours are deleted: close them, here and in the reader thread."""

        def release(reader: Reader) -> None:
            for hour in hours:
                reader.release(hour)

        release(self._reader)
        self._put(CallRequest(release, lambda result, error: None))
