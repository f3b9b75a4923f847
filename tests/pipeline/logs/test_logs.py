"""Files cut into pieces for tasks, and read beside whoever writes them."""

from pathlib import Path

import pytest

from delayserver.pipeline.logs import logs
from delayserver.pipeline.logs.logs import LogPiece, Range
from delayserver.pipeline.states.snapshot import Directory, open_directory, take_snapshot
from delayserver.records.tables import read_hours
from storage.check import NotADataDirectoryError
from storage.errors import UnreadableError
from storage.files import OsFile
from storage.frame import Damage, Frame
from storage.rows import HOUR_MS, LogKind
from tests.pipeline.store import HOUR, Store


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Directory:
    """Ten frames in one hour, one in the next, and two records that are not filed."""
    store = Store(tmp_path_factory.mktemp("logs"))
    store.subscribe("all", "*")
    for due_ms in range(1000, 11_000, 1000):
        store.publish("a", [due_ms + 60_000, due_ms + 60_001])
        store.checkpoint()
    store.publish("a", [HOUR_MS + 5])
    store.checkpoint()
    store.publish("b", [2 * HOUR_MS + 5])
    store.kill()
    return open_directory(store.root)


def schedule_piece(directory: Directory) -> LogPiece:
    with directory.catalog() as catalog:
        return logs.schedule_pieces(read_hours(catalog), Range(HOUR, HOUR))[0]


def seqs(directory: Directory, pieces: list[LogPiece]) -> list[int]:
    found: list[int] = []
    for piece in pieces:
        for frame in logs.read(directory.files, piece, stamp=directory.stamp, payload=False):
            assert isinstance(frame, Frame)
            found += frame.rows["seq"].tolist()
    return found


def test_a_directory_of_something_else(tmp_path: Path) -> None:
    with pytest.raises(NotADataDirectoryError, match="--data-dir"):
        open_directory(str(tmp_path / "nothing"))
    assert not (tmp_path / "nothing").exists()


def test_pieces_are_whole_frames_and_together_the_file(directory: Directory) -> None:
    piece = schedule_piece(directory)
    pieces = logs.cut(directory.files, [piece], stamp=directory.stamp, bytes_max=500)
    assert len(pieces) == 4
    assert [one.start for one in pieces[1:]] == [one.end for one in pieces[:-1]]
    assert (pieces[0].start, pieces[-1].end) == (0, piece.end)
    assert seqs(directory, pieces) == seqs(directory, [piece])
    assert [one.after_seq for one in pieces[1:]] == [
        seqs(directory, [one])[-1] for one in pieces[:-1]
    ]


def test_frames_without_a_wanted_seq_are_not_read(directory: Directory) -> None:
    piece = schedule_piece(directory)
    wanted = seqs(directory, [piece])[6]
    (one,) = logs.cut(
        directory.files,
        [piece],
        stamp=directory.stamp,
        bytes_max=1 << 20,
        seqs=Range(wanted, wanted),
    )
    assert wanted in seqs(directory, [one])
    assert one.end - one.start < piece.end / 5


def test_segments_without_a_wanted_seq_are_not_read(directory: Directory) -> None:
    assert len(logs.message_pieces(directory.files)) == 1
    first = logs.message_pieces(directory.files)[0].after_seq + 1
    assert logs.message_pieces(directory.files, Range(0, first - 1)) == []


def test_hours_that_are_not_wanted_are_not_read(directory: Directory) -> None:
    with directory.catalog() as catalog:
        states = read_hours(catalog)
    assert len(logs.schedule_pieces(states)) == 2
    assert [piece.path[9:22] for piece in logs.schedule_pieces(states, Range(HOUR + 1))] == [
        "2026-05-31T05"
    ]


def test_shares_are_even_and_keep_the_order() -> None:
    shares = logs.share(list("abcdef"), [9, 1, 5, 4, 3, 2], 3)
    assert shares == [["a"], ["b", "c", "f"], ["d", "e"]]
    assert logs.share([], [], 3) == [[]]


def test_a_task_has_enough_to_do(directory: Directory) -> None:
    with directory.catalog() as catalog:
        pieces = logs.schedule_pieces(read_hours(catalog))
    total = sum(piece.end - piece.start for piece in pieces)

    def tasks(partitions: int, bytes_min: int) -> int:
        found = logs.plan(
            directory.files,
            pieces,
            stamp=directory.stamp,
            partitions=partitions,
            bytes_min=bytes_min,
        )
        assert sum(piece.end - piece.start for group in found for piece in group) == total
        return len(found)

    assert tasks(4, total + 1) == 1
    assert tasks(4, total // 2) == 2
    assert tasks(2, 1) == 2


def test_what_is_filed_and_what_is_not_is_seen_once(directory: Directory) -> None:
    with directory.catalog() as catalog:
        snapshot = take_snapshot(directory.files, catalog, stamp=directory.stamp)
    assert sorted(snapshot.hours) == [HOUR, HOUR + 1, HOUR + 2]
    assert snapshot.hours[HOUR + 2].length == 0
    assert snapshot.unfiled[HOUR + 2]["seq"].tolist() == [snapshot.through_seq]
    assert snapshot.through_seq == snapshot.checkpoint_seq + 2
    # The catalog does not know the newest subject yet.
    assert snapshot.subjects == {1: "a", 2: "b"}
    assert [one.name for one in snapshot.subscriptions.values()] == ["all"]


def test_damage_within_the_committed_length_is_named_even_at_its_end(
    directory: Directory, tmp_path: Path
) -> None:
    piece = schedule_piece(directory)
    source = Path(directory.root) / piece.path
    copy = tmp_path / piece.path
    copy.parent.mkdir()
    last = logs.cut(directory.files, [piece], stamp=directory.stamp, bytes_max=1)[-1]
    files = Directory(str(tmp_path), directory.stamp).files

    def found() -> list[Frame | Damage]:
        return list(logs.read(files, piece, stamp=directory.stamp, payload=False))

    data = bytearray(source.read_bytes())
    data[last.start + 70] ^= 1
    copy.write_bytes(data)
    *_, damage = found()
    assert isinstance(damage, Damage) and (damage.offset, damage.torn) == (last.start, False)
    copy.write_bytes(data[: last.start])
    *_, damage = found()
    assert isinstance(damage, Damage) and "shorter than the catalog says" in damage.reason
    # The server files more behind the committed length: not ours to read.
    copy.write_bytes(source.read_bytes() + b"half a frame")
    assert all(isinstance(one, Frame) for one in found())


def test_a_torn_tail_of_a_file_that_grows_is_left(directory: Directory, tmp_path: Path) -> None:
    piece = schedule_piece(directory)
    data = (Path(directory.root) / piece.path).read_bytes()
    (tmp_path / "grows").write_bytes(data + data[:90])
    files = Directory(str(tmp_path), directory.stamp).files
    growing = LogPiece(LogKind.SCHEDULE, "grows", 0, len(data) + 90)
    assert len(list(logs.read(files, growing, stamp=directory.stamp, payload=False))) == 10


def test_a_file_that_is_gone_was_deleted_by_the_server(directory: Directory) -> None:
    gone = LogPiece(LogKind.DISPATCH, "dispatch/2020-01-01T00.dispatch", 0, 100)
    assert list(logs.read(directory.files, gone, stamp=directory.stamp, payload=False)) == []


def test_the_end_of_a_dispatch_log_is_found_from_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever the file was torn, and also where windows of the search cut frames in two."""
    store = Store(tmp_path)
    store.subscribe("all", "*")
    for due_ms in range(1000, 6000, 1000):
        store.publish("a", [due_ms] * 3)
        store.run(due_ms + 1)
    store.kill()
    directory = open_directory(store.root)
    (piece,) = logs.dispatch_pieces(directory.files)
    items = list(logs.read(directory.files, piece, stamp=directory.stamp, payload=False))
    frames = [one for one in items if isinstance(one, Frame)]
    assert len(frames) == len(items) > 4
    path = store.path(LogKind.DISPATCH)
    whole = path.read_bytes()
    for tail_bytes in (64, 1 << 16):
        monkeypatch.setattr(logs, "TAIL_BYTES", tail_bytes)
        for length in (*range(0, len(whole), 40), len(whole)):
            path.write_bytes(whole[:length])
            (there,) = logs.dispatch_pieces(directory.files)
            ends = [frame.end for frame in frames if frame.end <= length]
            found = logs.whole_end(directory.files, there, stamp=directory.stamp)
            assert found == max(ends, default=0)
    # Damage before the last frame does not hide it, and what was read is not looked at again.
    path.write_bytes(whole[: frames[1].offset + 64] + b"\xff" + whole[frames[1].offset + 65 :])
    assert logs.whole_end(directory.files, piece, stamp=directory.stamp) == len(whole)
    path.write_bytes(whole[:-1])
    behind = LogPiece(LogKind.DISPATCH, piece.path, frames[-1].offset, len(whole) - 1)
    assert logs.whole_end(directory.files, behind, stamp=directory.stamp) == frames[-1].offset


def test_so_many_rows_end_with_a_frame(directory: Directory) -> None:
    piece = schedule_piece(directory)

    def end(rows_max: int) -> tuple[int, int]:
        return logs.rows_end(directory.files, piece, stamp=directory.stamp, rows_max=rows_max)

    items = logs.read(directory.files, piece, stamp=directory.stamp, payload=False)
    ends = [frame.end for frame in items]
    assert end(0) == (0, 0)
    # Two rows a frame; at least one of them, or it would never go on.
    assert (end(1), end(2), end(3)) == ((ends[0], 2),) * 3
    assert end(4) == (ends[1], 4)
    assert end(1000) == (piece.end, 2 * len(ends))


def test_a_bad_sector_costs_its_frame(
    directory: Directory, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, stamp, piece = directory.files, directory.stamp, schedule_piece(directory)
    frames = [
        one for one in logs.read(files, piece, stamp=stamp, payload=False) if isinstance(one, Frame)
    ]
    bad, pread = frames[3], OsFile.pread

    def fail(self: OsFile, length: int, offset: int) -> bytes:
        if self.path == piece.path and offset <= bad.offset < offset + length:
            raise UnreadableError(self.path, offset, "Input/output error")
        return pread(self, length, offset)

    monkeypatch.setattr(OsFile, "pread", fail)
    monkeypatch.setattr("storage.files.SECTOR_BYTES", 8)
    pieces = logs.cut(files, [piece], stamp=stamp, bytes_max=200)
    assert (pieces[0].start, pieces[-1].end) == (0, piece.end)
    found = [one for part in pieces for one in logs.read(files, part, stamp=stamp, payload=True)]
    (damage,) = (one for one in found if isinstance(one, Damage))
    assert (damage.offset, damage.end) == (bad.offset, bad.end) and not damage.torn
    assert "cannot be read (Input/output error)" in damage.reason
    assert [one.offset for one in found if isinstance(one, Frame)] == [
        one.offset for one in frames if one is not bad
    ]
    assert logs.rows_end(files, piece, stamp=stamp, rows_max=100) == (piece.end, 6)


def test_the_last_whole_frame_stands_before_a_bad_sector(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(tmp_path)
    store.subscribe("all", "*")
    for due_ms in (1000, 2000, 3000):
        store.publish("a", [due_ms])
        store.run(due_ms + 1)
    store.kill()
    directory = open_directory(store.root)
    (piece,) = logs.dispatch_pieces(directory.files)
    frames = list(logs.read(directory.files, piece, stamp=directory.stamp, payload=False))
    last, pread = frames[-1], OsFile.pread

    def fail(self: OsFile, length: int, offset: int) -> bytes:
        if self.path == piece.path and offset <= last.offset < offset + length:
            raise UnreadableError(self.path, offset, "Input/output error")
        return pread(self, length, offset)

    monkeypatch.setattr(OsFile, "pread", fail)
    monkeypatch.setattr("storage.files.SECTOR_BYTES", 8)
    # It is no torn tail, so whoever reads up to there is told.
    end = logs.whole_end(directory.files, piece, stamp=directory.stamp)
    assert end == piece.end
    there = LogPiece(LogKind.DISPATCH, piece.path, 0, end)
    *_, damage = logs.read(directory.files, there, stamp=directory.stamp, payload=False)
    assert isinstance(damage, Damage) and damage.offset == last.offset
