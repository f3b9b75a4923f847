"""What became of messages as a table: what is wanted of it, what is damaged, and where it is read.

No Spark: the driver's part and that of the tasks, one after the other."""

import shutil
from collections import Counter
from pathlib import Path

import pytest
from pyspark.sql.datasource import DataSource

from delayserver.errors import InputError
from delayserver.pipeline.logs.source import DelayLog
from delayserver.pipeline.states.history import DelayHistory
from delayserver.pipeline.states.snapshot import OtherNodeError
from delayserver.pipeline.states.states import DelayState
from storage.errors import DamageError
from storage.message_log import DIRECTORY as MESSAGES
from storage.rows import HOUR_MS, LogKind
from tests.pipeline.reading import open_reader, read_table, sent
from tests.pipeline.store import HOUR, START_MS, Store

NOW_MS = START_MS + 3 * HOUR_MS


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """Two subjects in two hours that are retired, of them one message cancelled; two that wait."""
    store = Store(tmp_path_factory.mktemp("states") / "data", retention_ms=10**12)
    store.subscribe("mail", "order.*")
    store.subscribe("sms", "envelope")
    [first, *_] = store.publish("order.unpaid", [1000, 2000, HOUR_MS + 5])
    store.publish("envelope", [1500, HOUR_MS + 6])
    store.cancel(first + 1, 2000)
    store.run(2 * HOUR_MS + HOUR_MS // 2)
    store.checkpoint()
    store.publish("envelope", [9 * HOUR_MS, 9 * HOUR_MS + 1])
    store.kill()
    return store


@pytest.fixture
def damaged(store: Store, tmp_path: Path) -> Path:
    """A copy, in which the first hour of the schedule log does not verify."""
    copy = tmp_path / "data"
    shutil.copytree(store.root, copy)
    flip(copy / store.path(LogKind.SCHEDULE).relative_to(store.root))
    return copy


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[100] ^= 0xFF
    path.write_bytes(data)


def test_what_is_wanted_of_the_states(store: Store) -> None:
    def counted(**options: object) -> Counter[tuple[object, ...]]:
        table = read_table(DelayState, store.root, "subject", "state", now_ms=NOW_MS, **options)
        return Counter(tuple(row.values()) for row in table.to_pylist())

    everything = counted()
    assert everything == {
        ("order.unpaid", "delivered"): 2,
        ("order.unpaid", "cancelled"): 1,
        ("envelope", "delivered"): 2,
        ("envelope", "pending"): 2,
    }
    assert counted(subject="envelope", state="delivered,dead") == {("envelope", "delivered"): 2}
    assert counted(subscription="mail") == {("order.unpaid", "delivered"): 2}
    assert counted(to=START_MS + HOUR_MS).total() == 3
    assert counted(from_=START_MS + 1500, to=START_MS + HOUR_MS + 6).total() == 3
    assert counted(seq="..0").total() == 0
    with pytest.raises(InputError, match=r"names shard 1, but .* has shard 0"):
        counted(shard="0,1")


def test_what_is_not_settled_has_no_time(store: Store) -> None:
    table = read_table(DelayState, store.root, "state", "settled", "lateness_ms", now_ms=NOW_MS)
    for state, settled, lateness_ms in zip(*table.to_pydict().values(), strict=True):
        assert (settled is not None) == (lateness_ms is not None) == (state == "delivered")


def test_what_is_wanted_of_the_history(store: Store) -> None:
    assert read_table(DelayHistory, store.root, "id").num_rows == 5
    for options, count in (
        ({"subject": "order.unpaid"}, 3),
        ({"from_": START_MS + HOUR_MS}, 2),
        ({"from_": START_MS + 1500, "to": START_MS + 2001}, 2),
        ({"subject": "envelope", "to": START_MS + HOUR_MS}, 1),
    ):
        assert read_table(DelayHistory, store.root, "id", **options).num_rows == count


@pytest.mark.damaged("a frame of the schedule log")
@pytest.mark.parametrize("source", [DelayState, DelayLog, DelayHistory])
def test_damage_ends_a_read_whatever_of_the_hour_is_wanted(
    damaged: Path, source: type[DataSource]
) -> None:
    in_the_hour = {"from_": START_MS, "to": START_MS + 1}
    for wanted in ({}, {"subject": "envelope"}, in_the_hour, {"seq": "..999"}):
        with pytest.raises(DamageError, match="is damaged at offset 0"):
            read_table(source, damaged, **wanted)
    # Another hour is whole.
    assert read_table(source, damaged, "seq", from_=START_MS + HOUR_MS).num_rows >= 2


@pytest.mark.damaged("a frame of the schedule log")
@pytest.mark.parametrize("source", [DelayState, DelayLog, DelayHistory])
def test_damage_is_rows_where_that_is_asked_for(damaged: Path, source: type[DataSource]) -> None:
    for wanted in ({}, {"subject": "envelope"}):
        table = read_table(source, damaged, damage="rows", **wanted)
        places = [row for row in table.column("_corrupt").to_pylist() if row is not None]
        assert len(places) == 1 and places[0]["file"].startswith("schedule/")
        assert table.num_rows > 1
    assert "_corrupt" not in read_table(source, damaged, from_=START_MS + HOUR_MS).column_names
    with pytest.raises(InputError, match="the schema must have the column _corrupt"):
        read_table(source, damaged, "seq", damage="rows")
    # A column that could name it does not ask for it.
    with pytest.raises(DamageError):
        read_table(source, damaged, "seq", "_corrupt")


@pytest.mark.damaged("a frame of the message log")
def test_damage_of_the_message_log_concerns_every_hour(store: Store, tmp_path: Path) -> None:
    copy = tmp_path / "data"
    shutil.copytree(store.root, copy)
    # Behind the first frame others follow, so it is no torn tail.
    flip(min((copy / MESSAGES).iterdir()))
    with pytest.raises(DamageError, match="messages/"):
        read_table(DelayState, copy, from_=START_MS, to=START_MS + 1)
    with pytest.raises(DamageError, match="messages/"):
        read_table(DelayState, copy, from_=START_MS + 99 * HOUR_MS)


@pytest.mark.damaged("a frame of the schedule log")
def test_deliveries_whose_subject_is_damaged_are_not_left_out_in_silence(damaged: Path) -> None:
    for segment in (damaged / MESSAGES).iterdir():
        segment.unlink()  # It tells the subjects of what was filed just now, too.
    everything = read_table(DelayLog, damaged, "seq", "subject", log="dispatch")
    assert everything.num_rows == 4
    assert everything.column("subject").null_count == 2
    with pytest.raises(DamageError, match="schedule/"):
        read_table(DelayLog, damaged, "seq", log="dispatch", subject="envelope")
    rows = read_table(
        DelayLog, damaged, "seq", "_corrupt", log="dispatch", subject="envelope", damage="rows"
    )
    assert (rows.num_rows, rows.column("_corrupt").null_count) == (2, 1)


@pytest.mark.parametrize("source", [DelayState, DelayLog, DelayHistory])
def test_a_task_that_sees_another_directory_ends_with_a_word(
    store: Store, tmp_path: Path, source: type[DataSource]
) -> None:
    copy, away = tmp_path / "data", tmp_path / "away"
    shutil.copytree(store.root, copy)
    reader, _ = open_reader(source, copy)
    (part, *_) = reader.partitions()
    assert list(reader.read(sent(part)))
    copy.rename(away)
    advice = "does not see .*/data, or sees another directory there; mount it under the same path"
    with pytest.raises(OtherNodeError, match=advice):
        list(reader.read(sent(part)))
    copy.mkdir()  # As a mount point is, where nothing is mounted.
    with pytest.raises(OtherNodeError):
        list(reader.read(sent(part)))
    another = Store(tmp_path / "another", shard=1)
    another.kill()
    shutil.copy(Path(another.root) / "FORMAT", copy / "FORMAT")
    with pytest.raises(OtherNodeError):
        list(reader.read(sent(part)))


def test_the_hour_of_the_store_is_the_first(store: Store) -> None:
    hours = read_table(DelayState, store.root, "hour", now_ms=NOW_MS).column("hour").to_pylist()
    assert min(hours) == HOUR
