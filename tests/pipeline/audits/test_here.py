"""The audit in one process: the command, what it does not need, parts of hours, bodies, and hours
that are left out."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from delayserver.cli import make_app
from delayserver.pipeline.audits import plan as plans
from delayserver.pipeline.audits import telling
from delayserver.pipeline.audits.audit import Audit, audit_here, merge
from delayserver.pipeline.audits.facts import HourFacts, merged, unpack_facts
from delayserver.pipeline.audits.judging import judge_of
from delayserver.pipeline.audits.plan import make_plan
from delayserver.times import format_time
from storage.frame import HEADER_BYTES, Rows
from storage.rows import HOUR_MS, LogKind
from tests.pipeline.store import FAILED, HOUR, START_MS, Store
from tests.world.resealing import read_frames, rewrite, write_frames

WITHOUT = """
import sys
for name in ("pyspark", "pandas", "matplotlib", "pyarrow"):
    sys.modules[name] = None
from delayserver.__main__ import main
sys.argv = ["delayserver", "check", "--settled", "--data-dir", sys.argv[1], "--json"]
main()
"""
"""As if the server was installed without the extra."""


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Two hours that are retired, with retries and a cancel, and something that waits."""
    store = Store(tmp_path / "data")
    store.subscribe("mail", "*")
    store.publish("order", [1000 + 10 * number for number in range(40)])
    seqs = store.publish("order", [HOUR_MS + 1000 * number for number in range(1, 40)])
    store.cancel(seqs[5], HOUR_MS + 6000)
    store.publish("order", [5 * HOUR_MS, 5 * HOUR_MS + 1])
    store.run(2000, lambda subject: FAILED)
    store.run(2 * HOUR_MS)
    store.checkpoint()
    store.stop()
    return store


def audited(store: Store) -> Audit:
    return audit_here(store.root, now_ms=store.clock.now_ms)


def check(store: Store, *arguments: str) -> tuple[int, str]:
    command = ["check", "--settled", "--data-dir", store.root, *arguments]
    done = CliRunner().invoke(make_app(), command)
    return done.exit_code, done.stdout


def test_the_command_says_it_with_its_status(store: Store, tmp_path: Path) -> None:
    status, shown = check(store)
    assert status == 0
    assert "Clean: every accepted message is accounted for" in shown
    assert "Bodies were not read." in shown.replace("\n", " ")
    assert rewrite(store.path(LogKind.DISPATCH), lambda rows: rows[1:])
    status, shown = check(store, "--json")
    assert status == 1
    document = json.loads(shown)
    assert document["violations"]["missing"] == 1
    assert document["not_looked_at"]
    nowhere = CliRunner().invoke(make_app(), ["check", "--settled", "--data-dir", str(tmp_path)])
    assert nowhere.exit_code == 2
    alone = CliRunner().invoke(make_app(), ["check", "--bodies", "--data-dir", store.root])
    assert alone.exit_code == 2 and "--settled" in alone.stderr


def test_it_needs_nothing_that_the_extra_brings(store: Store) -> None:
    command = [sys.executable, "-c", WITHOUT, store.root]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["clean"] is True


def test_an_hour_in_parts_is_judged_as_a_whole_one(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = telling.document(audited(store))
    assert whole["deliveries"]["retried"] > 0
    monkeypatch.setattr(plans, "PART_ENTRIES", 7)
    plan = make_plan(store.root, now_ms=store.clock.now_ms)
    assert len(plan.tasks) > len({task.hour for task in plan.tasks})
    parts = telling.document(audited(store))
    assert {**parts, "took_s": 0} == {**whole, "took_s": 0}


@pytest.mark.damaged("a frame of the schedule log, in an hour that is cut")
def test_damage_of_an_hour_in_parts_is_named_once(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = store.path(LogKind.SCHEDULE)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1  # of the payloads, or the padding
    data[HEADER_BYTES + 1] ^= 1
    path.write_bytes(data)
    once = audited(store).damage
    monkeypatch.setattr(plans, "PART_ENTRIES", 7)
    assert audited(store).damage == once


def test_facts_travel_as_bytes(store: Store) -> None:
    plan = make_plan(store.root, now_ms=store.clock.now_ms)
    judge = judge_of(plan.bases[0])
    judged = [(number, judge(task)) for number, task in enumerate(plan.tasks)]
    travelled = [(number, unpack_facts(facts.pack())) for number, facts in judged]
    assert telling.document(merge(plan, travelled)) == telling.document(merge(plan, judged))
    assert merged([]).pack() == HourFacts().pack()


def test_who_came_meanwhile_is_not_accused(store: Store) -> None:
    """A server that runs may make a subscription behind the look at its definitions."""
    plan = make_plan(store.root, now_ms=store.clock.now_ms)
    basis = plan.bases[0]
    basis.snapshot.subscriptions.clear()
    stale = judge_of(basis)
    facts = [(number, stale(task)) for number, task in enumerate(plan.tasks)]
    assert any(one.has_doubts for _, one in facts)
    assert merge(plan, facts).violations["unknown_subscription"] == 0


def test_hours_that_are_left_out_are_said(store: Store) -> None:
    assert rewrite(store.path(LogKind.DISPATCH), lambda rows: rows[1:])
    since = format_time(START_MS + HOUR_MS)
    status, shown = check(store, "--since", since, "--json")
    document = json.loads(shown)
    assert (status, document["hours_left_out"], document["since"]) == (0, 1, since)
    assert f"Hours before {since} were left out (1)." in document["verdict"]
    assert check(store, "--since", "yesterday")[0] == 2


def test_bodies_are_read_if_that_is_asked_for(store: Store) -> None:
    status, shown = check(store, "--bodies", "--json")
    document = json.loads(shown)
    # What was tried again has a body for each time.
    assert (status, document["bodies_verified"]) == (0, 81 + document["deliveries"]["retried"])
    assert document["verdict"].endswith("bodies were read.")


@pytest.mark.damaged("a body that waits")
def test_a_body_that_was_changed_is_named(store: Store) -> None:
    path = store.path(LogKind.SCHEDULE, HOUR + 5)
    (frame,) = read_frames(path)
    payload = bytearray(frame.payload)
    payload[int(frame.rows["payload_offset"][1]) + 8] ^= 1
    data = bytearray(path.read_bytes())
    start = HEADER_BYTES + frame.header.rows_bytes
    data[start : start + len(payload)] = payload
    path.write_bytes(data)
    assert check(store)[0] == 0
    status, shown = check(store, "--bodies", "--json")
    assert status == 1
    (place,) = json.loads(shown)["damage"]
    assert place["reason"] == "a payload does not match its checksum"
    assert place["first_seq"] == int(frame.rows["seq"][1])


@pytest.mark.damaged("a body of another message")
def test_a_body_of_another_message_is_named(store: Store) -> None:
    def of_another(rows: Rows) -> Rows | None:
        rows["payload_offset"][1] = rows["payload_offset"][0]
        return rows

    path = store.path(LogKind.SCHEDULE, HOUR + 5)
    assert rewrite(path, of_another)
    status, shown = check(store, "--bodies", "--json")
    reasons = {place["reason"] for place in json.loads(shown)["damage"]}
    assert status == 1
    assert "the row names another checksum than its payload has" in reasons


def test_a_copy_is_judged_as_the_original(store: Store, tmp_path: Path) -> None:
    shutil.copytree(store.root, tmp_path / "copy")
    path = tmp_path / "copy" / "schedule"
    for one in path.iterdir():
        write_frames(one, read_frames(one))
    found = audit_here(str(tmp_path / "copy"), now_ms=store.clock.now_ms)
    assert found.is_clean, found.damage
