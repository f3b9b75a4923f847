"""The audit: what it finds, and that it finds nothing where nothing is wrong."""

import io
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from pyspark.sql import SparkSession
from rich.console import Console
from typer.testing import CliRunner

from delayserver.cli import make_app
from delayserver.delivery.webhook import WebhookResponse
from delayserver.pipeline import session as sessions
from delayserver.pipeline.audits import on_spark, telling
from delayserver.pipeline.audits.audit import Audit, audit_here, merge
from delayserver.pipeline.audits.judging import judge_of
from delayserver.pipeline.audits.plan import make_plan
from delayserver.pipeline.progress import Job
from delayserver.pipeline.reports import audit_report
from delayserver.records.tables import hour_key
from storage.buckets import bucket_path
from storage.catalog import Table
from storage.frame import HEADER_BYTES, Rows, encode, padded
from storage.rows import DISPATCH_DTYPE, HOUR_MS, LogKind, RecordKind
from tests.pipeline.store import FAILED, HOUR, OK, Store
from tests.world.resealing import rewrite

NO_VIOLATIONS = dict.fromkeys(
    (
        *("repeated", "after_removal", "early", "unknown", "missing", "in_the_future"),
        *("mismatched", "unknown_outcome", "unknown_subscription", "misdirected"),
        *("wrongly_dropped", "lost", "damaged"),
    ),
    0,
)


def make_store(root: Path) -> Store:
    """Two hours are settled and retired; something waits in a third."""
    store = Store(root)
    store.subscribe("mail", "order.*")
    store.subscribe("everything", "*")
    orders = store.publish("order.unpaid", [1000, 2000, 3000, HOUR_MS + 5, 5 * HOUR_MS])
    refunds = store.publish("envelope", [1500, 1600, 1700])
    store.cancel(refunds[1], 1600)
    store.move(orders[1], 2000, HOUR_MS + 7, "order.unpaid")
    outcomes: dict[str, list[WebhookResponse]] = {"order.unpaid": [FAILED, OK], "envelope": [OK]}

    def answer(subject: str) -> WebhookResponse:
        answers = outcomes[subject]
        return answers.pop(0) if len(answers) > 1 else answers[0]

    store.run(1800, answer)
    outcomes["order.unpaid"] = [FAILED]
    store.run(30_000, answer)  # What was due at 3000 is a dead letter, at both of them.
    outcomes["order.unpaid"] = [OK]
    store.run(2 * HOUR_MS, answer)
    store.checkpoint()
    store.publish("envelope", [5 * HOUR_MS + 1])  # Not filed when the server is killed.
    store.kill()
    return store


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return make_store(tmp_path_factory.mktemp("audit") / "data")


@pytest.fixture
def store(original: Store, tmp_path: Path) -> Store:
    """A copy of one's own, to be tampered with."""
    copy = Store.__new__(Store)
    copy.root = str(tmp_path / "data")
    copy.clock = original.clock
    shutil.copytree(original.root, copy.root)
    return copy


def run(store: Store) -> Audit:
    return audit_here(store.root, now_ms=store.clock.now_ms)


def deliveries(store: Store, hour: int = HOUR) -> np.ndarray:
    """All rows of an hour of the dispatch log."""
    parts = []
    data = store.path(LogKind.DISPATCH, hour).read_bytes()
    offset = 0
    while offset < len(data):
        count = int.from_bytes(data[offset + 8 : offset + 12], "little")
        start = offset + HEADER_BYTES
        parts.append(np.frombuffer(data, DISPATCH_DTYPE, count, start))
        notes_bytes = int.from_bytes(data[offset + 16 : offset + 24], "little")
        offset = padded(start + count * DISPATCH_DTYPE.itemsize + notes_bytes)
    return np.concatenate(parts)


def replace_deliveries(store: Store, rows: np.ndarray, hour: int = HOUR) -> None:
    """Write an hour of the dispatch log anew, sound and with these rows."""
    path = store.path(LogKind.DISPATCH, hour)
    stamp = int.from_bytes(path.read_bytes()[56:60], "little")
    path.write_bytes(
        encode(
            LogKind.DISPATCH,
            rows.tobytes(),
            b"",
            first_seq=int(rows["seq"].min()),
            last_seq=int(rows["seq"].max()),
            created_ms=1,
            stamp=stamp,
        )
    )


def test_a_sound_directory(original: Store) -> None:
    found = run(original)
    assert found.is_clean
    assert found.violations == NO_VIOLATIONS
    wanted = {"accepted": 9, "delivered": 4, "cancelled": 1, "dead": 2, "pending": 2}
    assert {name: count for name, count in found.messages.items() if count} == wanted
    assert found.deliveries["delivered"] == 7
    hours = {line["key"]: line for line in found.of("hour")}
    assert hours[HOUR + 5]["pending"] == 2
    assert hours[HOUR + 1]["delivered"] == 4
    names = found.of("subscription")
    assert {line["name"]: line["dead"] for line in names} == {"mail": 2, "everything": 1}
    assert sum(line["count"] for line in found.lateness) == 7
    assert all(3 <= line["p50_ms"] <= line["p99_ms"] <= line["max_ms"] < 100 for line in names)


def test_on_spark_it_is_the_same(spark: SparkSession, original: Store) -> None:
    here = telling.document(run(original))
    there = telling.document(
        on_spark.audit(Job(spark), original.root, now_ms=original.clock.now_ms)
    )
    assert {**there, "took_s": 0} == {**here, "took_s": 0}


def test_a_delivery_that_was_taken_out_of_a_retired_hour_is_missing(store: Store) -> None:
    rows = deliveries(store)
    replace_deliveries(store, rows[1:])
    found = run(store)
    assert not found.is_clean
    assert found.violations == {**NO_VIOLATIONS, "missing": 1}
    assert found.messages["missing"] == 1
    (example,) = found.examples
    assert (example["problem"], example["seq"]) == ("missing", int(rows["seq"][0]))
    assert example["subject"] in ("envelope", "order.unpaid")
    assert example["subscription"] in ("mail", "everything")


def test_a_delivery_that_stands_there_twice_is_repeated(store: Store) -> None:
    rows = deliveries(store, HOUR + 1)
    replace_deliveries(store, np.concatenate([rows, rows[:1]]), HOUR + 1)
    found = run(store)
    assert found.violations == {**NO_VIOLATIONS, "repeated": 1}
    assert found.messages["delivered"] == 4


@pytest.mark.damaged("deliveries that no server would record")
def test_a_delivery_before_its_time_and_one_of_nothing(store: Store) -> None:
    rows = deliveries(store).copy()
    rows["settled_ms"][0] = rows["due_ms"][0] - 1
    stranger = rows[:1].copy()
    stranger["seq"] = 1
    stranger["settled_ms"] += 10
    replace_deliveries(store, np.concatenate([rows, stranger]))
    assert run(store).violations == {**NO_VIOLATIONS, "early": 1, "unknown": 1}


@pytest.mark.damaged("a file is gone")
def test_a_message_that_was_moved_to_nowhere_is_lost(store: Store) -> None:
    # The hour it was moved to loses its file; the catalog still knows it.
    store.path(LogKind.SCHEDULE, HOUR + 1).unlink()
    found = run(store)
    assert found.violations["lost"] == 1
    assert found.messages["missing"] == 1
    assert [line["reason"] for line in found.damage] == [
        "the file is missing, and the catalog knows it"
    ]
    assert "lost" in {one["problem"] for one in found.examples}


def of_kind(wanted: RecordKind, **fields: int) -> Callable[[Rows], Rows | None]:
    """Gives the first row of a kind other values."""

    def change(rows: Rows) -> Rows | None:
        where = np.flatnonzero(rows["kind"] == wanted)
        for name, value in fields.items():
            rows[name][where[:1]] = value
        return rows if len(where) else None

    return change


def test_a_cancel_that_became_a_move_to_nowhere_is_lost(store: Store) -> None:
    """The catalog knows where the message was last: it never went on."""
    path = store.path(LogKind.SCHEDULE)
    assert rewrite(path, of_kind(RecordKind.CANCEL, kind=RecordKind.FIRE))
    assert run(store).violations == {**NO_VIOLATIONS, "lost": 1}


def test_what_goes_on_as_one_of_another_subject_is_mismatched(store: Store) -> None:
    path = store.path(LogKind.SCHEDULE, HOUR + 1)
    assert rewrite(path, of_kind(RecordKind.MOVE, subject_id=2))
    assert run(store).violations["mismatched"] == 1


def test_a_subject_among_others_that_the_catalog_forgot_is_named(store: Store) -> None:
    plan = make_plan(store.root, now_ms=store.clock.now_ms)
    del plan.bases[0].snapshot.subjects[1]
    judge = judge_of(plan.bases[0])
    found = merge(plan, [(number, judge(task)) for number, task in enumerate(plan.tasks)])
    assert "entries of subjects that are not known" in {one["reason"] for one in found.damage}


def test_an_hour_that_the_catalog_forgot_is_named_if_something_waits_in_it(store: Store) -> None:
    with store.catalog() as catalog:
        catalog.commit({Table.HOURS: [(hour_key(hour), None) for hour in (HOUR, HOUR + 5)]})
    # All of the first is settled: so is what a purge leaves that was interrupted.
    (damage,) = run(store).damage
    assert damage["file"] == bucket_path(LogKind.SCHEDULE, HOUR + 5)
    assert damage["reason"] == "the catalog does not know the file, and 1 in it are not settled"


@pytest.mark.damaged("a frame of the schedule log")
def test_damage_is_named_and_does_not_end_the_audit(store: Store) -> None:
    path = store.path(LogKind.SCHEDULE)
    data = bytearray(path.read_bytes())
    data[HEADER_BYTES + 1] ^= 1
    path.write_bytes(data)
    found = run(store)
    assert not found.is_clean
    assert found.violations["damaged"] == len(found.damage) == 1
    assert found.damage[0]["file"].startswith("schedule/")
    assert found.messages["pending"] == 2


def test_the_page_is_whole_by_itself_and_the_document_is_json(store: Store) -> None:
    replace_deliveries(store, deliveries(store)[1:])
    found = run(store)
    page = audit_report.page(found)
    assert page.count("<svg") == 5
    assert not re.search(r"""(src|href)=["'](?!#)""", page)
    assert "Not clean: 1 missing." in page
    assert "everything" in page
    document = json.loads(json.dumps(telling.document(found)))
    assert document["violations"]["missing"] == 1
    assert document["messages"]["accepted"] == 9
    assert {line["name"] for line in document["subjects"]} == {"order.unpaid", "envelope"}


def test_the_tables_as_parquet(spark: SparkSession, original: Store, tmp_path: Path) -> None:
    on_spark.write_parquet(spark, run(original), str(tmp_path / "out"))
    rows = spark.read.parquet(str(tmp_path / "out" / "subscriptions")).collect()
    assert {row["name"]: row["delivered"] for row in rows} == {"mail": 2, "everything": 5}
    assert spark.read.parquet(str(tmp_path / "out" / "violations")).count() == 0


# ---- the command -----------------------------------------------------------------------------


@pytest.mark.usefixtures("shared_session")
def test_the_command_says_it_with_its_status(store: Store, tmp_path: Path) -> None:
    html, document = tmp_path / "a.html", tmp_path / "a.json"
    command = ["pipeline", "audit", "--data-dir", store.root]
    clean = CliRunner().invoke(make_app(), [*command, "--html", str(html), "--json", str(document)])
    assert clean.exit_code == 0, clean.output
    assert "Clean: every accepted message is accounted for" in clean.stdout
    assert html.read_text().startswith("<!doctype html>")
    assert json.loads(document.read_text())["clean"] is True
    replace_deliveries(store, deliveries(store)[1:])
    violated = CliRunner().invoke(make_app(), [*command, "--json", "-"])
    assert violated.exit_code == 1
    assert json.loads(violated.stdout)["violations"]["missing"] == 1
    nowhere = CliRunner().invoke(make_app(), ["pipeline", "audit", "--data-dir", str(tmp_path)])
    assert nowhere.exit_code == 2
    assert "is not a data directory" in nowhere.stderr


def test_without_java_the_command_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(sessions.find_java, "__defaults__", (tmp_path,))
    found = CliRunner().invoke(make_app(), ["pipeline", "audit", "--data-dir", str(tmp_path)])
    assert found.exit_code == 2
    assert "apt-get install openjdk-17-jre-headless" in found.stderr


@pytest.mark.parametrize("width", [40, 80, 200])
def test_the_lines_have_every_subject_and_every_number(store: Store, width: int) -> None:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    found = run(store)
    console.print(*telling.lines(found), sep="\n")
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    for name in ("order.unpaid", "envelope"):
        (line,) = (line for line in lines if name in line)
        assert ("subject" in line) == (width < 200)
    heading = [line.split()[0] for line in lines if line.strip()]
    assert ("p99" in heading) == (width < 200)


def test_a_replay_is_no_message_of_its_own(tmp_path: Path) -> None:
    store = Store(tmp_path / "data")
    mail = store.subscribe("mail", "order.*")
    seqs = store.publish("order.unpaid", [1000, 2000])
    store.run(1500)
    store.run(2500, lambda subject: FAILED)  # Tried again a second later.
    store.run(5000)
    for seq, due_in_ms in zip(seqs, (1000, 2000), strict=True):
        store.replay(seq, due_in_ms, mail.id)
    store.run(6000)
    store.replay(seqs[0], 1000, mail.id)
    store.kill()
    found = run(store)
    assert found.is_clean
    told = {name: count for name, count in found.messages.items() if count}
    # Of one only replays went on; the other had a history, and is to be delivered once more.
    assert told == {"accepted": 2, "delivered": 2}
