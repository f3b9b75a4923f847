"""The job of an archive: the hours that are asked for, the calls to the server, and the results."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from delayserver.pipeline.archive.compaction import Compacted
from delayserver.pipeline.archive.table import BUCKETS
from delayserver.pipeline.calls import ServerCalls
from delayserver.pipeline.states.history import WantedHour
from storage.buckets import hour_name, parse_hour

PAGE_HOURS = 1000
CONFIRM_TIMEOUT_S = 120.0
_LISTED = ("schedule_bytes", "dispatch_bytes", "last_seq", "count")


class ArchiveFormat(StrEnum):
    """The file format of an archive."""

    ICEBERG = "iceberg"
    PARQUET = "parquet"


class HourFate(StrEnum):
    """The result for an hour."""

    ARCHIVED = "archived"
    CHANGED = "changed"
    """It has come back since it was listed: the next run archives its new rows."""
    GONE = "gone"
    """The server has deleted it meanwhile."""
    DAMAGED = "damaged"
    """The server's files cannot be read."""
    DIFFERENT = "different"
    """The rows that were read back are not those of the server."""
    PARTLY = "partly"
    """Its settled rows were archived; the server keeps it as long as the rest is not settled."""
    SOUND = "sound"
    """It would be archived (a dry run)."""


FAILURES = (HourFate.DAMAGED, HourFate.DIFFERENT)


@dataclass(frozen=True, slots=True)
class Archive:
    """The hours to be archived, and the place for them."""

    data_dirs: Sequence[str]
    """Directories, or URLs of exports, whose shards one server has."""
    to: str
    server: str
    token: str | None = None
    format: ArchiveFormat = ArchiveFormat.ICEBERG
    buckets: int = BUCKETS
    """How many buckets of subjects a new table has."""
    until_ms: int | None = None
    """Only hours that ended by then."""
    dry_run: bool = False
    again: frozenset[int] = frozenset()
    """Hours that are archived anew, whatever the archive has of them."""
    without_unsettled: bool = False
    """Also hours that messages keep open which are not settled, without these."""
    compact: bool = False
    """Compact all small files, and not only where there are many."""
    wait_s: float = 60.0


@dataclass(slots=True)
class HourReport:
    """The result for one hour."""

    hour: str
    fate: HourFate
    count: int
    added: int = 0
    """Rows that this run has added to the archive."""
    total_bytes: int = 0
    """The length of the server's files."""
    checksum: str = ""
    reason: str = ""
    left_out: int = 0
    """Entries that are not settled."""
    shard: int | None = None
    """Which one it is of, where there are several."""


@dataclass(slots=True)
class ArchiveRun:
    """The results of a run of the archive command."""

    to: str
    is_kept: bool
    """Whether the server keeps hours until they are archived."""
    hours: list[HourReport] = field(default_factory=list)
    compacted: Compacted = field(default_factory=Compacted)
    took_s: float = 0.0

    @property
    def is_clean(self) -> bool:
        """Whether every hour that could be archived was."""
        return not any(hour.fate in FAILURES for hour in self.hours)

    def total(self, fate: HourFate) -> int:
        """How many hours had this fate."""
        return sum(hour.fate is fate for hour in self.hours)

    def document(self) -> dict[str, Any]:
        """The form that `--json` prints: the fields, as JSON values."""
        return asdict(self)


class ArchiveCalls(ServerCalls):
    """The calls by which the server lists hours to archive, and learns which are archived."""

    def __init__(self, url: str, *, shard: int | None = None, **rest: Any) -> None:
        """`shard`: which one, where there are several. `rest` as ServerCalls has it."""
        super().__init__(url, **rest)
        self._shard = "" if shard is None else f"&shard={shard}"

    def waiting(self) -> tuple[bool, list[WantedHour]]:
        """Whether hours are kept until they are archived, and those that wait for it."""
        hours: list[WantedHour] = []
        cursor: str | None = ""
        while cursor is not None:
            query = (f"&cursor={cursor}" if cursor else "") + self._shard
            page = self.call("GET", f"/v1/archives?limit={PAGE_HOURS}{query}")
            for one in page["hours"]:
                number = parse_hour(one["hour"])
                assert number is not None, one
                hours.append(WantedHour(number, *(one[name] for name in _LISTED)))
            cursor = page["cursor"]
        return page["archive"], hours

    def confirm(self, hour: WantedHour, checksum: str, location: str) -> None:
        """Tell the server that an hour was archived. Raises CallRefusedError."""
        document = {
            **hour.extent._asdict(),
            "count": hour.count,
            "checksum": checksum,
            "location": location,
        }
        path = f"/v1/archives/{hour_name(hour.hour)}{self._shard.replace('&', '?')}"
        self.call("PUT", path, document, CONFIRM_TIMEOUT_S)
