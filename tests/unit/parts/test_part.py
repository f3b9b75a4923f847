"""The protocol of a part: its effects, checks, rules and shard routes reach the core."""

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from fastapi.routing import APIRoute

from delayserver.api.scopes import ADMIN, PUBLIC, CoveredSubject, Rule, rule_of
from delayserver.config import Settings
from delayserver.parts.installed import PARTS
from delayserver.parts.part import Effect, Feature, Halves, KeyedCalls, checks_of, effects_of
from delayserver.records.sharding import shard_of_name
from delayserver.records.tables import can_be_read, check_entry
from delayserver.recovery.repair_catalog import Rebuilt, Tables
from delayserver.schedule.effects import Effects
from delayserver.security.tokens import Action
from delayserver.shards.peers import PeerCall
from delayserver.shards.router import Router
from storage.catalog import Table
from storage.frame import seal
from storage.rows import MESSAGE_DTYPE, SCHEDULE_DTYPE, RecordKind
from tests.unit.shards.shards import ToldPeers, body_of, document_answer, own_answer
from tests.world.storage.catalog import MemoryCatalog


def _no_decider(core: Any) -> Any:
    raise AssertionError


def _check(key: bytes, value: bytes) -> None:
    if key != value:
        raise ValueError("a value of another key")


KIND, TABLE = RecordKind(255), Table("part_255")
TOY = Feature(
    name="toy",
    decide=_no_decider,
    effects={KIND: lambda payload: [(TABLE, payload, payload)]},
    checks={TABLE: _check},
    collection="toys",
    keyed=(
        KeyedCalls("PUT", "/v1/toy-boxes/{key}"),
        KeyedCalls("POST", "/v1/toy-days/{key}", ("opened",)),
    ),
    rules={("GET", "/v1/toys"): Rule((Action.CONSUME,), CoveredSubject.BODY)},
)


def test_the_tables_of_a_part_are_checked_by_its_own_rule() -> None:
    more = checks_of((TOY,))
    check_entry(TABLE, b"a", b"a", more)
    with pytest.raises(ValueError, match="another key"):
        check_entry(TABLE, b"a", b"b", more)
    assert not can_be_read(TABLE, b"a", b"b", more)


def test_the_record_kinds_of_a_part_are_filed_by_its_own_effects() -> None:
    assert effects_of((TOY,)).keys() == {KIND}
    effects = Effects(MemoryCatalog(), 0, (TOY,))
    row, sealed = np.zeros(1, MESSAGE_DTYPE), seal(b"a")
    row["seq"], row["kind"], row["payload_length"] = 1, KIND, len(sealed)
    effects.note_records(row, sealed)
    assert effects.writes[TABLE] == [(b"a", b"a")]


def test_a_repair_takes_the_newest_state_that_a_message_of_a_part_carries() -> None:
    sources, states = Table.SOURCES, Table.SOURCE_STATES
    halves = Halves(sources, lambda value: 0, states, lambda value: value[0], "how far it is")
    effects: dict[RecordKind, Effect] = {RecordKind.RUN: lambda data: [(states, b"a", data)]}
    rebuilt = Rebuilt((replace(TOY, halves=halves, effects=effects),))
    for seq in (5, 7, 6):
        row, sealed = np.zeros(1, SCHEDULE_DTYPE), seal(bytes([seq]))
        row["seq"], row["kind"], row["payload_length"] = seq, RecordKind.RUN, len(sealed)
        rebuilt.hour()(row, sealed)
    for known, mended in ((None, 7), (6, 7), (8, 8)):
        defined: Tables = {sources: {b"a": b"", b"b": b""}, states: {}}
        if known is not None:
            defined[states][b"a"] = bytes([known])
        assert rebuilt.mend_parts(defined) == ["the toy 'b': put it again"]
        assert defined == {sources: {b"a": b""}, states: {b"a": bytes([mended])}}


def test_the_calls_of_a_part_need_the_scope_that_it_says_and_others_that_of_an_admin() -> None:
    assert rule_of((TOY,), "GET", "/v1/toys") == Rule((Action.CONSUME,), CoveredSubject.BODY)
    assert rule_of((), "GET", "/v1/toys") is ADMIN
    assert rule_of((TOY,), "PUT", "/v1/toys") is ADMIN
    assert rule_of((TOY,), "GET", "/healthz") is PUBLIC


def test_a_definition_of_a_part_is_for_the_shard_of_its_name() -> None:
    peers = ToldPeers(4, own_answer)
    for name in ("a", "b", "c", "d"):
        router = Router(peers, Settings(), (TOY,))
        asyncio.run(router.answer(PeerCall("GET", f"/v1/toys/{name}")))
    owners = [shard_of_name(name, 4) for name in ("a", "b", "c", "d")]
    assert [shard for shard, _ in peers.asked] == [one for one in owners if one]
    assert asyncio.run(Router(peers, Settings(), ()).answer(PeerCall("GET", "/v1/toys/a"))) is None


def test_a_call_with_a_key_is_for_the_shard_of_the_key_or_asks_all_and_adds_up() -> None:
    peers = ToldPeers(4, lambda shard, call: document_answer({"opened": 3}))
    router = Router(peers, Settings(), (TOY,))
    for key in ("a", "b/c", "d"):
        asyncio.run(router.answer(PeerCall("PUT", f"/v1/toy-boxes/{key}")))
    owners = [shard_of_name(key, 4) for key in ("a", "b/c", "d")]
    assert [shard for shard, _ in peers.asked] == [one for one in owners if one]
    found = asyncio.run(router.answer(PeerCall("POST", "/v1/toy-days/today")))
    assert body_of(found) == {"opened": 12}


def test_each_call_of_a_part_of_this_server_has_a_rule() -> None:
    for part in PARTS:
        assert part.routes is not None
        methods = {
            (method, route.path_format)
            for route in part.routes().routes
            if isinstance(route, APIRoute)
            for method in route.methods or ()
        }
        assert methods == part.rules.keys()
