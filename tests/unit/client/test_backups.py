"""Backups of the client library, against a fake server."""

import pytest

from delayserver.client import AsyncClient, Backup, ConflictError, UnansweredError
from tests.unit.client.fake_server import Clock, FakeTransport, answer, asynchronous, problem

WHEN = "2026-11-21T00:00:00.000Z"
RUNNING = {
    **{"name": "one", "state": "running", "step": "copying", "started_at": WHEN},
    **{"taken_at": None, "completed_at": None, "total_bytes": 9, "done_bytes": 3},
    **{"copied_bytes": 2, "verified": False, "error": None},
    "shards": [{"shard": 0, "state": "running", "taken_at": None, "checkpoint_seq": None}],
}
COMPLETE = RUNNING | {
    **{"state": "complete", "step": None, "taken_at": WHEN, "completed_at": WHEN},
    "shards": [{"shard": 0, "state": "complete", "taken_at": WHEN, "checkpoint_seq": 7}],
}


def make(*replies):
    transport = FakeTransport(*replies)
    return AsyncClient(transport=transport, time=Clock(auto=True).time).backups, transport


@asynchronous
async def test_one_is_begun_and_waited_for():
    backups, transport = make(answer(202, RUNNING), answer(200, RUNNING), answer(200, COMPLETE))
    begun = await backups.begin("one", verify=False)
    assert isinstance(begun, Backup) and begun.step == "copying"
    made = await backups.wait("one")
    assert (made.state, made.shards[0].checkpoint_seq) == ("complete", 7)
    assert transport.requests == [
        ("POST", "/v1/backups", {"name": "one", "verify": False}),
        *[("GET", "/v1/backups/one", None)] * 2,
    ]


@asynchronous
async def test_the_wait_has_an_end():
    backups, _ = make(*[answer(200, RUNNING)] * 20)
    with pytest.raises(UnansweredError, match="not complete after 2"):
        await backups.wait("one", timeout_s=2)


@asynchronous
async def test_list_and_delete():
    backups, transport = make(answer(200, {"backups": [COMPLETE, RUNNING]}), answer(204, None))
    assert [one.state for one in await backups.list()] == ["complete", "running"]
    await backups.delete("a b")
    assert transport.requests[1][:2] == ("DELETE", "/v1/backups/a%20b")


@asynchronous
async def test_a_second_one_is_refused():
    backups, _ = make(problem(409, "one is being made"))
    with pytest.raises(ConflictError):
        await backups.begin()
