"""Who owned which shard when, as the logs say: followed from the first record on, judged at the
end.

    log of a shard ──▶ OfficeWatch (a thread) ──▶ Tenure, Tenure, …
    tenures, deliveries, pulls ──▶ broken_offices: what no two owners may have done

Times in tenures are those that the records carry, without what the clock of the node was set off
by: the machine has one clock.

Cost: that of `RecordReader`, some µs a record. Threads: one for each shard; what it has found may
be read by others at any time.
"""

import itertools
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from storage.errors import StorageError
from storage.replicated.engine import EngineLog
from storage.replicated.envelope import NOBODY, Claim, Release
from storage.replicated.lease import LEASE_MS, MARGIN_MS
from storage.replicated.office import OfficeState, RecordDecision
from storage.replicated.reader import RecordReader, RecordReading
from tests.chaos.ledger import ChaosLedger
from tests.waiting import Looks

READ_S: Final = 0.2
PATIENCE_S: Final = 10.0
CLOCK_MS: Final = 30
"""By how much two readings of one clock may be off: a record gets its time a moment before it is
sent."""
TRANSIT_MS: Final = 700
"""A delivery may be received so long after its sender could last make one, on a busy machine."""


@dataclass(slots=True)
class Tenure:
    """A node in office."""

    shard: int
    epoch: int
    node: int
    claim_offset: int
    claim_ms: int
    """When the claim was sent."""
    last_ms: int
    """When the last record that counts was sent."""
    is_released: bool = False
    """It has left in order."""
    records: int = 1


class OfficeWatch(threading.Thread):
    """Reads the log of one shard as long as it runs."""

    def __init__(
        self, shard: int, log: EngineLog, stamp: int, offset_ms: Callable[[int], int]
    ) -> None:
        """`offset_ms`: what the clock of the node with that number is set off by just now."""
        super().__init__(name=f"chaos-offices-{shard}", daemon=True)
        self.tenures: list[Tenure] = []
        self.void = 0
        """Records that do not count."""
        self.failure: str | None = None
        self._shard = shard
        self._log = log
        self._reader = RecordReader(log, stamp, OfficeState())
        self._offset_ms = offset_ms
        self._ending = threading.Event()

    @property
    def owner(self) -> int:
        """The number of the node in office; NOBODY: it is vacant."""
        last = self.tenures[-1] if self.tenures else None
        return NOBODY if last is None or last.is_released else last.node

    def run(self) -> None:
        try:
            while not self._ending.is_set():
                for read in self._reader.read(READ_S):
                    self._see(read)
        except (StorageError, AssertionError) as error:
            self.failure = f"the log of shard {self._shard} cannot be read: {error!r}"

    def _see(self, read: RecordReading) -> None:
        record, state = read.record, self._reader.office.state
        if read.verdict is RecordDecision.VOID:
            self.void += 1
            return
        at_ms = record.clock_ms - self._offset_ms(record.node)
        if isinstance(record, Claim):
            offset = state.claim_offset
            self.tenures.append(
                Tenure(self._shard, record.epoch, record.node, offset, at_ms, at_ms)
            )
            return
        tenure = self.tenures[-1]
        tenure.last_ms = at_ms
        tenure.records += 1
        tenure.is_released = isinstance(record, Release)

    def has_read(self, offset: int | None) -> bool:
        """Whether it has read up to `offset`. None: it is not known how far the log goes."""
        return offset is not None and self._reader.office.state.next_offset >= offset

    def end(self, offset: int | None) -> None:
        """Read up to `offset` if it can be, and end."""
        for _ in Looks(PATIENCE_S, READ_S):
            if not self.is_alive() or self.has_read(offset):
                break
        self._ending.set()
        self.join(PATIENCE_S)


def broken_offices(
    tenures: Sequence[Tenure], ledger: ChaosLedger, node_of: Callable[[int], str]
) -> Iterator[str]:
    """I14, from the logs and from what was received; a sentence for each that was broken.

    `tenures`: of all shards, each in the order of its epochs."""
    by_shard: dict[int, list[Tenure]] = defaultdict(list)
    for tenure in tenures:
        by_shard[tenure.shard].append(tenure)
    for shard, some in by_shard.items():
        for last, following in itertools.pairwise(some):
            gap_ms = following.claim_ms - last.last_ms
            if not last.is_released and gap_ms < LEASE_MS - MARGIN_MS - CLOCK_MS:
                yield (
                    f"shard {shard}: {node_of(following.node)} claimed epoch {following.epoch} "
                    f"{gap_ms} ms after {node_of(last.node)} was in office"
                )
        yield from _late_deliveries(shard, some, ledger, node_of)
    yield from _mixed_pulls(ledger)


def _late_deliveries(
    shard: int, tenures: Sequence[Tenure], ledger: ChaosLedger, node_of: Callable[[int], str]
) -> Iterator[str]:
    """Webhooks of who was not in office."""
    terms: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for index, tenure in enumerate(tenures):
        is_last = index + 1 == len(tenures)
        # As long as nobody else has claimed, the owner may be heard again.
        end_ms = tenure.last_ms + LEASE_MS - MARGIN_MS
        if is_last and not tenure.is_released:
            end_ms = 1 << 62
        terms[node_of(tenure.node)].append((tenure.claim_ms, end_ms))
    for delivery in ledger.deliveries:
        if delivery.shard != shard or ledger.is_thaw(shard, delivery.at_ms):
            continue
        if not any(
            from_ms - CLOCK_MS <= delivery.at_ms <= to_ms + TRANSIT_MS
            for from_ms, to_ms in terms[delivery.node]
        ):
            yield (
                f"shard {shard}: {delivery.node} delivered {delivery.message_id} at "
                f"{delivery.at_ms} without being in office"
            )


def _mixed_pulls(ledger: ChaosLedger) -> Iterator[str]:
    """What one process of a shard has leased after another had begun to."""
    last: dict[int, str] = {}
    gone: dict[tuple[int, str], int] = {}
    for pull in ledger.pulls:
        before = last.get(pull.shard)
        if before != pull.process:
            if before is not None:
                gone[pull.shard, before] = pull.at_ms
            since_ms = gone.get((pull.shard, pull.process))
            if since_ms is not None:
                if pull.at_ms - since_ms > TRANSIT_MS and not ledger.is_thaw(
                    pull.shard, pull.at_ms
                ):
                    yield (
                        f"shard {pull.shard}: process {pull.process} leased at {pull.at_ms}, and "
                        f"{before} had done so since {since_ms}"
                    )
                continue
        last[pull.shard] = pull.process
