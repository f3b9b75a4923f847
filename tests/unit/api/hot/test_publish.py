"""Publishes that are decided together are answered as if each had come alone."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from delayserver.api.exit import Exit
from delayserver.api.hot.answers import JSON, wire_of
from delayserver.api.hot.consume import OwnGrants
from delayserver.api.hot.heads import read_head
from delayserver.api.hot.paths import MESSAGES_PATH
from delayserver.api.hot.publish import Hot
from delayserver.api.intake import Intake
from delayserver.errors import DelayServerError
from delayserver.records.ids import COLUMNS_MIN
from delayserver.security.tokens import Caller
from delayserver.server.calls import Calls
from delayserver.server.loop_turns import LoopTurns
from delayserver.wire.messages import BatchDocument, PublishedDocument
from storage.errors import DiskFullError
from tests.unit.api.hot.clients import Client, OnlyShard
from tests.unit.fakes import START_MS, MessageParts


class Machine(MessageParts):
    """`Hot` on parts that are moved by hand."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(now_ms=START_MS, **settings)
        self.sequencer.subject_id("orders")
        calls = SimpleNamespace(
            settings=self.settings,
            parts=(),
            telemetry=None,
            may_answer=lambda: True,
            shard=0,
            clock=lambda: START_MS,
            publish_one=self.publishing.publish_one,
            publish_new=self.publishing.publish_new,
            publishing_batch=self.publishing.publishing_batch,
            slices=self.slices,
            turns=LoopTurns(lambda function: None, lambda took_s: None, lambda: 0.0),
            message_id=self.messages.message_id,
            locate=self.messages.locate,
            version=self.messages.version,
            decide_when_free=self.groups.decide_when_free,
            consumers=None,
        )
        self.calls = calls
        intake = Intake(self.settings, self.sequencer.subjects, lambda: 0.5)
        exit_ = Exit(calls.may_answer, calls.shard)
        grants = OwnGrants(cast(Calls, calls))
        self.hot = Hot(cast(Calls, calls), intake, exit_, OnlyShard(), grants, lambda: None)

    def ask_together(self, bodies: list[bytes], caller: Caller | None = None) -> list[Client]:
        clients = [Client() for _ in bodies]
        for client, body in zip(clients, bodies, strict=True):
            self.hot.gather(client, body, caller)
        self.hot.decide()
        return clients

    def ask_alone(self, bodies: list[bytes]) -> list[bytes]:
        return [wire_of(self.hot.answer(MESSAGES_PATH, body, JSON, None, None)) for body in bodies]

    def fail(self, error: Exception) -> None:
        self.groups.flush(START_MS)
        self.groups.on_commit_failed(error)


def message(**fields: Any) -> bytes:
    return json.dumps({"subject": "orders", "body": {"a": "é"}, "delay": "1h", **fields}).encode()


PLAIN = [
    message(),
    message(key="k"),
    message(key='"é"', delay=1),
    message(deliver_at=1, delay=None),
    message(ttl="1h", jitter="10s", priority=9),
]
MANY = [*PLAIN, *(message(body=n) for n in range(COLUMNS_MIN))]


def test_new_messages_are_answered_as_if_alone_and_only_once_they_are_durable() -> None:
    together, alone = Machine(), Machine()
    clients = together.ask_together(MANY)
    assert [client.told for client in clients] == [[]] * len(MANY)
    assert all(client.last_group is together.sequencer.group for client in clients)
    together.commit()
    assert [client.told for client in clients] == [[wire] for wire in alone.ask_alone(MANY)]
    for client in clients:
        document = client.told[0].partition(b"\r\n\r\n")[2]
        msgspec.json.decode(document, type=PublishedDocument)


@pytest.mark.parametrize(
    "other",
    [
        message(key="k", body=2),  # stands for other content
        message(key="k"),  # is there already
        message(subject="not a subject"),
        message(body_base64="?"),
        b"not JSON",
        b'{"subject":"orders"},{"subject":"orders"}',
        b"\xff",
    ],
)
def test_one_that_is_not_plain_changes_nothing_for_the_others(other: bytes) -> None:
    together, alone = Machine(), Machine()
    bodies = [*MANY, other]
    clients = together.ask_together(bodies)
    together.commit()
    assert [client.told for client in clients] == [[wire] for wire in alone.ask_alone(bodies)]
    alone.commit()
    assert together.sequencer.next_seq == alone.sequencer.next_seq


def test_a_caller_who_may_not_publish_there_is_told_so() -> None:
    class Stranger:
        def require(self, actions: object, subject: str) -> None:
            raise DelayServerError("no")

    machine = Machine()
    clients = machine.ask_together(MANY, cast(Caller, Stranger()))
    assert all(b"201" not in client.told[0].partition(b"\r\n")[0] for client in clients)
    assert machine.publishing.accepted_total == 0


def test_a_full_disk_is_told_to_all() -> None:
    machine = Machine()
    clients = machine.ask_together(MANY)
    error = DiskFullError("write", "x", "full")
    machine.fail(error)
    assert [(client.told, client.errors) for client in clients] == [([], [error])] * len(MANY)


def test_a_mistake_of_ours_is_told_to_all(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine()
    monkeypatch.setattr(machine.calls, "publish_new", lambda *arguments: 1 / 0)
    for client in machine.ask_together(MANY):
        assert client.told[0].startswith(b"HTTP/1.1 500 ")


def test_the_answer_to_a_batch_has_the_form_that_its_struct_describes() -> None:
    machine = Machine()
    for items in (b"[]", b"[%b]" % MANY[0], b"[%b]" % b",".join(MANY), b"[%b]" % b",".join(MANY)):
        answer = machine.hot.answer("/v1/messages/batch", items, JSON, None, None)
        found = msgspec.json.decode(answer.body, type=BatchDocument)
        # … without the last one, which a batch over several shards has.
        assert list(json.loads(answer.body)) == list(BatchDocument.__struct_fields__)[:-1]
        assert found.count == len(found.ids) == len(json.loads(items))
        for text in found.ids:
            machine.ids.decode(text)


LINE = b"POST /v1/messages HTTP/1.1\r\nhost: a\r\ncontent-length: 2\r\n"


def test_which_heads_may_be_gathered() -> None:
    def may(head: bytes) -> bool:
        found = read_head(LINE + head + b"\r\n")
        return found is not None and found.may_gather

    assert may(b"")
    assert not may(b"connection: close\r\n")
    trace = b"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    assert not may(b"traceparent: %b\r\n" % trace)


def test_publishes_that_come_together_are_no_longer_than_a_group() -> None:
    """The others are in the next ones."""
    long = message(body="x" * 300)
    machine = Machine(group_max_bytes=1000, unfiled_max_bytes=1 << 30, checkpoint_bytes=1000)
    clients = [Client() for _ in range(8)]
    for client in clients:
        machine.hot.gather(client, long, None)
    assert machine.hot.gathered_bytes == 8 * len(long)
    longest = 0
    while not all(client.told for client in clients):
        machine.groups.flush(START_MS)
        group = machine.groups.on_committed()
        longest = max(longest, group.total_bytes)
        group.tell_waiters(None)
        machine.groups.resume()
    assert all(b" 201 " in client.told[0] for client in clients)
    assert longest < 1000 + len(long)
    assert machine.hot.gathered_bytes == 0


@pytest.mark.parametrize("first", [message(key="k"), message(subject="not a subject")])
def test_all_are_answered_where_those_that_fill_a_group_leave_no_record(first: bytes) -> None:
    machine = Machine(group_max_bytes=1000, unfiled_max_bytes=1 << 30, checkpoint_bytes=1000)
    machine.ask_together([message(key="k")])
    machine.commit()
    clients = [Client() for _ in range(64)]
    asked = machine.ports.wakes
    for client in clients:
        machine.hot.gather(client, first, None)
    turns = 0
    while machine.ports.wakes > asked + turns and turns < len(clients):
        turns += 1
        machine.groups.flush(START_MS)
    assert [client.told != [] for client in clients] == [True] * len(clients)
    assert machine.groups.is_idle
    assert turns > 1


def test_publishes_that_wait_to_be_decided_have_a_bound_together() -> None:
    machine = Machine(batch_max_bytes=1000, body_max_bytes=1000, receiving_max_bytes=1000)
    one = message(body="x" * 300)
    clients = [Client() for _ in range(4)]
    for client in clients:
        machine.hot.gather(client, one, None)
    refused = [client.told for client in clients if client.told]
    assert len(refused) == 4 - 1000 // len(one)
    assert all(b" 503 " in told[0] and b"receiving_max_bytes" in told[0] for told in refused)
