"""Verdicts of settled hours: when they count, and when an hour is judged again."""

import json
import os
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from delayserver.cli import make_app
from delayserver.pipeline.audits import telling
from delayserver.pipeline.audits.audit import Audit, audit_here
from delayserver.pipeline.audits.verdicts import Verdicts, VerdictsError
from delayserver.times import format_time
from storage.buckets import hour_name
from storage.rows import HOUR_MS, LogKind
from tests.pipeline.store import FAILED, HOUR, START_MS, Store
from tests.world.resealing import read_frames, rewrite, write_frames


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """Two hours that are settled, with retries and a cancel, and something that waits."""
    store = Store(tmp_path_factory.mktemp("verdicts") / "data")
    store.subscribe("mail", "order.*")
    store.publish("order.a", [1000 + 10 * number for number in range(40)])
    seqs = store.publish("order.b", [HOUR_MS + 1000 * number for number in range(1, 40)])
    store.cancel(seqs[5], HOUR_MS + 6000)
    store.publish("order.b", [2 * HOUR_MS + 5, 5 * HOUR_MS])
    store.run(2000, lambda subject: FAILED)
    store.run(2 * HOUR_MS)
    store.checkpoint()
    store.stop()
    return store


@pytest.fixture
def store(original: Store, tmp_path: Path) -> Store:
    copy = Store.__new__(Store)
    copy.root, copy.clock, copy.settings = str(tmp_path / "data"), original.clock, original.settings
    shutil.copytree(original.root, copy.root)
    return copy


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    return tmp_path / "verdicts"


def audited(store: Store, kept: Path, *, with_bodies: bool = False) -> Audit:
    verdicts = Verdicts(kept)
    now_ms = store.clock.now_ms
    return audit_here(store.root, now_ms=now_ms, verdicts=verdicts, with_bodies=with_bodies)


def hours(found: Audit) -> tuple[int, int]:
    """How many were judged, and of how many a verdict counts."""
    return found.hours_judged, found.hours_kept


def verdict_files(kept: Path) -> list[Path]:
    return sorted(kept.rglob("*.verdict"))


def test_what_is_settled_is_judged_once(store: Store, kept: Path) -> None:
    first = audited(store, kept)
    assert hours(first) == (4, 0)
    second = audited(store, kept)
    assert hours(second) == (2, 2)
    documents = [telling.document(one) for one in (first, second)]
    differs = ("took_s", "hours_judged", "hours_kept", "verdict")
    one, other = ({k: v for k, v in each.items() if k not in differs} for each in documents)
    assert one == other
    assert documents[1]["verdict"].startswith("Clean")
    assert "2 hours are as an earlier audit found them." in documents[1]["verdict"]


def test_an_hour_more_is_judged_alone(store: Store, kept: Path) -> None:
    audited(store, kept)
    assert len(verdict_files(kept)) == 2
    resumed = resume(store)
    resumed.run(3 * HOUR_MS + 1)
    resumed.checkpoint()
    resumed.stop()
    found = audit_here(resumed.root, now_ms=resumed.clock.now_ms, verdicts=Verdicts(kept))
    assert hours(found) == (2, 2)
    assert found.is_clean
    assert len(verdict_files(kept)) == 3


def resume(store: Store) -> Store:
    """A server on the copy, from where the first one ended."""
    resumed = Store(Path(store.root))
    resumed.clock.move(store.clock.now_ms - START_MS)
    return resumed


@pytest.mark.unchecked("a row is taken out")
@pytest.mark.parametrize("kind", [LogKind.SCHEDULE, LogKind.DISPATCH])
def test_what_was_altered_is_judged_again(store: Store, kept: Path, kind: LogKind) -> None:
    audited(store, kept)
    path = store.path(kind)
    times = path.stat()
    write_frames(path, read_frames(path))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert hours(audited(store, kept)) == (2, 2)  # The same bytes at the same time.
    assert rewrite(path, lambda rows: rows[1:])
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    found = audited(store, kept)
    assert hours(found) == (3, 1)
    assert not found.is_clean
    # Who is accused is accused each time.
    assert hours(audited(store, kept)) == (3, 1)


def test_what_was_written_since_is_judged_again(store: Store, kept: Path) -> None:
    audited(store, kept)
    path = store.path(LogKind.DISPATCH)
    path.write_bytes(path.read_bytes())
    assert hours(audited(store, kept)) == (3, 1)
    assert hours(audited(store, kept)) == (2, 2)


@pytest.mark.parametrize("damage", [b"", b"no verdict", bytes(100)], ids=["", "text", "zeros"])
def test_a_damaged_verdict_is_worked_out_again(store: Store, kept: Path, damage: bytes) -> None:
    audited(store, kept)
    first, second = verdict_files(kept)
    first.write_bytes(damage)
    data = bytearray(second.read_bytes())
    data[-1] ^= 1
    second.write_bytes(data)
    found = audited(store, kept)
    assert hours(found) == (4, 0)
    assert found.is_clean
    assert hours(audited(store, kept)) == (2, 2)


def test_a_verdict_on_rows_is_none_on_bodies(store: Store, kept: Path) -> None:
    audited(store, kept)
    found = audited(store, kept, with_bodies=True)
    assert hours(found) == (4, 0)
    again = audited(store, kept, with_bodies=True)
    assert (hours(again), again.bodies) == ((2, 2), found.bodies)
    assert hours(audited(store, kept)) == (2, 2)


def test_another_directory_has_verdicts_of_its_own(
    store: Store, kept: Path, tmp_path: Path
) -> None:
    other = Store(tmp_path / "other", shard=1)
    other.stop()
    audited(store, kept)
    assert hours(audited(other, kept)) == (0, 0)
    assert hours(audited(store, kept)) == (2, 2)


def test_verdicts_of_hours_that_are_gone_are_deleted(store: Store, kept: Path) -> None:
    audited(store, kept)
    old = verdict_files(kept)[0].with_name("2020-01-01T00.verdict")
    old.write_bytes(b"")
    beside = old.with_name("notes.txt")
    beside.write_bytes(b"")
    audited(store, kept)
    assert not old.exists()
    assert beside.exists()


def test_who_accuses_is_kept_nowhere(store: Store, kept: Path) -> None:
    assert rewrite(store.path(LogKind.DISPATCH), lambda rows: rows[1:])
    audited(store, kept)
    assert [path.name for path in verdict_files(kept)] == [f"{hour_name(HOUR + 1)}.verdict"]


def test_hours_that_are_left_out_need_no_verdict(store: Store, kept: Path) -> None:
    audited(store, kept)
    found = audit_here(
        store.root,
        now_ms=store.clock.now_ms,
        since_ms=START_MS + HOUR_MS,
        verdicts=Verdicts(kept),
    )
    assert (hours(found), found.hours_left_out) == ((2, 1), 1)


def test_the_commands_keep_verdicts(store: Store, kept: Path) -> None:
    command = ["check", "--settled", "--data-dir", store.root, "--verdicts", str(kept), "--json"]
    for wanted in (0, 2):
        done = CliRunner().invoke(make_app(), command)
        assert done.exit_code == 0, done.output
        assert json.loads(done.stdout)["hours_kept"] == wanted
    alone = CliRunner().invoke(make_app(), ["check", "--verdicts", str(kept)])
    assert alone.exit_code == 2 and "--settled" in alone.stderr
    since = format_time(START_MS + HOUR_MS)
    done = CliRunner().invoke(make_app(), [*command, "--since", since])
    assert json.loads(done.stdout)["hours_kept"] == 1


def test_where_nothing_can_be_written_is_an_error(store: Store, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(VerdictsError, match=r"cannot be kept in .*file"):
        Verdicts(tmp_path / "file" / "below")
    command = ["check", "--settled", "--data-dir", store.root, "--verdicts"]
    command.append(str(tmp_path / "file"))
    done = CliRunner().invoke(make_app(), command)
    assert done.exit_code == 2
    assert "give --verdicts a directory" in done.stderr.replace("\n", " ")


def test_facts_of_an_hour_in_the_middle_are_of_the_hour(store: Store, kept: Path) -> None:
    audited(store, kept)
    lines = {line["key"]: line["delivered"] for line in audited(store, kept).of("hour")}
    assert lines[HOUR + 1] == 38
