"""A peer without a network between: what `Incoming` asks, answered by `Snapshots`."""

import contextlib
from collections.abc import Callable, Iterator

from delayserver.records.tables import read_definitions_place, read_hours
from delayserver.recovery.definitions import read_generation
from delayserver.recovery.incoming import prefix_checksum
from delayserver.recovery.snapshots import SnapshotManifest, Snapshots
from storage.catalog import Catalog, Table
from storage.directory import open_identity
from storage.errors import CopySourceError
from storage.files import Files
from storage.frame import Frame, scan
from storage.hour_log import HourLog
from storage.kinds import ANY
from storage.rows import LogKind
from storage.tiered_catalog import TieredCatalog

PIECE_BYTES = 1000


class LocalPeer:
    """See `delayserver.recovery.incoming.CopySource`."""

    def __init__(self, snapshots: Snapshots, make: Callable[[], SnapshotManifest]) -> None:
        self.name = "local"
        self._snapshots = snapshots
        self._make = make
        self.sent: list[tuple[str, int, int]] = []
        """Files that were read, from where, and how far."""
        self.breaks_after_bytes: int | None = None

    def snapshot(self) -> SnapshotManifest:
        return self._make()

    @contextlib.contextmanager
    def read(
        self, snapshot_id: str, path: str, have: int, checksum: int
    ) -> Iterator[tuple[int, Iterator[bytes]]]:
        opened = self._snapshots.open(snapshot_id, path)
        if opened is None:
            raise CopySourceError(self.name, f"{path} is gone")
        file, length = opened
        with contextlib.closing(file):
            start = have if have and prefix_checksum(file, have) == checksum else 0
            self.sent.append((path, start, length))

            def pieces() -> Iterator[bytes]:
                for at in range(start, length, PIECE_BYTES):
                    piece = file.pread(min(PIECE_BYTES, length - at), at)
                    if self.breaks_after_bytes is not None:
                        self.breaks_after_bytes -= len(piece)
                        if self.breaks_after_bytes < 0:
                            self.breaks_after_bytes = None
                            raise ConnectionResetError("it has hung up")
                    yield piece

            yield start, pieces()

    def release(self, snapshot_id: str) -> None:
        self._snapshots.release(snapshot_id)


def content_of(files: Files, inner: Catalog) -> dict[str, object]:
    """All that a replica holds: tables, rows with their payloads, definitions."""
    stamp = open_identity(files, random_bytes=None, of=ANY).stamp
    with contextlib.ExitStack() as cleanup:
        catalog = TieredCatalog(inner, files, stamp=stamp, readonly=True)
        cleanup.callback(catalog.close_runs)
        schedule = HourLog(files, LogKind.SCHEDULE, stamp=stamp, open_files_max=8)
        cleanup.callback(schedule.close)
        found: dict[str, object] = {table: dict(catalog.scan(table)) for table in Table}
        for bucket, state in read_hours(catalog).items():
            rows: list[tuple[bytes, ...]] = []
            for frame in schedule.scan(bucket, end=state.length, payload=True):
                assert isinstance(frame, Frame) and frame.payload is not None
                assert frame.payload_intact
                for row in frame.rows:
                    start = int(row["payload_offset"])
                    end = start + int(row["payload_length"])
                    rows.append((row.tobytes(), frame.payload[start:end]))
            found[schedule.path(bucket)] = rows
        place = read_definitions_place(catalog)
        if place is not None and place.generation:
            defined = read_generation(files, place.generation, stamp=stamp, end=place.length)
            assert defined.damage == []
            found["definitions"] = defined.state
        return found


def settled_in(files: Files) -> set[bytes]:
    """All rows of the dispatch logs that are whole."""
    stamp = open_identity(files, random_bytes=None, of=ANY).stamp
    rows: set[bytes] = set()
    for name in files.list("dispatch"):
        with contextlib.closing(files.open(f"dispatch/{name}")) as file:
            for found in scan(
                file, 0, file.size(), kind=LogKind.DISPATCH, stamp=stamp, payload=False
            ):
                if isinstance(found, Frame):
                    rows |= {row.tobytes() for row in found.rows}
    return rows
