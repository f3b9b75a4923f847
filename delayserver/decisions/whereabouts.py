"""Whereabouts: where a schedule row is that may be still to come.

    not loaded ──▶ in a group, unfiled ──▶ in the wheel ──▶ fired ──▶ (the dispatcher's) ──▶ settled

A row is found from its seq and its due time alone, without an index. Code that decides about a
message asks here whether it still can (`Messages`). Code that takes over the rows of a deleted
subscription asks whether another row of the message comes later (`Dispatcher`). The object knows of
neither.

Cost: some look-ups in sets, and a search in one slot of the wheel when the hour is loaded;
`is_known` reads the catalog. Threads: belongs to the event loop.
"""

from delayserver.config import Settings
from delayserver.decisions.groups import Groups
from delayserver.records.direct import is_direct
from delayserver.records.message import ScheduleEntry
from delayserver.records.tables import read_hour
from delayserver.schedule.hours import Hours
from delayserver.schedule.wheel import Wheel
from delayserver.schedule.wheel_rows import ROUTE_NUMBER, ROUTE_SUBSCRIPTION
from storage.catalog import Catalog
from storage.frame import Rows


class Whereabouts:
    """Says of a row whether it has fired, and whether its hour still knows it."""

    def __init__(
        self, settings: Settings, catalog: Catalog, groups: Groups, wheel: Wheel, hours: Hours
    ) -> None:
        self._kept_ms = settings.kept_ms
        self._catalog = catalog
        self._groups = groups
        self._wheel = wheel
        self._hours = hours

    def has_not_fired(self, entry: ScheduleEntry) -> bool:
        """Whether a schedule row that was not removed is still to come."""
        hour = entry.hour
        # While an hour is being loaded the wheel does not have its rows yet: a look into it would
        # take a message that waits for one that was delivered.
        if not self._hours.is_live(hour) or hour in self._hours.loading:
            return True
        return self._groups.is_in_memory(entry.seq) or self._wheel.contains(entry.seq, entry.due_ms)

    def in_wheel(self, entry: ScheduleEntry) -> Rows | None:
        """The row, where it waits in the wheel: WHEEL_DTYPE, of length 1."""
        return self._wheel.get(entry.seq, entry.due_ms)

    def is_known(self, entry: ScheduleEntry, now_ms: int) -> bool:
        """Whether the row is still kept in its hour. While that hour is being deleted, its messages
        are forgotten piece by piece, and must not be asked for."""
        if entry.seq > self._groups.checkpoint_seq:
            return True
        state = read_hour(self._catalog, entry.hour)
        return (
            state is not None
            and state.first_seq <= entry.seq
            and not state.is_over(entry.hour, now_ms, self._kept_ms)
        )


def is_for_one(row: Rows | None) -> bool:
    """Whether a row waits for one subscription alone, as a restart leaves a row that others have
    settled; not for a direct one, which has no others beside it."""
    if row is None:
        return False
    route = int(row["route"][0])
    return bool(route & ROUTE_SUBSCRIPTION) and not is_direct(route & ROUTE_NUMBER)
