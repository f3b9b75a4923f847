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

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession
from typer.testing import CliRunner

from delayserver.cli import make_app
from delayserver.errors import PipelineError
from delayserver.pipeline.archive import archive as archives
from delayserver.pipeline.archive.archive import (
    MANIFESTS,
    STAGING,
    Archive,
    ArchiveCalls,
    ArchiveRun,
    HourFate,
    run,
)
from delayserver.pipeline.archive.place import Place
from delayserver.pipeline.progress import Job
from delayserver.records.message import Content
from storage.buckets import hour_name
from storage.rows import HOUR_MS, LogKind
from tests.integration.api_support import ApiServer, now_ms, wait_until
from tests.pipeline.store import FAILED, HOUR, OK, START_MS, Store

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
    return Archive(api.data_dir, str(to), str(api.base_url), wait_s=5, **rest)


def waiting(api: ApiServer) -> list[dict[str, Any]]:
    hours: list[dict[str, Any]] = api.ask("GET", "/v1/archives?limit=1000")["hours"]
    return hours


def rows_of(to: Path) -> list[dict[str, Any]]:
    """What a data team reads, with another tool."""
    partitions = ds.partitioning(
        pa.schema([("date", pa.string()), ("subject", pa.string())]), flavor="hive"
    )
    # What begins with _ or . is left out by default, as in Spark.
    table = ds.dataset(to, format="parquet", partitioning=partitions).to_table()
    rows: list[dict[str, Any]] = table.sort_by("seq").to_pylist()
    return rows


def fates(archived: ArchiveRun) -> list[HourFate]:
    return [hour.fate for hour in archived.hours]


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
    assert (row["date"], row["subject"], row["key"]) == ("2026-05-31", "order.paid", "k")
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
    assert not (to / STAGING).exists()


def test_it_is_partitioned_by_date_and_subject_and_spark_reads_it(
    store: Store, serve: Callable[..., ApiServer], job: Job, tmp_path: Path
) -> None:
    settled(store, hours=3)
    api = serve()
    to = tmp_path / "a place"
    archived = run(job, wanted(api, to.as_uri().replace("%20", " ")))
    assert fates(archived) == [HourFate.ARCHIVED] * 3
    assert {path.name for path in to.glob("date=2026-05-31/*")} == {
        "subject=order.paid",
        "subject=order.unpaid",
    }
    read = job.spark.read.parquet(str(to))
    counts = read.groupBy("subject", "state").count().collect()
    assert sorted(tuple(row) for row in counts) == [
        ("order.paid", "delivered", 15),
        ("order.unpaid", "delivered", 15),
    ]
    assert read.where("subject = 'order.paid'").select("id").distinct().count() == 15


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


def test_another_servers_archive_is_left_alone(
    store: Store, serve: Callable[..., ApiServer], job: Job, tmp_path: Path
) -> None:
    settled(store)
    api = serve()
    to = tmp_path / "archive"
    to.mkdir()
    (to / archives.OWNER).write_text('{"format": 1, "stamp": 5}')
    with pytest.raises(PipelineError, match="another data directory"):
        run(job, wanted(api, to))
    assert len(waiting(api)) == 1


# ---- a kill at any point -----------------------------------------------------------------------

CALLS = ((Place, "rename"), (Place, "delete"), (Place, "sync"), (ArchiveCalls, "confirm"))
"""All that changes anything, but for what Spark writes."""


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
    """So many rows, none twice, and each in one manifest."""
    rows = rows_of(to)
    assert len({row["seq"] for row in rows}) == len(rows) == count
    manifests = [json.loads(path.read_text()) for path in (to / MANIFESTS).glob("*.json")]
    assert sum(manifest["count"] for manifest in manifests) == count
    files = [file for manifest in manifests for file in manifest["files"]]
    assert sorted(files) == sorted(
        str(path.relative_to(to)) for path in to.glob("date=*/*/*.parquet")
    )
    assert not (to / STAGING).exists()


CALL_COUNT = 11
"""Of a run that archives an hour of two subjects."""


def test_a_run_has_so_many_calls(
    lasting: ApiServer, job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killer = Killer(0)
    killer.plant(monkeypatch)
    run(job, wanted(lasting, tmp_path / "archive", until_ms=START_MS + HOUR_MS))
    assert killer.calls == CALL_COUNT


@pytest.mark.parametrize("at", range(1, CALL_COUNT + 1))
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
        [*command, *arguments, "--master", "local[2]"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        wait_until(lambda: list(to.glob(f"{STAGING}/**/*.parquet")), timeout_s=120)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert not list(to.glob(f"{MANIFESTS}/*.json"))
    assert len(waiting(api)) == 3
    assert fates(run(job, wanted(api, to))) == [HourFate.ARCHIVED] * 3
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


def move_to_another_subject(path: Path) -> None:
    path.rename(path.parent.with_name("subject=order.unpaid") / path.name.replace(".0.", ".9."))


def take_away(path: Path) -> None:
    path.unlink()


@pytest.mark.parametrize(
    "tamper",
    [
        drop_row,
        double_row,
        replace_row,
        change_body,
        change_outcome,
        flip_bytes,
        cut_short,
        move_to_another_subject,
        take_away,
    ],
)
def test_an_archive_that_is_not_what_the_server_has_is_not_told_of(
    lasting: ApiServer,
    job: Job,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    tamper: Callable[[Path], None],
) -> None:
    to = tmp_path / "archive"
    told: list[int] = []
    read_back = archives._Step._read_back
    damaged: list[Path] = []

    def tampered(self: Any, files: Any) -> Any:
        if not damaged:
            (path,) = to.glob(f"date=*/subject=order.paid/{hour_name(HOUR)}.*.parquet")
            # The sum that Hadoop keeps beside it would tell by itself.
            path.with_name(f".{path.name}.crc").unlink()
            damaged.append(path)
            tamper(path)
        return read_back(self, files)

    monkeypatch.setattr(archives._Step, "_read_back", tampered)
    monkeypatch.setattr(ArchiveCalls, "confirm", lambda self, hour, *rest: told.append(hour.hour))
    archived = run(job, wanted(lasting, to))
    assert fates(archived) == [HourFate.DIFFERENT, HourFate.ARCHIVED]
    assert not archived.is_clean
    assert "run it again" in archived.hours[0].reason
    assert told == [HOUR + 1]
    assert len(list((to / MANIFESTS).glob("*.json"))) == 1


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
    (manifest,) = (to / MANIFESTS).glob("*.json")
    (path,) = to.glob("date=*/subject=order.paid/*.parquet")
    path.with_name(f".{path.name}.crc").unlink()
    change_body(path)
    archived = run(job, wanted(api, to))
    assert fates(archived) == [HourFate.DIFFERENT]
    assert f"delete {manifest.as_uri().replace('file://', 'file:')}" in archived.hours[0].reason
    assert len(files_of(api)) == 2
    manifest.unlink()
    assert fates(run(job, wanted(api, to))) == [HourFate.ARCHIVED]
    check_archive(to, 10)


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
    assert len(list((to / MANIFESTS).glob("*.json"))) == 2
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
    for path in to.glob("date=*/*/*.parquet"):
        path.unlink()
    lost = CliRunner().invoke(make_app(), [*command, *here, *until])
    assert lost.exit_code == 1
    assert f"{hour_name(HOUR)} different: " in lost.stdout
    monkeypatch.setattr(Archive, "__init__", partialmethod(Archive.__init__, wait_s=0.1))
    nobody = CliRunner().invoke(make_app(), [*command, "--server", "http://127.0.0.1:9"])
    assert nobody.exit_code == 2
    assert "--server" in nobody.stderr
    wrong = CliRunner().invoke(make_app(), [*command, *here, "--until", "tomorrow"])
    assert wrong.exit_code == 2
