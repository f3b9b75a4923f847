"""Staged imports: what was written is read again, and nothing else passes for it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from storage import staging
from storage.errors import StagingError, SyncError
from storage.frame import Damage, Frame, crc32c, encode, seal
from storage.rows import HOUR_MS, NO_KEY, SCHEDULE_DTYPE, LogKind, RecordKind
from storage.staging import (
    DIRECTORY,
    Manifest,
    OnConflict,
    Part,
    PartWriter,
    StagedRows,
    import_of,
    manifest_path,
    parse_manifest_path,
    read_manifest,
    verify,
    write_manifest,
)
from tests.unit.storage.samples import HOUR, STAMP, content, flip
from tests.world.storage.faults import Fault, FaultKind, Faults, FaultyFiles
from tests.world.storage.files import SimulatedFiles

START_MS = HOUR * HOUR_MS
BODY_MAX = 1 << 20
Row = tuple[int, bytes, bytes]
"""Due time, key hash, payload without its seal."""


@pytest.fixture
def files() -> SimulatedFiles:
    disk = SimulatedFiles()
    disk.make_directory(DIRECTORY)
    return disk


def rows(count: int, *, apart_ms: int = 1000, first: int = 0) -> list[Row]:
    return [
        (
            START_MS + number * apart_ms,
            number.to_bytes(16, "big") if number % 2 else NO_KEY,
            b"body %d" % number,
        )
        for number in range(first, first + count)
    ]


def append(writer: PartWriter, some: list[Row]) -> None:
    sealed = [seal(body) for _, _, body in some]
    writer.append(
        np.array([due_ms for due_ms, _, _ in some], np.int64),
        np.ones(len(some), np.uint32),
        b"".join(key for _, key, _ in some),
        np.array([len(data) for data in sealed], np.uint32),
        b"".join(sealed),
    )


def stage(files: SimulatedFiles, *parts: list[Row], import_id: str = "a") -> Manifest:
    written = []
    for number, some in enumerate(parts):
        name = staging.part_name(import_id, str(number))
        writer = PartWriter(files, name, stamp=STAMP, created_ms=1)
        append(writer, some)
        written.append(writer.close())
    manifest = Manifest(import_id, STAMP, 1, tuple(written))
    write_manifest(files, manifest)
    return manifest


def frames(files: SimulatedFiles, manifest: Manifest, skip: int = 0) -> list[tuple[int, Frame]]:
    found = list(StagedRows(files, manifest.parts, STAMP, skip))
    assert all(isinstance(one, Frame) for _, one in found)
    return [(before, one) for before, one in found if isinstance(one, Frame)]


def seqs(files: SimulatedFiles, manifest: Manifest, skip: int = 0) -> list[int]:
    """Rows of the import, from 1."""
    return [
        before + seq
        for before, frame in frames(files, manifest, skip)
        for seq in frame.rows["seq"].tolist()
    ]


def test_what_was_staged_is_read_again(files: SimulatedFiles) -> None:
    some, more = rows(5), rows(3, first=5)
    manifest = stage(files, some, more)
    assert read_manifest(files, "a") == manifest
    assert (manifest.count, manifest.total_bytes > 0) == (8, True)
    staged = verify(files, manifest, stamp=STAMP, payload_max_bytes=BODY_MAX)
    assert staged.subject_counts == {1: 8}
    assert staged.last_due_ms == more[-1][0]
    keyed = [number for number, (_, key, _) in enumerate([*some, *more]) if key != NO_KEY]
    assert staged.keys.rows.tolist() == keyed
    assert staged.keys.hashes.tolist() == [number.to_bytes(16, "big") for number in keyed]
    assert staged.keys.due_ms.tolist() == [START_MS + number * 1000 for number in keyed]
    digests = [len(seal(b"body %d" % n)) << 32 | crc32c(b"body %d" % n) for n in keyed]
    assert staged.keys.digests.tolist() == digests
    bodies = []
    for _, frame in frames(files, manifest):
        assert (frame.rows["kind"] == RecordKind.PUBLISH).all()
        for row in frame.rows:
            start, length = int(row["payload_offset"]), int(row["payload_length"])
            assert frame.payload is not None
            bodies.append(frame.payload[start + 4 : start + length])
    assert bodies == [body for _, _, body in [*some, *more]]
    assert seqs(files, manifest) == list(range(1, 9))


def test_a_frame_holds_rows_of_one_hour(files: SimulatedFiles) -> None:
    manifest = stage(files, rows(6, apart_ms=HOUR_MS // 2))
    found = frames(files, manifest)
    assert [len(frame.rows) for _, frame in found] == [2, 2, 2]
    assert all(len(np.unique(frame.rows["due_ms"] // HOUR_MS)) == 1 for _, frame in found)


def test_a_frame_is_cut_before_it_is_too_long(
    files: SimulatedFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "FRAME_ROWS_MAX", 4)
    assert [len(f.rows) for _, f in frames(files, stage(files, rows(10, apart_ms=1)))] == [4, 4, 2]
    monkeypatch.setattr(staging, "FRAME_BYTES_MAX", 25)
    manifest = stage(files, rows(6, apart_ms=1), import_id="b")
    assert [len(frame.rows) for _, frame in frames(files, manifest)] == [2, 2, 2]
    monkeypatch.setattr(staging, "FRAME_BYTES_MAX", 1)
    manifest = stage(files, rows(3, apart_ms=1), import_id="c")
    assert [len(frame.rows) for _, frame in frames(files, manifest)] == [1, 1, 1]


def test_a_part_may_be_written_bit_by_bit(files: SimulatedFiles) -> None:
    writer = PartWriter(files, staging.part_name("a", "0"), stamp=STAMP, created_ms=1)
    for first in range(0, 9, 3):
        append(writer, rows(3, first=first))
    part = writer.close()
    manifest = Manifest("a", STAMP, 1, (part,))
    assert verify(files, manifest, stamp=STAMP, payload_max_bytes=BODY_MAX).manifest.count == 9
    assert seqs(files, manifest) == list(range(1, 10))


@pytest.mark.parametrize("skip", range(9))
def test_the_rest_can_be_read_alone(files: SimulatedFiles, skip: int) -> None:
    manifest = stage(files, rows(4, apart_ms=HOUR_MS), rows(4, apart_ms=HOUR_MS, first=4))
    assert seqs(files, manifest, skip) == list(range(skip + 1, 9))


def test_every_flipped_byte_is_found(files: SimulatedFiles) -> None:
    manifest = stage(files, rows(3))
    path = f"{DIRECTORY}/{manifest.parts[0].file}"
    padding = len(content(files, path)) - sum(
        64 + frame.header.rows_bytes + frame.header.payload_bytes
        for _, frame in frames(files, manifest)
    )
    for offset in range(len(content(files, path)) - padding):
        flip(files, path, offset)
        with pytest.raises(StagingError):
            verify(files, manifest, stamp=STAMP, payload_max_bytes=BODY_MAX)
        flip(files, path, offset)
    verify(files, manifest, stamp=STAMP, payload_max_bytes=BODY_MAX)


def test_what_is_not_what_the_manifest_says(files: SimulatedFiles) -> None:
    manifest = stage(files, rows(3), rows(3, first=3))
    first, second = manifest.parts

    def refused(changed: Manifest, text: str, *, stamp: int = STAMP) -> None:
        with pytest.raises(StagingError, match=text):
            verify(files, changed, stamp=stamp, payload_max_bytes=BODY_MAX)

    refused(manifest, "another data directory", stamp=STAMP + 1)
    refused(replace(manifest, stamp=STAMP + 1), "no header|another data directory")
    refused(replace(manifest, parts=(first, replace(second, file="a.9.part"))), "missing")
    refused(replace(manifest, parts=(replace(first, bytes=first.bytes + 8),)), "the manifest says")
    refused(replace(manifest, parts=(replace(first, count=4),)), "3 rows, the manifest says 4")
    refused(replace(manifest, parts=(replace(first, checksum=1),)), "not the file")
    # Two parts of the same length and count, the one in the place of the other.
    refused(replace(manifest, parts=(replace(first, file=second.file),)), "not the file")
    with pytest.raises(StagingError, match="more than 5 bytes"):
        verify(files, manifest, stamp=STAMP, payload_max_bytes=5)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"kind": RecordKind.CANCEL}, "not a new message"),
        ({"flags": 1}, "not a new message"),
        ({"subscription_id": 1}, "not for a subject"),
        ({"subject_id": 0}, "not for a subject"),
        ({"seq": 9}, "numbered"),
        ({"message_seq": 9}, "numbered"),
        ({"due_ms": START_MS + HOUR_MS}, "one hour"),
        ({"due_ms": 0}, "one hour"),
        ({"payload_offset": 3}, "one behind the other"),
        ({"payload_length": 4}, "empty"),
        ({"payload_crc": 1}, "its row names"),
    ],
)
def test_rows_that_must_not_be_there(
    files: SimulatedFiles, monkeypatch: pytest.MonkeyPatch, change: dict[str, int], text: str
) -> None:
    def encode_changed(kind: LogKind, data: bytes, blob: bytes, **rest: int) -> bytes:
        changed = np.frombuffer(data, SCHEDULE_DTYPE).copy()
        for name, value in change.items():
            changed[name][1] = value
        return encode(kind, changed.tobytes(), blob, **rest)

    monkeypatch.setattr(staging, "encode", encode_changed)
    manifest = stage(files, rows(3))
    with pytest.raises(StagingError, match=text):
        verify(files, manifest, stamp=STAMP, payload_max_bytes=BODY_MAX)


def test_verifying_can_be_watched_and_stopped(files: SimulatedFiles) -> None:
    manifest = stage(files, rows(3), rows(3, first=3))
    seen: list[int] = []
    verify(files, manifest, stamp=STAMP, payload_max_bytes=BODY_MAX, progress=seen.append)
    assert seen == [3, 6]

    def stop(done: int) -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        verify(files, manifest, stamp=STAMP, payload_max_bytes=BODY_MAX, progress=stop)


def test_what_was_verified_outlives_a_power_loss(files: SimulatedFiles) -> None:
    manifest = stage(files, rows(3))
    verify(files, manifest, stamp=STAMP, payload_max_bytes=BODY_MAX)
    files = files.crash()
    verify(files, manifest, stamp=STAMP, payload_max_bytes=BODY_MAX)


def test_what_was_verified_outlives_a_power_loss_also_if_a_sync_had_failed_before() -> None:
    for part in (1, 2):
        disk = SimulatedFiles()
        disk.make_directory(DIRECTORY)
        manifest = stage(disk, rows(3), rows(4, first=3))
        broken = FaultyFiles(disk, Faults(Fault(part, FaultKind.IO_ERROR), only={"fdatasync"}))
        with pytest.raises(SyncError):
            verify(broken, manifest, stamp=STAMP, payload_max_bytes=BODY_MAX)
        disk = disk.kill()
        verify(disk, manifest, stamp=STAMP, payload_max_bytes=BODY_MAX)
        assert seqs(disk.crash(), manifest) == [1, 2, 3, 4, 5, 6, 7]


def test_what_is_missing_later_is_named(files: SimulatedFiles) -> None:
    manifest = stage(files, rows(4, apart_ms=HOUR_MS), rows(2, first=4))
    first, second = (f"{DIRECTORY}/{part.file}" for part in manifest.parts)
    second_frame = frames(files, manifest)[1][1]
    flip(files, first, second_frame.offset + 70)
    files.unlink(second)
    found = list(StagedRows(files, manifest.parts, STAMP, 0))
    damage = [(before, one) for before, one in found if isinstance(one, Damage)]
    gaps = [(before + one.first_seq, before + one.last_seq) for before, one in damage]
    assert gaps[-1] == (5, 6)
    assert (2, 2) in gaps
    intact = [before + one.first_seq for before, one in found if isinstance(one, Frame)]
    assert intact == [1, 3, 4]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"format": 2}',
        '{"format": 1, "id": "a", "stamp": 1, "created_ms": 1, "on_conflict": "x", "parts": []}',
    ],
)
def test_a_manifest_that_is_none(files: SimulatedFiles, text: str) -> None:
    file = files.open(manifest_path("a"), create=True)
    file.pwrite([text.encode()], 0)
    file.close()
    with pytest.raises(StagingError, match="not a manifest"):
        read_manifest(files, "a")


def test_a_manifest_that_cannot_be_read(files: SimulatedFiles) -> None:
    write_manifest(files, stage(files, rows(1)))
    files.fail_reads(manifest_path("a"), 0, 1)
    with pytest.raises(StagingError, match="cannot be read"):
        read_manifest(files, "a")


def test_a_manifest_that_names_what_is_not_its_own(files: SimulatedFiles) -> None:
    part = Part("b.0.part", 1, 1, 1)
    for manifest, text in (
        (Manifest("a", STAMP, 1, ()), "no rows"),
        (Manifest("a", STAMP, 1, (part,)), "not a part"),
        (Manifest("a", STAMP, 1, (replace(part, file="../a.0.part"),)), "not a part"),
    ):
        write_manifest(files, manifest)
        with pytest.raises(StagingError, match=text):
            read_manifest(files, "a")
    files.rename(manifest_path("a"), manifest_path("c"))
    with pytest.raises(StagingError, match="manifest of 'a'"):
        read_manifest(files, "c")
    with pytest.raises(FileNotFoundError):
        read_manifest(files, "a")


def test_the_answer_to_a_conflict_is_kept(files: SimulatedFiles) -> None:
    manifest = replace(stage(files, rows(1)), on_conflict=OnConflict.KEEP)
    write_manifest(files, manifest)
    assert read_manifest(files, "a") == manifest


def test_names(files: SimulatedFiles) -> None:
    assert parse_manifest_path("imports/a-1_B.manifest") == "a-1_B"
    for path in (
        "a.manifest",
        "imports/a",
        "imports/.manifest",
        "imports/a.b.manifest",
        "imports/../a.manifest",
        "imports/x/a.manifest",
        f"imports/{'a' * 65}.manifest",
    ):
        assert parse_manifest_path(path) is None, path
    assert import_of("a.0.part") == import_of("a.manifest") == import_of("a.manifest.new") == "a"
    assert import_of("a.work") is import_of("a") is import_of("..part") is None


def test_deleting_takes_all_of_one_import(files: SimulatedFiles) -> None:
    stage(files, rows(2), rows(2))
    stage(files, rows(2), import_id="ab")
    staging.delete(files, "a")
    assert files.list(DIRECTORY) == ["ab.0.part", "ab.manifest"]
