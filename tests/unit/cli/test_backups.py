"""backup, backups, restore: what is asked, what is shown, how it ends."""

import json
from typing import Any

import pytest

from delayserver.cli.backups import outdated

RUNNING: dict[str, Any] = {
    **{"name": "one", "state": "running", "step": "copying", "started_at": "2026-11-20T16:00:00Z"},
    **{"taken_at": None, "completed_at": None, "total_bytes": 9000, "done_bytes": 3},
    **{"copied_bytes": 2, "verified": False, "error": None, "shards": []},
}
COMPLETE = RUNNING | {"state": "complete", "step": None, "verified": True}


@pytest.fixture(autouse=True)
def _at_once(monkeypatch):
    monkeypatch.setattr("delayserver.cli.backups.POLL_S", 0)


def test_a_backup_is_waited_for(cli):
    for status, document in ((202, RUNNING), (200, RUNNING), (200, COMPLETE)):
        cli.answer(status, document)
    ended = cli.run("backup", "one")
    assert ended.exit_code == 0 and "9,000" in ended.stdout and "complete" in ended.stdout
    assert [(one.method, one.url.path) for one in cli.requests] == [
        ("POST", "/v1/backups"),
        *[("GET", "/v1/backups/one")] * 2,
    ]
    assert json.loads(cli.requests[0].content) == {"verify": True, "name": "one"}


def test_a_backup_is_only_begun(cli):
    cli.answer(202, RUNNING)
    ended = cli.run("backup", "--no-wait", "--no-verify", "--json")
    assert json.loads(ended.stdout) == RUNNING
    assert cli.asked == ("POST", "/v1/backups", {"verify": False})


def test_one_that_fails(cli):
    cli.answer(202, RUNNING)
    cli.answer(200, RUNNING | {"state": "failed", "error": "the disk is full"})
    ended = cli.run("backup", "one", "--keep", "2")
    assert ended.exit_code == 1 and "one has failed: the disk is full" in ended.stderr
    assert len(cli.requests) == 2  # Nothing older is deleted.


def test_older_ones_are_deleted_behind_it(cli):
    names = ["zero", "half", "one"]
    cli.answer(202, COMPLETE)
    listed = [COMPLETE | {"name": name} for name in names]
    cli.answer(200, {"backups": [listed[0], RUNNING | {"state": "failed"}, *listed[1:]]})
    cli.answer(204, None)
    assert cli.run("backup", "one", "--keep", "2").exit_code == 0
    assert [one.url.path for one in cli.requests[2:]] == ["/v1/backups/zero"]
    assert cli.run("backup", "--keep", "2", "--no-wait").exit_code == 2


@pytest.mark.parametrize(
    ("listed", "keep", "deleted"),
    [
        # Upper case: verified. The last one was made just now.
        ("ABC", 2, "A"),
        ("ABCxyz", 3, ""),
        ("ABxyz", 1, "Axy"),
        ("AxByCz", 2, "Ax"),
        ("xyA", 1, "x"),
        ("Ax", 1, ""),
        ("x", 1, ""),
    ],
)
def test_the_newest_verified_backup_is_kept(listed, keep, deleted):
    backups = [COMPLETE | {"name": name, "verified": name.isupper()} for name in listed]
    backups.insert(1, RUNNING | {"name": "failed", "state": "failed"})
    found = outdated(backups, keep, listed[-1])
    assert sorted(found) == sorted(deleted)
    verified = [name for name in listed if name.isupper()]
    assert not verified or verified[-1] not in found


def test_the_one_that_was_made_just_now_stays_wherever_it_is_listed():
    backups = [COMPLETE | {"name": name} for name in "ABC"]
    assert outdated(backups, 1, "A") == ["B"]


def test_they_are_listed_and_deleted(cli):
    cli.answer(200, {"backups": [COMPLETE]})
    assert "9,000" in cli.run("backups").stdout
    cli.answer(200, {"backups": []})
    assert "There are no backups" in cli.run("backups", "list").stdout
    cli.answer(204, None)
    assert "one is deleted" in cli.run("backups", "delete", "one").stdout
    assert cli.requests[-1].method == "DELETE"


def test_nothing_is_restored_of_what_is_no_backup(cli, tmp_path):
    ended = cli.run("restore", str(tmp_path), str(tmp_path / "data"))
    assert ended.exit_code == 2 and "is no backup that counts" in ended.stderr
    ended = cli.run("restore", str(tmp_path / "x"), str(tmp_path / "data"), "--json")
    assert "there is no directory" in json.loads(ended.stderr)["title"]
    assert not (tmp_path / "data").exists()


def test_a_moment_is_understood_or_refused(cli, tmp_path):
    def error(until):
        ended = cli.run("restore", str(tmp_path), str(tmp_path / "data"), "--until", until)
        assert ended.exit_code == 2
        return " ".join(ended.stderr.replace("│", " ").split())

    for until in ("2026-11-20T16:00:00Z", "1795192200001", "latest"):
        assert "is neither a backup that counts nor" in error(until)
    assert "RFC 3339" in error("yesterday") and "`latest`" in error("yesterday")
    assert "milliseconds, not seconds" in error("1795192200")
    assert "is still to come" in error("2126-11-20T16:00:00Z")
    assert not (tmp_path / "data").exists()
