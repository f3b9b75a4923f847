"""Backups, of which each shard makes its part."""

from __future__ import annotations

from typing import Any

import msgspec

from delayserver.api.documents import backup_document
from delayserver.backup.shelf import BackupView
from delayserver.errors import (
    ConflictError,
    NotFoundError,
)
from delayserver.shards.peers import PeerAnswer, PeerCall
from delayserver.wire.bulk import BackupState
from tests.unit.shards.shards import ToldPeers, body_of, document_answer, problem_answer_of

COUNT = 4
MISSING_ANSWER = problem_answer_of(NotFoundError("there is no backup 'b'"))


def part_of_backup(shard: int, state: BackupState = "running") -> dict[str, Any]:
    view = BackupView("b", shard, state, "waiting", 1, None, None, None, 10, 5, 1, False)
    return msgspec.to_builtins(backup_document(view))


def test_each_shard_is_told_to_make_its_part_under_the_name_that_the_own_one_gives() -> None:
    peers = ToldPeers(COUNT, lambda shard, call: document_answer(part_of_backup(shard), 202), 1)
    found = peers.route(PeerCall("POST", "/v1/backups", body=b'{"verify": false}'))
    assert found is not None and found.status == 202
    assert [one["shard"] for one in body_of(found)["shards"]] == [*range(COUNT)]
    assert [shard for shard, _ in peers.asked] == [1, 0, 2, 3]
    for _, call in peers.asked[1:]:
        assert msgspec.json.decode(call.body) == {"name": "b", "verify": False}
        assert (b"content-type", b"application/json") in call.headers


def test_a_backup_that_a_shard_refuses_is_given_up_where_it_was_begun() -> None:
    def answer(shard: int, call: PeerCall) -> PeerAnswer:
        if call.method == "DELETE":
            return PeerAnswer(204, (), b"")
        if shard == 2:
            return problem_answer_of(ConflictError("there is a backup b"))
        return document_answer(part_of_backup(shard), 202)

    peers = ToldPeers(COUNT, answer, 0)
    found = peers.route(PeerCall("POST", "/v1/backups"))
    assert found is not None and found.status == 409
    deleted = [shard for shard, call in peers.asked if call.method == "DELETE"]
    assert deleted == [0, 1, 3]


def test_a_backup_without_the_part_of_a_shard_has_failed() -> None:
    def answer(shard: int, call: PeerCall) -> PeerAnswer:
        return document_answer(part_of_backup(shard, "complete")) if shard else MISSING_ANSWER

    found = body_of(ToldPeers(COUNT, answer, 3).route(PeerCall("GET", "/v1/backups/b")))
    assert found["state"] == "failed" and "shard 0" in found["error"]
    nobody = ToldPeers(COUNT, lambda shard, call: MISSING_ANSWER, 3)
    for method in ("GET", "DELETE"):
        missing = nobody.route(PeerCall(method, "/v1/backups/b"))
        assert missing is not None and missing.status == 404
