"""Archives: hours of which an external copy exists, so that the server may delete them.

A job (`delayserver.pipeline.archive.archive`) copies retired hours to a place of its own, and tells
the server how far the copy goes: how long the hour's two files were, and the last entry in them. An
hour counts as archived only as long as that is so. An hour that comes back, since a message is
published or moved into it, is longer then, and waits again. With the setting `archive` only
archived hours are deleted.

Cost: the list reads the table of hours, and the length of a file per hour that is retired.
Threads: `Archives` belongs to the replay thread, `WaitingHours` to the event loop; the functions
have no state.
"""

import asyncio
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from delayserver.errors import ConflictError, NotFoundError
from delayserver.parts.imports.records import Archived, pack_archived, read_archived
from delayserver.parts.part import Core
from delayserver.records.tables import HourState, hour_key
from delayserver.schedule.effects import Effects
from delayserver.schedule.replay import Replay
from delayserver.schedule.retired import RetiredHour, extent_of, retired_hours
from delayserver.server.metrics import Metrics
from storage.buckets import hour_name
from storage.catalog import Catalog, Table
from storage.files import Files
from storage.hour_log import HourLog


@dataclass(frozen=True, slots=True)
class ArchivableHour(RetiredHour):
    """A retired hour, and its archive."""

    archived: Archived | None
    """None: it waits for it."""


def kept_hours(catalog: Catalog, files: Files) -> Iterator[ArchivableHour]:
    """All retired hours that are kept, in order, as of the last checkpoint."""
    archived = read_archived(catalog)
    for one in retired_hours(catalog, files):
        known = archived.get(one.hour)
        if known is not None and known.extent != one.extent:
            known = None
        yield ArchivableHour(one.hour, one.retired_ms, one.count, one.extent, known)


class Archives:
    """The archives that the catalog knows of."""

    def __init__(
        self,
        catalog: Catalog,
        hours: Mapping[int, HourState],
        dispatch: HourLog,
        effects: Effects,
        checkpoint: Callable[[], int],
        *,
        must: bool,
    ) -> None:
        """`hours`: the filed hours (`Replay.hours`); `checkpoint`: makes `effects` durable; `must`:
        only archived hours may go (the setting `archive`)."""
        self._must = must
        self._hours = hours
        self._dispatch = dispatch
        self._effects = effects
        self._checkpoint = checkpoint
        self._archived = read_archived(catalog)

    def confirm(self, hour: int, archived: Archived) -> None:
        """Record that an archive of a retired hour exists; durable on return.

        Raises NotFoundError; ConflictError where it does not cover all that the hour holds now."""
        state, name = self._hours.get(hour), hour_name(hour)
        if state is None:
            raise NotFoundError(f"no hour {name} is kept: it was deleted, or nothing was due in it")
        if not state.retired_ms:
            raise ConflictError(
                f"messages of {name} wait or are on their way; archive it when all are settled",
                "open",
            )
        extent = extent_of(state, self._dispatch.size(hour))
        if (archived.extent, archived.count) != (extent, state.entries):
            raise ConflictError(
                f"{name} has changed since it was read: it holds {state.entries} entries up to "
                f"{extent.last_seq} in {extent.schedule_bytes} and {extent.dispatch_bytes} bytes; "
                "archive it again",
                "changed",
            )
        self._effects.writes[Table.ARCHIVES].append((hour_key(hour), pack_archived(archived)))
        # A client that is answered may rely on it that the hour will be deleted.
        self._checkpoint()
        self._archived[hour] = archived

    def lets_go(self, hour: int) -> bool:
        """Whether the hour may be deleted: where it must be archived, only if there is an archive
        of all that it holds. It may have come back since."""
        if not self._must:
            return True
        archived = self._archived.get(hour)
        if archived is None or archived.schedule_bytes != self._hours[hour].length:
            return False
        return archived.extent == extent_of(self._hours[hour], self._dispatch.size(hour))

    def remove(self, hour: int) -> None:
        """The hour is deleted. If it comes back, it is another one, of which there is no copy."""
        if self._archived.pop(hour, None) is not None:
            self._effects.writes[Table.ARCHIVES].append((hour_key(hour), None))


def confirming(hour: int, archived: Archived) -> Callable[[Replay], None]:
    """A call for the replay thread: see `Archives.confirm`."""
    return lambda replay: replay.keeper(Archives).confirm(hour, archived)


class WaitingHours:
    """The hours that wait to be archived, when they were listed last."""

    not_understood = None
    """Archives are no definitions."""

    def __init__(self, core: Core) -> None:
        self._must = core.settings.archive
        self._waiting: list[ArchivableHour] = []

    def prune(self, through_seq: int) -> None:
        """Nothing is in memory that a checkpoint would make needless."""

    async def look(self, catalog: Catalog, files: Files) -> None:
        """List them, as of the last checkpoint."""
        if self._must:
            kept = await asyncio.to_thread(lambda: list(kept_hours(catalog, files)))
            self._waiting = [one for one in kept if one.archived is None]

    def add_metrics(self, metrics: Metrics) -> None:
        """Add how many there are, and how long."""
        metrics.gauge(
            "archive_waiting_hours",
            "Settled hours that are kept until they are archived (setting archive)",
            lambda: len(self._waiting),
        )
        metrics.gauge("archive_waiting_bytes", "The length of their files", self._total_bytes)

    def stats(self) -> dict[str, object]:
        """The fields of `/v1/stats`."""
        return {
            "archive_waiting_hours": len(self._waiting),
            "archive_waiting_bytes": self._total_bytes(),
        }

    def _total_bytes(self) -> int:
        return sum(one.total_bytes for one in self._waiting)
