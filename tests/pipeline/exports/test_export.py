"""Exports: the same rows as in the directory, what has grown alone, and nothing half-done."""

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from pyspark.sql import SparkSession

from delayserver.errors import InputError, PipelineError
from delayserver.pipeline.audits.on_spark import audit
from delayserver.pipeline.exports import place as places
from delayserver.pipeline.exports.export import Exported, _ShardExporter, export
from delayserver.pipeline.exports.exported import BLOCK_BYTES, NotAnExportError, open_export
from delayserver.pipeline.exports.manifest import MOMENTS, POINTER, SHARDS
from delayserver.pipeline.exports.place import is_url, open_place, shown_url
from delayserver.pipeline.progress import Job
from delayserver.pipeline.reports.forecast import forecast
from delayserver.pipeline.states.snapshot import Directory, open_directories
from delayserver.records.tables import HourState
from storage.errors import CatalogError, DamageError, DiskError
from storage.files import OsFiles
from storage.frame import Rows
from storage.kinds import DirectoryMark, Kind, write_mark
from storage.rows import HOUR_MS, LogKind
from tests.pipeline.states.test_settlement import settle_all
from tests.pipeline.store import START_MS, Store, make_shards

NOW_MS = START_MS + 3 * HOUR_MS


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Messages of three hours, some delivered, cancelled, moved and filed, some not; stopped."""
    made = Store(tmp_path / "data")
    made.subscribe("mail", "order.*")
    seqs = made.publish("order.paid", [1000 * n for n in range(40)])
    made.publish("order.late", [HOUR_MS + 1000 * n for n in range(40)])
    made.cancel(seqs[30], 30_000)
    made.run(20_000)
    made.checkpoint()
    made.move(seqs[35], 35_000, 2 * HOUR_MS, "order.paid")
    made.run(25_000)
    made.kill()  # LMDB opens a catalog once in a process.
    return made


def go_on(store: Store) -> None:
    """Some more hours are filled, settled and filed."""
    store.start()
    store.publish("order.paid", [HOUR_MS + 50_000 + n for n in range(20)])
    store.run(HOUR_MS + 30_000)
    store.checkpoint()
    store.stop()


def states_of(root: str) -> Rows:
    """What became of everything in a directory of one server, or in its export."""
    (directory,) = open_directories(root)
    return _states(directory)


def _states(directory: Directory) -> Rows:
    with directory.catalog() as catalog:
        rows, damage = settle_all(directory.files, catalog, NOW_MS)
    assert damage == []
    return rows[np.lexsort((rows["subscription_id"], rows["seq"]))]


def export_of(store: Store, to: str) -> Exported:
    return export(store.root, to, now_ms=NOW_MS)


def test_an_export_holds_what_the_directory_holds(store: Store, tmp_path: Path) -> None:
    to = str(tmp_path / "export")
    (shard,) = export_of(store, to).shards
    wanted = states_of(store.root)
    assert len(wanted) > 80 and len(set(wanted["state"].tolist())) > 3
    assert np.array_equal(states_of(to), wanted)
    assert shard.copied_bytes == shard.total_bytes > 0


def test_the_next_export_adds_what_has_grown(store: Store, tmp_path: Path) -> None:
    to = str(tmp_path / "export")
    export_of(store, to)
    before = set(open_place(to).names())
    (idle,) = export_of(store, to).shards
    new = {name for name in open_place(to).names() if name not in before}
    assert {name.partition("/")[0] for name in new} == {"catalog", "moments"}
    go_on(store)
    (grown,) = export_of(store, to).shards
    assert idle.copied_bytes < grown.copied_bytes < grown.total_bytes
    assert np.array_equal(states_of(to), states_of(store.root))


def test_who_reads_an_export_goes_on_while_the_next_is_made(store: Store, tmp_path: Path) -> None:
    to = str(tmp_path / "export")
    export_of(store, to)
    (directory,) = open_directories(to)
    wanted = states_of(to)
    go_on(store)
    export_of(store, to)
    open_export.cache_clear()  # as in another process
    assert np.array_equal(_states(directory), wanted)
    export_of(store, to)
    export_of(store, to)
    open_export.cache_clear()
    with pytest.raises(DiskError, match="two exports were made since"):
        _states(directory)


def test_what_is_filed_and_deleted_while_an_export_is_made_is_in_it(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The catalog does not know of it yet, and the message log has it no more a moment later."""
    to, segments = str(tmp_path / "export"), Path(store.root) / "messages"
    wanted, unfiled = states_of(store.root), set(segments.glob("*.messages"))
    of_catalog = _ShardExporter._catalog

    def files_behind_it(exporter: _ShardExporter) -> tuple[bytes, dict[int, HourState], int]:
        found = of_catalog(exporter)
        go_on(store)
        return found

    with monkeypatch.context() as patched:
        patched.setattr(_ShardExporter, "_catalog", files_behind_it)
        export_of(store, to)
    assert unfiled.isdisjoint(segments.glob("*.messages"))
    assert set(wanted["seq"].tolist()) <= set(states_of(to)["seq"].tolist())


def test_a_file_that_was_written_anew_is_copied_whole(store: Store, tmp_path: Path) -> None:
    to = str(tmp_path / "export")
    export_of(store, to)
    path = store.path(LogKind.DISPATCH)
    data = path.read_bytes()
    go_on(store)
    (grown,) = export_of(store, to).shards
    # What a power loss took, and others came in its place: the last bytes differ.
    sound = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]) + sound[len(data) :])
    (again,) = export_of(store, to).shards
    exported = open_directories(to)[0].files.open(f"dispatch/{path.name}")
    assert exported.pread(len(data), 0) == path.read_bytes()[: len(data)]
    assert again.copied_bytes > grown.copied_bytes // 2
    path.write_bytes(sound)


@pytest.mark.parametrize("object_number", [0, 1, 3, 5])
def test_an_export_that_is_killed_leaves_the_one_before_it(
    store: Store, tmp_path: Path, object_number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    to = str(tmp_path / "export")
    export_of(store, to)
    wanted = states_of(to)
    go_on(store)
    write: Callable[..., None] = places._LocalPlace.write
    count = 0

    def failing(self: object, name: str, data: bytes) -> None:
        nonlocal count
        count += 1
        if count > object_number:
            raise KeyboardInterrupt
        write(self, name, data)

    with monkeypatch.context() as patched:
        patched.setattr(places._LocalPlace, "write", failing)
        with pytest.raises(KeyboardInterrupt):
            export_of(store, to)
    assert np.array_equal(states_of(to), wanted)
    export_of(store, to)
    export_of(store, to)
    assert np.array_equal(states_of(to), states_of(store.root))
    (directory,) = open_directories(to)
    files = open_export(directory.root, directory.moment)
    known = {POINTER, *files.manifest.names}
    rest = {name for name in open_place(to).names() if name not in known}
    # The one before it has nothing else of its own.
    assert {name.partition("/")[0] for name in rest} == {"catalog", MOMENTS}


def test_several_shards(tmp_path: Path) -> None:
    root, to = tmp_path / "data", str(tmp_path / "export")
    for number, store in enumerate(make_shards(root)):
        store.subscribe("mail", "order.*")
        store.publish("order.paid", [1000 * n for n in range(10 + number)])
        store.run(5000)
        store.stop()
    done = export(str(root), to, now_ms=NOW_MS)
    assert [one.shard for one in done.shards] == [0, 1, 2]
    for exported, directory in zip(open_directories(to), open_directories(str(root)), strict=True):
        assert exported.prefix == directory.prefix
        assert np.array_equal(_states(exported), _states(directory))
    open_place(to).delete(f"shard-0001/{POINTER}")
    with pytest.raises(NotAnExportError, match="shard-0001"):
        open_directories(to)
    one = Store(tmp_path / "one")
    one.stop()
    with pytest.raises(PipelineError, match="3 shards"):
        export(one.root, to, now_ms=NOW_MS)
    assert SHARDS in open_place(to).names()


def test_another_directory_is_refused(store: Store, tmp_path: Path) -> None:
    to = str(tmp_path / "export")
    export_of(store, to)
    write_mark(OsFiles(store.root), DirectoryMark(Kind.DATA, "the next life"))
    with pytest.raises(PipelineError, match="before or after it was restored"):
        export_of(store, to)
    other = Store(tmp_path / "other", shard=1)
    other.stop()
    with pytest.raises(PipelineError, match="another data directory"):
        export_of(other, to)
    with pytest.raises(PipelineError, match="is the server's"):
        export_of(store, f"{store.root}/export")


def test_what_is_damaged_is_named(store: Store, tmp_path: Path) -> None:
    to = tmp_path / "export"
    export_of(store, str(to))
    (directory,) = open_directories(str(to))
    files = open_export(directory.root, directory.moment)

    def flip(name: str, offset: int = 100) -> Callable[[], object]:
        data = bytearray((to / name).read_bytes())
        data[offset] ^= 1
        whole = (to / name).read_bytes()
        (to / name).write_bytes(data)
        open_export.cache_clear()
        return lambda: (to / name).write_bytes(whole)

    mend = flip(POINTER, 20)
    with pytest.raises(DamageError, match="moment"):
        open_directories(str(to))
    mend()
    mend = flip(files.manifest.name)
    with pytest.raises(DamageError):
        open_directories(str(to))
    mend()
    mend = flip(files.manifest.catalog)
    with pytest.raises((DamageError, CatalogError), match="checksum"):
        states_of(str(to))
    mend()
    schedule = next(one for one in files.manifest.files if one.path.startswith("schedule/"))
    mend = flip(schedule.pieces[0].name)
    with directory.catalog() as catalog:
        _, damage = settle_all(directory.files, catalog, NOW_MS)
    assert damage and damage[0].path == schedule.path
    mend()
    with (to / schedule.pieces[0].name).open("r+b") as file:
        file.truncate(200)
    open_export.cache_clear()
    with directory.catalog() as catalog:
        _, damage = settle_all(directory.files, catalog, NOW_MS)
    assert damage and "too short" in damage[0].reason


@pytest.mark.parametrize("kind", [LogKind.MESSAGE, LogKind.SCHEDULE, LogKind.DISPATCH])
@pytest.mark.parametrize("where", [0.3, 0.7])
def test_an_export_names_rot_and_does_not_keep_it(
    store: Store, tmp_path: Path, kind: LogKind, where: float
) -> None:
    """The next export takes a repaired file of the same length, ends and time."""
    if kind is LogKind.MESSAGE:
        (path,) = (Path(store.root) / "messages").glob("*.messages")
    else:
        path = store.path(kind)
    to, sound = str(tmp_path / "export"), path.read_bytes()
    (whole,) = export(store.root, str(tmp_path / "whole"), now_ms=NOW_MS).shards
    name = str(path.relative_to(store.root))
    length = _exported_bytes(tmp_path / "whole", name)
    rotten = bytearray(sound)
    rotten[int(len(length) * where)] ^= 0xFF
    path.write_bytes(rotten)
    (first,) = export_of(store, to).shards
    assert first.damage and all(name in text for text in first.damage)
    assert _exported_bytes(Path(to), name) == rotten[: len(length)]
    path.write_bytes(sound)
    (second,) = export_of(store, to).shards
    assert second.damage == []
    assert _exported_bytes(Path(to), name) == length
    assert np.array_equal(states_of(to), states_of(store.root))
    (third,) = export_of(store, to).shards
    assert third.copied_bytes < second.copied_bytes
    assert whole.damage == []


def _exported_bytes(to: Path, path: str) -> bytes:
    """Returns the bytes of a file at the newest moment of an export."""
    open_export.cache_clear()
    (directory,) = open_directories(str(to))
    file = directory.files.open(path)
    return file.pread(file.size(), 0)


def test_a_shard_that_the_export_does_not_count_is_damage(tmp_path: Path) -> None:
    root, to = tmp_path / "data", tmp_path / "export"
    for store in make_shards(root):
        store.stop()
    export(str(root), str(to), now_ms=NOW_MS)
    (to / SHARDS).write_text('{"shards": 2}')
    with pytest.raises(DamageError, match="2 shards, and shard-0002 stands beside it"):
        open_directories(str(to))


def test_bytes_across_pieces_and_blocks(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from delayserver.pipeline.exports import export as exports

    monkeypatch.setattr(exports, "PIECE_BYTES", 1000)
    to = str(tmp_path / "export")
    export_of(store, to)
    (directory,) = open_directories(to)
    path = store.path(LogKind.SCHEDULE)
    whole = path.read_bytes()
    file = directory.files.open(f"schedule/{path.name}")
    for offset, length in (
        (0, 10),
        (995, 10),
        (0, len(whole)),
        (len(whole) - 5, 100),
        (1000, 2000),
    ):
        assert file.pread(length, offset) == whole[offset : offset + length][: file.size() - offset]
    assert file.pread(10, file.size() + 5) == b""
    assert BLOCK_BYTES > 1000


def test_places(tmp_path: Path) -> None:
    assert [is_url(path) for path in ("data", "/srv", "file:///srv", "s3://b/x")] == [
        False,
        False,
        False,
        True,
    ]
    with pytest.raises(InputError, match="s3://"):
        open_place("ftp://host/x")
    assert shown_url("s3://key:se%2Fcret@b/x?endpoint_override=h:1") == "s3://b/x"
    local = open_place(f"file://{tmp_path}/place")
    remote = places._RemotePlace(f"file://{tmp_path}/place")  # as pyarrow has it
    for place in (local, remote):
        place.write("a/b", b"first")
        place.write("a/b", b"second")
        place.write("c", b"")
        assert (place.read("a/b"), place.read("c")) == (b"second", b"")
        assert place.read_piece("a/b", 3, 2) == b"con"
        assert place.read_piece("a/b", 30, 4) == b"nd"
        assert place.names() == ["a/b", "c"]
        with pytest.raises(FileNotFoundError):
            place.read("d")
        with pytest.raises(FileNotFoundError):
            place.read_piece("d", 1, 0)
        place.delete("c")
        place.delete("c")
        assert place.names() == ["a/b"]


def test_the_jobs_read_an_export_and_shards_in_several_places(
    spark: SparkSession, tmp_path: Path
) -> None:
    root, to = tmp_path / "data", tmp_path / "export"
    for store in make_shards(root):
        store.subscribe("mail", "order.*")
        store.publish("order.paid", [1000 * n for n in range(10)])
        store.run(5000)
        store.stop()
    export(str(root), str(to), now_ms=NOW_MS)
    elsewhere = tmp_path / "elsewhere"
    shutil.move(root / "shard-0002", elsewhere)
    # One shard stands alone, and of one there is the export alone.
    places = [str(elsewhere), str(root / "shard-0000"), str(to / "shard-0001")]
    job = Job(spark)
    for roots in ([str(to)], places):
        found = audit(job, *roots, now_ms=NOW_MS)
        assert found.is_clean and found.shards == 3
        assert (found.messages["accepted"], found.messages["delivered"]) == (30, 18)
        assert forecast(job, *roots, now_ms=START_MS + 5000).waiting == 12
    states = spark.read.format("delaystate").load(places)
    assert sorted(row.shard for row in states.select("shard").distinct().collect()) == [0, 1, 2]
    log = spark.read.format("delaylog").options(log="message", payload="true").load(str(to))
    assert log.where("body is not null").count() == 30
    history = spark.read.format("delayhistory").load(str(to))
    assert history.count() == 0  # No hour has ended.
    with pytest.raises(InputError, match="both shard 0"):
        open_directories(str(to / "shard-0000"), str(root / "shard-0000"))
