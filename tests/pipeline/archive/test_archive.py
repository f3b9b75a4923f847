"""The archive against a real server: what it holds, what a kill leaves, what is noticed."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partialmethod
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.table import StaticTable, Table
from pyspark.sql import SparkSession
from typer.testing import CliRunner

from delayserver.cli import make_app
from delayserver.errors import InputError, PipelineError
from delayserver.pipeline import session as sessions
from delayserver.pipeline.archive import archive as archives
from delayserver.pipeline.archive.archive import FORMER_OWNER, run
from delayserver.pipeline.archive.catalog import DirectoryCatalog
from delayserver.pipeline.archive.job import (
    Archive,
    ArchiveCalls,
    ArchiveFormat,
    ArchiveRun,
    HourFate,
)
from delayserver.pipeline.archive.place import LOCK, ArchivePlace
from delayserver.pipeline.archive.plain import STAGING
from delayserver.pipeline.archive.table import HOURS_PROPERTY, RUNS, ArchiveTable
from delayserver.pipeline.progress import Job
from delayserver.pipeline.states.snapshot import open_directory
from delayserver.records.message import Content
from storage.buckets import hour_name
from storage.rows import HOUR_MS, LogKind
from tests.integration.api_support import ApiServer, now_ms
from tests.pipeline.quick import QUICK_CONF
from tests.pipeline.store import FAILED, HOUR, OK, START_MS, Store
from tests.waiting import wait_until

MINUTE_MS = 60_000

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """A day of a server: its directory belongs to the real one afterwards."""
    return Store(tmp_path / "data", retention_ms=10 * 365 * 24 * HOUR_MS)


@pytest.fixture
def serve(tmp_path: Path, store: Store) -> Iterator[Callable[..., ApiServer]]:
    """Starts a real server on the directory, which keeps hours until they are archived."""
    servers: list[ApiServer] = []

    def start(**settings: object) -> ApiServer:
        store.stop()
        given = {"archive": True, "retention_ms": 0, "checkpoint_ms": 50, **settings}
        servers.append(ApiServer(tmp_path, **given))
        servers[0].start()
        return servers[0]

    yield start
    for server in servers:
        server.shut_down()


@pytest.fixture(scope="module")
def lasting_api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """A server with two hours that are settled, and never deleted."""
    directory = tmp_path_factory.mktemp("lasting")
    retention_ms = 10 * 365 * 24 * HOUR_MS
    store = Store(directory / "data", retention_ms=retention_ms)
    settled(store, hours=2)
    store.stop()
    server = ApiServer(directory, archive=True, retention_ms=retention_ms, checkpoint_ms=50)
    server.start()
    wait_until(lambda: len(waiting(server)) == 2)
    yield server
    server.shut_down()


@pytest.fixture
def lasting(lasting_api: ApiServer, monkeypatch: pytest.MonkeyPatch) -> ApiServer:
    """That server; what it was told of is listed as well, so that it is archived each time."""
    call = ArchiveCalls.call

    def listing(self: ArchiveCalls, method: str, path: str, *rest: Any) -> Any:
        return call(self, method, path.replace("archives?", "archives?state=all&"), *rest)

    monkeypatch.setattr(ArchiveCalls, "call", listing)
    return lasting_api


@pytest.fixture
def job(spark: SparkSession) -> Job:
    return Job(spark)


def settled(store: Store, hours: int = 1) -> None:
    """So many hours of ten messages to two subjects each, all delivered."""
    store.subscribe("one", "order.*")
    for hour in range(hours):
        for number in range(5):
            due_ms = hour * HOUR_MS + MINUTE_MS + number
            store.publish("order.paid", [due_ms])
            store.publish("order.unpaid", [due_ms])
    store.run((hours + 1) * HOUR_MS)
    store.checkpoint()


def wanted(api: ApiServer, to: Path | str, **rest: Any) -> Archive:
    return Archive([str(api.data_dir)], str(to), str(api.base_url), wait_s=5, **rest)


def waiting(api: ApiServer) -> list[dict[str, Any]]:
    hours: list[dict[str, Any]] = api.ask("GET", "/v1/archives?limit=1000")["hours"]
    return hours


def table_at(to: Path) -> Table:
    found = DirectoryCatalog(ArchivePlace(str(to))).find()
    assert found is not None
    return found


def rows_of(to: Path) -> list[dict[str, Any]]:
    """What a data team reads, with another tool."""
    found = StaticTable.from_metadata(str(to)).scan().to_arrow()
    rows: list[dict[str, Any]] = found.sort_by("seq").to_pylist()
    return rows


def data_files(to: Path) -> list[Path]:
    return sorted(to.glob("data/*/*/*.parquet"))


def fates(archived: ArchiveRun) -> list[HourFate]:
    return [hour.fate for hour in archived.hours]


def stamp_of(api: ApiServer) -> int:
    return open_directory(str(api.data_dir)).stamp


def files_of(api: ApiServer, hour: int = HOUR) -> list[Path]:
    return list(api.data_dir.glob(f"*/{hour_name(hour)}.*"))


# ---- what it holds -----------------------------------------------------------------------------


def test_every_message_is_there_with_what_became_of_it(
    store: Store, serve: Callable[..., ApiServer], job: Job, tmp_path: Path
) -> None:
    store.subscribe("one", "order.*")
    store.subscribe("two", "order.paid", max_attempts=1)
    (paid,) = store.publish("order.paid", [1000], key="k", headers={"b": "2", "a": "1"})
    (binary,) = store.publish("order.unpaid", [1001], content=Content.BINARY)
    (cancelled,) = store.publish("order.unpaid", [2000])
    (moved,) = store.publish("order.unpaid", [3000])
    store.cancel(cancelled, 2000)
    store.move(moved, 3000, HOUR_MS + 5, "order.unpaid")
    (failing,) = store.publish("envelope.lost", [4000])
    store.subscribe("three", "envelope.*")
    store.run(3 * HOUR_MS, lambda subject: FAILED if subject == "envelope.lost" else OK)
    store.checkpoint()
    ids = store.server.engine.ids
    api = serve()
    to = tmp_path / "archive"
    archived = run(job, wanted(api, to))
    assert fates(archived) == [HourFate.ARCHIVED, HourFate.ARCHIVED]
    assert archived.is_kept
    rows = rows_of(to)
    by_seq = {row["seq"]: row for row in rows}
    assert sum(hour.count for hour in archived.hours) == len(rows) == 7

    row = by_seq[paid]
    assert row["id"] == ids.encode(START_MS + 1000, paid)
    assert (row["store"], row["shard"]) == (f"{stamp_of(api):08x}", 0)
    assert (row["subject"], row["key"]) == ("order.paid", "k")
    assert row["headers"] == [("b", "2"), ("a", "1")]
    assert (json.loads(row["body"]), row["body_bytes"]) == ({"n": 1000}, None)
    assert row["due"].timestamp() * 1000 == START_MS + 1000
    assert row["filed"] <= row["due"]
    assert (row["state"], row["made_by"], row["attempt"]) == ("delivered", "publish", 1)
    assert [one["subscription"] for one in row["deliveries"]] == ["one", "two"]
    for one in row["deliveries"]:
        assert (one["state"], one["attempt"]) == ("delivered", 1)
        assert one["lateness_ms"] >= 0
        assert (one["settled"] - row["due"]).total_seconds() * 1000 == one["lateness_ms"]

    assert (by_seq[binary]["body"], by_seq[binary]["body_bytes"]) == (None, b'{"n": 1001}')
    assert (by_seq[cancelled]["state"], by_seq[cancelled]["deliveries"]) == ("cancelled", [])

    entries = [row for row in rows if row["message_seq"] == moved]
    assert [row["state"] for row in entries] == ["moved", "delivered"]
    assert [row["made_by"] for row in entries] == ["publish", "move"]
    assert {row["id"] for row in entries} == {ids.encode(START_MS + 3000, moved)}

    attempts = [row for row in rows if row["message_seq"] == failing]
    assert [row["attempt"] for row in attempts] == [1, 2]
    assert [row["state"] for row in attempts] == ["retried", "dead"]
    assert [row["made_by"] for row in attempts] == ["publish", "retry"]
    assert [one["state"] for row in attempts for one in row["deliveries"]] == ["retried", "dead"]
    assert attempts[1]["deliveries"][0]["settled"] is None

    wait_until(lambda: not files_of(api))
    assert waiting(api) == []
    assert not list(to.glob(f"{RUNS}/*"))


def test_days_and_buckets_sorted_by_due_time_and_read_by_all(
    store: Store, serve: Callable[..., ApiServer], job: Job, tmp_path: Path
) -> None:
    settled(store, hours=3)
    api = serve()
    to = tmp_path / "a place"
    archived = run(job, wanted(api, to.as_uri(), buckets=4))
    assert fates(archived) == [HourFate.ARCHIVED] * 3
    paths = [path.relative_to(to).parts for path in data_files(to)]
    assert {parts[1] for parts in paths} == {"due_day=2026-05-31"}
    assert len({parts[2] for parts in paths}) == len(paths) == 2
    for path in data_files(to):
        due = pq.read_table(path)["due"].to_pylist()
        assert due == sorted(due) and len(due) == 15
    found = table_at(to)
    snapshot = found.current_snapshot()
    assert snapshot is not None and snapshot.summary is not None
    hours = json.loads(str(snapshot.summary[HOURS_PROPERTY]))
    assert [(one["hour"], one["count"], one["last_seq"] > 0) for one in hours] == [
        (hour_name(HOUR + number), 10, True) for number in range(3)
    ]
    # One subject is in one bucket, and an hour in a part of a file: both are found by the plan.
    assert len(list(found.scan("subject = 'order.paid'").plan_files())) == 1
    assert not list(found.scan(f"hour = {HOUR + 7}").plan_files())

    expected = [("order.paid", "delivered", 15), ("order.unpaid", "delivered", 15)]
    read = job.spark.read.format("delayarchive").load(str(to))
    counts = read.groupBy("subject", "state").count().collect()
    assert sorted(tuple(row) for row in counts) == expected
    ids = job.spark.read.format("delayarchive").schema("id string").load(str(to))
    assert ids.distinct().count() == 30
    with duckdb.connect() as database:
        rows = found.scan().to_arrow()  # noqa: F841  (DuckDB sees it by its name)
        query = "select subject, state, count(*) from {} group by all order by all"
        assert database.sql(query.format("rows")).fetchall() == expected
        files = f"read_parquet({[str(path) for path in data_files(to)]})"
        assert database.sql(query.format(files)).fetchall() == expected


def test_plain_parquet_is_one_file_for_each_hour(
    lasting: ApiServer, job: Job, tmp_path: Path
) -> None:
    to = tmp_path / "archive"
    for _ in range(2):
        archived = run(job, wanted(lasting, to, format=ArchiveFormat.PARQUET))
        assert fates(archived) == [HourFate.ARCHIVED] * 2
        names = {path.name for path in to.iterdir()}
        assert names == {LOCK, STAGING, "date=2026-05-31"}
        files = sorted(to.glob("date=*/*.parquet"))
        assert [path.name.partition(".")[0] for path in files] == [
            hour_name(HOUR),
            hour_name(HOUR + 1),
        ]
        assert [pq.read_metadata(path).num_rows for path in files] == [10, 10]
        assert not list(to.glob(f"{STAGING}/*"))
    assert job.spark.read.parquet(str(to)).where("subject = 'order.paid'").count() == 10


def test_only_hours_that_ended_by_then_and_none_in_a_dry_run(
    store: Store, serve: Callable[..., ApiServer], job: Job, tmp_path: Path
) -> None:
    settled(store, hours=3)
    api = serve()
    to = tmp_path / "archive"
    found = run(job, wanted(api, to, dry_run=True, until_ms=START_MS + 2 * HOUR_MS))
    assert fates(found) == [HourFate.SOUND, HourFate.SOUND]
    assert not to.exists()
    archived = run(job, wanted(api, to, until_ms=START_MS + 2 * HOUR_MS - 1))
    assert [hour.hour for hour in archived.hours] == [hour_name(HOUR)]
    assert len(waiting(api)) == 2
    assert fates(run(job, wanted(api, to))) == [HourFate.ARCHIVED] * 2
    assert fates(run(job, wanted(api, to))) == []
    assert len(rows_of(to)) == 30


def test_an_archive_of_the_former_format_is_left_alone(
    store: Store, serve: Callable[..., ApiServer], job: Job, tmp_path: Path
) -> None:
    settled(store)
    api = serve()
    to = tmp_path / "archive"
    to.mkdir()
    (to / FORMER_OWNER).write_text('{"format": 1, "stamp": 5}')
    with pytest.raises(PipelineError, match="stays readable"):
        run(job, wanted(api, to))
    assert len(waiting(api)) == 1


def test_one_job_at_a_time(lasting: ApiServer, job: Job, tmp_path: Path) -> None:
    to = tmp_path / "archive"
    with ArchivePlace(str(to)).locked(), pytest.raises(PipelineError, match="another job"):
        run(job, wanted(lasting, to))
    assert [path.name for path in to.iterdir()] == [LOCK]


# ---- a kill at any point -----------------------------------------------------------------------

CALLS = (
    (ArchivePlace, "create"),
    (ArchivePlace, "replace"),
    (ArchivePlace, "sync"),
    (ArchivePlace, "delete"),
    (ArchiveCalls, "confirm"),
)
"""All that changes anything, but for what Spark and pyiceberg write."""


class Killed(BaseException):
    """The job ends here, and cleans nothing up."""


class Killer:
    """Ends a job before its call number `at`."""

    def __init__(self, at: int) -> None:
        self.at, self.calls = at, 0

    def plant(self, patch: pytest.MonkeyPatch) -> None:
        for kind, name in CALLS:
            patch.setattr(kind, name, self._mortal(getattr(kind, name)))

    def _mortal(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            self.calls += 1
            if self.calls == self.at:
                raise Killed
            return original(*arguments, **named)

        return call


def check_archive(to: Path, count: int) -> None:
    """So many rows, none twice; and no file that no snapshot names."""
    rows = rows_of(to)
    assert len({row["seq"] for row in rows}) == len(rows) == count
    assert ArchiveTable(ArchivePlace(str(to))).sweep() == []


CALL_COUNT = 11
"""Of a run that archives an hour of two subjects: a note, the first version, its hint, two syncs,
the second version, its hint, the server, the note; and twice a temporary name is deleted."""


def test_a_run_has_so_many_calls(
    lasting: ApiServer, job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killer = Killer(0)
    killer.plant(monkeypatch)
    run(job, wanted(lasting, tmp_path / "archive", until_ms=START_MS + HOUR_MS))
    assert killer.calls == CALL_COUNT


@pytest.mark.parametrize("at", (2, 4, 5, 7, 8, 9, 10, 11))
def test_after_a_kill_at_any_call_nothing_is_missing_and_nothing_there_twice(
    lasting: ApiServer, job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    to = tmp_path / "archive"
    with monkeypatch.context() as patch:
        Killer(at).plant(patch)
        with pytest.raises(Killed):
            run(job, wanted(lasting, to, until_ms=START_MS + HOUR_MS))
    assert fates(run(job, wanted(lasting, to))) == [HourFate.ARCHIVED] * 2
    check_archive(to, 20)


@pytest.mark.timeout(400)
def test_a_job_that_is_killed_by_the_system_is_run_again(
    store: Store, serve: Callable[..., ApiServer], job: Job, tmp_path: Path
) -> None:
    settled(store, hours=3)
    api = serve()
    to = tmp_path / "archive"
    command = [sys.executable, "-m", "delayserver", "pipeline", "archive"]
    options = {"--data-dir": api.data_dir, "--to": to, "--server": api.base_url}
    arguments = [str(part) for pair in options.items() for part in pair]
    process = subprocess.Popen(
        [*command, *arguments, "--master", "local[2]", *QUICK_CONF],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        # It starts a Spark of its own.
        wait_until(lambda: data_files(to) or process.poll() is not None, timeout_s=240)
        assert process.poll() is None
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert len(waiting(api)) == 3
    assert fates(run(job, wanted(api, to))) == [HourFate.ARCHIVED] * 3
    # A worker may have outlived the job, and have written behind the next one's back.
    ArchiveTable(ArchivePlace(str(to))).sweep()
    check_archive(to, 30)
    wait_until(lambda: not list(api.data_dir.glob("schedule/*")))


def test_a_server_that_is_killed_is_waited_for(
    store: Store,
    serve: Callable[..., ApiServer],
    job: Job,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settled(store, hours=2)
    api = serve()
    confirm = ArchiveCalls.confirm

    def confirm_and_kill(self: ArchiveCalls, *arguments: Any) -> None:
        confirm(self, *arguments)
        api.process.kill()
        api.launch()

    monkeypatch.setattr(ArchiveCalls, "confirm", confirm_and_kill)
    to = tmp_path / "archive"
    assert fates(run(job, wanted(api, to))) == [HourFate.ARCHIVED] * 2
    api.process.wait_ready()
    wait_until(lambda: not list(api.data_dir.glob("schedule/*")))
    check_archive(to, 20)


# ---- what is noticed ---------------------------------------------------------------------------


def drop_row(path: Path) -> None:
    pq.write_table(pq.read_table(path).slice(1), path)


def double_row(path: Path) -> None:
    table = pq.read_table(path)
    pq.write_table(pa.concat_tables([table, table.slice(0, 1)]), path)


def replace_row(path: Path) -> None:
    table = pq.read_table(path)
    pq.write_table(pa.concat_tables([table.slice(1), table.slice(1, 1)]), path)


def change_body(path: Path) -> None:
    table = pq.read_table(path)
    bodies = table["body"].to_pylist()
    bodies[0] += " "
    index = table.schema.get_field_index("body")
    pq.write_table(table.set_column(index, "body", pa.array(bodies)), path)


def change_outcome(path: Path) -> None:
    table = pq.read_table(path)
    index = table.schema.get_field_index("deliveries")
    changed = table["deliveries"].to_pylist()
    changed[0][0]["lateness_ms"] += 1
    column = pa.array(changed, table.schema.field(index).type)
    pq.write_table(table.set_column(index, "deliveries", column), path)


def flip_bytes(path: Path) -> None:
    data = bytearray(path.read_bytes())
    for at in range(4, len(data) // 2):
        data[at] ^= 0xFF
    path.write_bytes(data)


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])


def change_subject(path: Path) -> None:
    table = pq.read_table(path)
    subjects = ["order.unpaid", *table["subject"].to_pylist()[1:]]
    index = table.schema.get_field_index("subject")
    pq.write_table(table.set_column(index, "subject", pa.array(subjects)), path)


def take_away(path: Path) -> None:
    path.unlink()


def file_of(to: Path, subject: str) -> Path:
    (path,) = (
        path for path in data_files(to) if pq.read_table(path)["subject"][0].as_py() == subject
    )
    return path


@pytest.mark.parametrize(
    ("tamper", "others"),
    [
        (drop_row, HourFate.ARCHIVED),
        (double_row, HourFate.ARCHIVED),
        (replace_row, HourFate.ARCHIVED),
        (change_body, HourFate.ARCHIVED),
        (change_outcome, HourFate.ARCHIVED),
        (change_subject, HourFate.ARCHIVED),
        # All that is in the file is lost.
        (flip_bytes, HourFate.DIFFERENT),
        (cut_short, HourFate.DIFFERENT),
        (take_away, HourFate.DIFFERENT),
    ],
)
def test_an_archive_that_is_not_what_the_server_has_is_not_told_of(
    lasting: ApiServer,
    job: Job,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    tamper: Callable[[Path], None],
    others: HourFate,
) -> None:
    to = tmp_path / "archive"
    told: list[int] = []
    read_back = archives._Step._read_back
    damaged: list[Path] = []

    def tampered(self: Any, hours: Any, files: Any, **rest: Any) -> Any:
        if not damaged:
            damaged.append(file_of(to, "order.paid"))
            tamper(damaged[0])
        return read_back(self, hours, files, **rest)

    monkeypatch.setattr(archives._Step, "_read_back", tampered)
    monkeypatch.setattr(ArchiveCalls, "confirm", lambda self, hour, *rest: told.append(hour.hour))
    archived = run(job, wanted(lasting, to))
    assert fates(archived) == [HourFate.DIFFERENT, others]
    assert not archived.is_clean
    assert "run it again" in archived.hours[0].reason
    assert told == ([HOUR + 1] if others is HourFate.ARCHIVED else [])
    if others is HourFate.ARCHIVED:
        check_archive(to, 10)
    else:
        assert str(damaged[0]) in archived.hours[0].reason
        assert data_files(to) == []


def test_an_archive_that_rots_before_the_server_heard_of_it(
    store: Store,
    serve: Callable[..., ApiServer],
    job: Job,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settled(store)
    api = serve()
    to = tmp_path / "archive"

    def killed(*arguments: Any) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(ArchiveCalls, "confirm", killed)
        with pytest.raises(Killed):
            run(job, wanted(api, to))
    change_body(file_of(to, "order.paid"))
    archived = run(job, wanted(api, to))
    assert fates(archived) == [HourFate.DIFFERENT]
    assert f"--again {hour_name(HOUR)}" in archived.hours[0].reason
    assert len(files_of(api)) == 2
    with monkeypatch.context() as patch:
        patch.setattr(ArchiveCalls, "confirm", lambda *arguments: None)
        anew = run(job, wanted(api, to, again=frozenset([HOUR])))
    assert (fates(anew), anew.hours[0].added) == ([HourFate.ARCHIVED], 10)
    check_archive(to, 10)
    for task in table_at(to).scan("subject = 'order.paid'").plan_files():
        cut_short(Path(task.file.file_path))
    archived = run(job, wanted(api, to))
    assert fates(archived) == [HourFate.DIFFERENT]
    assert "cannot be read" in archived.hours[0].reason
    assert "restore that file" in archived.hours[0].reason


def test_an_hour_that_is_archived_comes_into_another_place_if_asked(
    lasting_api: ApiServer, job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(job, wanted(lasting_api, tmp_path / "first", again=frozenset([HOUR, HOUR + 1])))
    assert waiting(lasting_api) == []
    other = tmp_path / "other"
    assert run(job, wanted(lasting_api, other)).hours == []
    archived = run(job, wanted(lasting_api, other, again=frozenset([HOUR])))
    assert fates(archived) == [HourFate.ARCHIVED]
    assert archived.hours[0].added == archived.hours[0].count == len(rows_of(other)) == 10
    hours = lasting_api.ask("GET", "/v1/archives?state=all&limit=1000")["hours"]
    assert [Path(one["location"]).name for one in hours] == ["other", "first"]

    def killed(*arguments: Any) -> None:
        raise Killed

    # Wherever a run is killed that archives an hour anew, the hour is in the table: the server
    # counts it as archived, and deletes it.
    for kind, name in ((ArchiveTable, "replace"), (ArchiveCalls, "confirm")):
        with monkeypatch.context() as patch:
            patch.setattr(kind, name, killed)
            with pytest.raises(Killed):
                run(job, wanted(lasting_api, other, again=frozenset([HOUR])))
        assert {row["hour"] for row in rows_of(other)} == {HOUR}
        assert run(job, wanted(lasting_api, other)).hours == []
        check_archive(other, 10)
    with pytest.raises(InputError, match=f"--again {hour_name(HOUR + 7)}: there is no such"):
        run(job, wanted(lasting_api, other, again=frozenset([HOUR, HOUR + 7])))


@pytest.mark.damaged("a file of an hour")
@pytest.mark.parametrize("kind", [LogKind.SCHEDULE, LogKind.DISPATCH])
def test_a_damaged_hour_is_named_and_the_others_are_archived(
    store: Store, serve: Callable[..., ApiServer], job: Job, tmp_path: Path, kind: LogKind
) -> None:
    settled(store, hours=2)
    api = serve()
    path = store.path(kind)
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data)
    archived = run(job, wanted(api, tmp_path / "archive"))
    assert fates(archived) == [HourFate.DAMAGED, HourFate.ARCHIVED]
    assert path.name in archived.hours[0].reason
    assert "delayserver repair" in archived.hours[0].reason
    check_archive(tmp_path / "archive", 10)
    assert [one["hour"] for one in waiting(api)] == [hour_name(HOUR)]


# ---- an hour that comes back -------------------------------------------------------------------


@pytest.fixture
def live(tmp_path: Path) -> Iterator[ApiServer]:
    """A real server with an hour of three messages that is settled, by a clock that is set."""
    server = ApiServer(tmp_path, archive=True, retention_ms=24 * HOUR_MS, checkpoint_ms=50)
    server.start(clock_offset_ms=5 * MINUTE_MS - now_ms() % HOUR_MS)
    server.subscribe("consumer", "live.*")
    deliver(server, 3)
    pass_hours(server, 2)
    wait_until(lambda: waiting(server))
    yield server
    server.shut_down()


def pass_hours(api: ApiServer, hours: int) -> None:
    api.restart(clock_offset_ms=int(str(api.settings["clock_offset_ms"])) + hours * HOUR_MS)


def deliver(api: ApiServer, count: int) -> None:
    for number in range(count):
        api.publish("live.a", body=number)
    api.pull_all("/v1/subscriptions/consumer", count)


def come_back(api: ApiServer, count: int) -> None:
    """Messages come into an hour that was settled, and are delivered."""
    pass_hours(api, -2)
    deliver(api, count)
    pass_hours(api, 2)
    wait_until(lambda: waiting(api))


def test_an_hour_that_comes_back_after_it_was_archived(
    live: ApiServer, job: Job, tmp_path: Path
) -> None:
    to = tmp_path / "archive"
    assert [hour.added for hour in run(job, wanted(live, to)).hours] == [3]
    assert waiting(live) == []
    come_back(live, 2)
    (again,) = run(job, wanted(live, to)).hours
    assert (again.fate, again.count, again.added) == (HourFate.ARCHIVED, 5, 2)
    check_archive(to, 5)
    assert len(table_at(to).snapshots()) == 2
    # It is deleted, and comes back once more: as another one, with a new beginning.
    live.restart(retention_ms=0)
    wait_until(lambda: not list(live.data_dir.glob("schedule/*")))
    live.restart(retention_ms=24 * HOUR_MS)
    come_back(live, 4)
    (anew,) = run(job, wanted(live, to)).hours
    assert (anew.fate, anew.hour, anew.count, anew.added) == (HourFate.ARCHIVED, again.hour, 4, 4)
    check_archive(to, 9)


def test_an_hour_that_comes_back_while_it_is_archived(
    live: ApiServer, job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    to = tmp_path / "archive"
    confirm = ArchiveCalls.confirm

    def too_late(self: ArchiveCalls, *arguments: Any) -> None:
        come_back(live, 2)
        confirm(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(ArchiveCalls, "confirm", too_late)
        archived = run(job, wanted(live, to))
    assert fates(archived) == [HourFate.CHANGED]
    assert archived.is_clean
    assert len(waiting(live)) == 1
    (again,) = run(job, wanted(live, to)).hours
    assert (again.fate, again.count, again.added) == (HourFate.ARCHIVED, 5, 2)
    check_archive(to, 5)


def test_an_hour_that_has_changed_since_it_was_listed(
    live: ApiServer, job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting_now = ArchiveCalls.waiting
    asked = 0

    def then_changed(self: ArchiveCalls) -> Any:
        nonlocal asked
        asked += 1
        found = waiting_now(self)
        if asked == 1:
            come_back(live, 2)
        return found

    monkeypatch.setattr(ArchiveCalls, "waiting", then_changed)
    assert fates(run(job, wanted(live, tmp_path / "archive"))) == [HourFate.CHANGED]
    assert fates(run(job, wanted(live, tmp_path / "archive"))) == [HourFate.ARCHIVED]
    check_archive(tmp_path / "archive", 5)


def test_an_hour_that_is_deleted_meanwhile(
    live: ApiServer, job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server does not wait for archives."""
    live.settings.pop("archive")
    live.restart()
    waiting_now = ArchiveCalls.waiting
    asked = 0

    def then_deleted(self: ArchiveCalls) -> Any:
        nonlocal asked
        asked += 1
        found = waiting_now(self)
        if asked == 1:
            live.restart(retention_ms=0)
            wait_until(lambda: not list(live.data_dir.glob("schedule/*")))
        return found

    monkeypatch.setattr(ArchiveCalls, "waiting", then_deleted)
    archived = run(job, wanted(live, tmp_path / "archive"))
    assert fates(archived) == [HourFate.GONE]
    assert not archived.is_kept


# ---- an hour that is kept open -----------------------------------------------------------------


def test_an_hour_that_a_message_keeps_open_is_archived_without_it_and_then_with_it(
    store: Store, serve: Callable[..., ApiServer], job: Job, tmp_path: Path
) -> None:
    """The server keeps it all the while."""
    store.subscribe("one", "order.*")
    (unmatched,) = store.publish("other.a", [MINUTE_MS])
    store.publish("order.paid", [MINUTE_MS + number for number in range(5)])
    store.run(2 * HOUR_MS)
    store.checkpoint()
    api = serve()
    to = tmp_path / "archive"
    assert run(job, wanted(api, to)).hours == []
    for added in (5, 0):
        (partly,) = run(job, wanted(api, to, without_unsettled=True)).hours
        assert (partly.fate, partly.count, partly.added) == (HourFate.PARTLY, 6, added)
        assert (partly.hour, partly.left_out) == (hour_name(HOUR), 1)
        check_archive(to, 5)
        assert len(files_of(api)) == 2 and waiting(api) == []
    api.subscribe("consumer", "other.*")
    api.pull_all("/v1/subscriptions/consumer", 1)
    wait_until(lambda: waiting(api))
    (whole,) = run(job, wanted(api, to, without_unsettled=True)).hours
    assert (whole.fate, whole.count, whole.added) == (HourFate.ARCHIVED, 6, 1)
    check_archive(to, 6)
    assert rows_of(to)[0]["seq"] == unmatched
    wait_until(lambda: not files_of(api))


def test_what_is_for_a_table_alone(lasting: ApiServer, job: Job, tmp_path: Path) -> None:
    for option in ("compact", "without_unsettled"):
        plain = wanted(lasting, tmp_path, format=ArchiveFormat.PARQUET, **{option: True})
        with pytest.raises(InputError, match="table"):
            run(job, plain)


# ---- the command -------------------------------------------------------------------------------


@pytest.mark.usefixtures("shared_session")
def test_the_command_says_it_with_its_status(
    lasting: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    to = tmp_path / "archive"
    command = ["pipeline", "archive", "--data-dir", str(lasting.data_dir), "--to", str(to)]
    here = ["--server", str(lasting.base_url)]
    dry = CliRunner().invoke(make_app(), [*command, *here, "--dry-run", "--json", "-"])
    assert dry.exit_code == 0, dry.output
    assert [one["fate"] for one in json.loads(dry.stdout)["hours"]] == ["sound", "sound"]
    until = ["--until", hour_name(HOUR + 1) + ":00:00Z"]
    done = CliRunner().invoke(make_app(), [*command, *here, *until])
    assert done.exit_code == 0, done.output
    assert re.search(r"hours archived\W+1\b", done.stdout)
    assert re.search(r"of these, added now\W+10\b", done.stdout)
    assert "note:" not in done.stdout
    for path in data_files(to):
        path.unlink()
    lost = CliRunner().invoke(make_app(), [*command, *here, *until])
    assert lost.exit_code == 1
    assert f"{hour_name(HOUR)} different: " in lost.stdout
    monkeypatch.setattr(Archive, "__init__", partialmethod(Archive.__init__, wait_s=0.1))
    nobody = CliRunner().invoke(make_app(), [*command, "--server", "http://127.0.0.1:9"])
    assert nobody.exit_code == 2
    assert "--server" in nobody.stderr
    monkeypatch.delattr(sessions, "open_session")  # An error is told before Spark starts.
    for option in ("--until", "--again"):
        wrong = CliRunner().invoke(make_app(), [*command, *here, option, "tomorrow"])
        assert wrong.exit_code == 2, wrong.output
