"""Cancels that are decided together are answered as if each had come alone."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from delayserver.api.hot.answers import wire_of
from delayserver.api.hot.cancel import HotCancel
from delayserver.api.hot.heads import read_head_of_one
from delayserver.api.hot.paths import MESSAGE_PATH, one_of
from delayserver.errors import AccessError
from delayserver.records.ids import COLUMNS_MIN
from delayserver.records.message import Payload, State
from delayserver.records.message_id import MessageId
from delayserver.security.tokens import Caller
from delayserver.server.calls import Calls
from delayserver.slices import at_once
from delayserver.wire.messages import CancelledDocument, StateDocument
from storage.errors import CatalogError, DamageError, DiskFullError
from storage.rows import HOUR_MS
from tests.unit.api.hot.clients import Client, OnlyShard
from tests.unit.fakes import MINUTE_MS, START_MS, SUBJECT, MessageParts, message

FULL = DiskFullError("write", "x", "full")
LATER_MS = START_MS + 30 * MINUTE_MS
TOMORROW_MS = START_MS + 24 * HOUR_MS
COUNT = 2 * COLUMNS_MIN


class Machine(MessageParts):
    """`HotCancel` on parts that are moved by hand, and messages that wait."""

    def __init__(self) -> None:
        super().__init__(now_ms=START_MS)
        calls = SimpleNamespace(
            find_by_ids=self.cancels.by_ids,
            find_by_keys=self.cancels.by_keys,
            cancel_many=self.cancels.cancelling,
            message_id=self.messages.message_id,
            by_key=self.messages.by_key,
            cancel=self.messages.cancel,
            decide_this_turn=self.groups.decide_this_turn,
            not_durable=self.groups.not_durable,
            subjects=self.sequencer.subjects,
            encode_id=self.ids.encode,
            encode_ids=lambda dues_ms, seqs: self.ids.texts(self.ids.encode_many(dues_ms, seqs)),
        )
        self.calls = calls
        self.hot = HotCancel(cast(Calls, calls), OnlyShard())
        dues_ms = [LATER_MS if number % 3 else TOMORROW_MS for number in range(COUNT)]
        new = [message(due_ms, key=f"k{number}") for number, due_ms in enumerate(dues_ms)]
        seqs = self.publish(*new, message(START_MS - 1, key="fired"))
        self.published = [
            MessageId(0, due_ms, seq)
            for due_ms, seq in zip([*dues_ms, START_MS - 1], seqs, strict=True)
        ]
        self.commit()
        self.file()
        now_ms = START_MS + 1
        self.wheel.advance(now_ms, loaded_until_ms=now_ms, rows_max=10)

    def id_path(self, number: int) -> str:
        one = self.published[number]
        return MESSAGE_PATH + self.ids.encode(one.due_ms, one.seq)

    def ask_together(self, paths: list[str], caller: Caller | None = None) -> list[Client]:
        clients = [Client() for _ in paths]
        for client, path in zip(clients, paths, strict=True):
            self.hot.gather(client, *one_of(path), caller)
        assert all(client.is_waiting for client in clients)
        self.groups.flush(START_MS)
        return clients

    def ask_alone(self, paths: list[str], caller: Caller | None = None) -> list[bytes]:
        return [wire_of(self.hot.answer(path, (), caller)) for path in paths]

    def end(self, error: Exception | None = None) -> None:
        """The group that is being written is durable, or is not since there was an error."""
        if error is None:
            self.groups.on_committed().tell_waiters(None)
        else:
            self.groups.on_commit_failed(error)


class Stranger:
    """Somebody who may cancel messages of one subject only."""

    is_admin = False

    def require(self, actions: object, subject: str) -> None:
        if subject != SUBJECT:
            raise AccessError(f"no scope for {subject}", authenticated=True)


def key_path(key: str, subject: str = SUBJECT) -> str:
    return f"/v1/subjects/{subject}/keys/{key}"


PLAIN = [key_path(f"k{number}") for number in range(COLUMNS_MIN)]


def test_they_are_answered_as_if_alone_and_only_once_they_are_durable() -> None:
    together, alone = Machine(), Machine()
    paths = [*PLAIN, together.id_path(COLUMNS_MIN)]
    clients = together.ask_together(paths)
    assert [client.told for client in clients] == [[]] * len(paths)
    together.end()
    assert [client.told for client in clients] == [[wire] for wire in alone.ask_alone(paths)]
    for client in clients:
        document = client.told[0].partition(b"\r\n\r\n")[2]
        msgspec.json.decode(document, type=StateDocument)
    alone.commit()
    assert together.sequencer.next_seq == alone.sequencer.next_seq
    assert together.messages.cancelled_total == alone.messages.cancelled_total == len(paths)
    assert together.wheel.contains(together.published[1].seq, LATER_MS) is False


def test_they_are_decided_while_another_group_is_being_written() -> None:
    machine = Machine()
    machine.publish(message(TOMORROW_MS))
    machine.groups.flush(START_MS)
    clients = machine.ask_together(PLAIN)
    assert not machine.wheel.contains(machine.published[1].seq, LATER_MS)
    machine.end()
    assert not any(client.told for client in clients)
    machine.groups.flush(START_MS)
    machine.end()
    assert all(client.told[0].startswith(b"HTTP/1.1 200 ") for client in clients)


@pytest.mark.parametrize(
    "others",
    [
        [key_path("none")],
        [key_path("")],
        [key_path("k0", "nothing.there")],
        [key_path("k0", "no subject")],
        [key_path("fired")],
        [PLAIN[0], PLAIN[0], key_path(f"k{COLUMNS_MIN}")],
        [MESSAGE_PATH + "x"],
        [MESSAGE_PATH + "0" * 36],
    ],
)
def test_one_that_is_not_plain_is_told_its_own_answer(others: list[str]) -> None:
    together, alone = Machine(), Machine()
    paths = [
        *others,
        *PLAIN,
        together.id_path(0),
        together.id_path(1).upper().replace("/V1", "/v1"),
    ]
    paths[-1] = MESSAGE_PATH + together.id_path(1).removeprefix(MESSAGE_PATH).upper()
    clients = together.ask_together(paths)
    together.end()
    assert [client.told for client in clients] == [[wire] for wire in alone.ask_alone(paths)]
    assert together.sequencer.next_seq == alone.sequencer.next_seq


def test_what_was_cancelled_before_is_cancelled() -> None:
    machine = Machine()
    machine.ask_together(PLAIN)
    machine.end()
    clients = machine.ask_together(PLAIN)
    assert all(client.told[0].startswith(b"HTTP/1.1 200 ") for client in clients)
    assert machine.messages.cancelled_total == len(PLAIN)


def test_a_caller_is_asked_for_each() -> None:
    caller = cast(Caller, Stranger())
    together, alone = Machine(), Machine()
    paths = [*PLAIN, key_path("k0", "other"), key_path("k0", "no subject")]
    clients = together.ask_together(paths, caller)
    together.end()
    told = [client.told for client in clients]
    assert told == [[wire] for wire in alone.ask_alone(paths, caller)]
    assert [wire[9:12] for [wire] in told] == [b"200"] * len(PLAIN) + [b"403"] * 2


@pytest.mark.parametrize("count", [1, COLUMNS_MIN - 1, COLUMNS_MIN])
def test_few_are_decided_one_by_one(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    machine = Machine()
    paths = [key_path(f"k{number}") for number in range(count)]
    in_columns = []
    cancel = machine.cancels.cancelling

    def noting(*columns: Any) -> Any:
        in_columns.append(len(columns[0]))
        return cancel(*columns)

    monkeypatch.setattr(machine.calls, "cancel_many", noting)
    clients = machine.ask_together(paths)
    machine.end()
    assert all(client.told[0].startswith(b"HTTP/1.1 200 ") for client in clients)
    assert in_columns == ([count] if count == COLUMNS_MIN else [])


def test_a_group_that_is_nearly_full_takes_as_many_as_one_by_one() -> None:
    together, alone = Machine(), Machine()
    for machine in (together, alone):
        size = machine.settings.group_max_bytes - 500
        machine.publish(message(TOMORROW_MS, body=b"x" * size))
    clients = together.ask_together(PLAIN)
    together.end()
    told = [client.told for client in clients]
    assert told == [[wire] for wire in alone.ask_alone(PLAIN)]
    assert {wire[9:12] for [wire] in told} == {b"200", b"503"}


def test_a_server_that_is_stopping_tells_all() -> None:
    together, alone = Machine(), Machine()
    together.groups.stopping = alone.groups.stopping = True
    clients = together.ask_together(PLAIN)
    assert [client.told for client in clients] == [[wire] for wire in alone.ask_alone(PLAIN)]
    assert all(b" 503 " in client.told[0] for client in clients)


def test_a_full_disk_is_told_to_all_and_nothing_is_cancelled() -> None:
    machine = Machine()
    clients = machine.ask_together(PLAIN)
    error = DiskFullError("write", "x", "full")
    machine.end(error)
    assert [(client.told, client.errors) for client in clients] == [([], [error])] * len(PLAIN)
    assert all(machine.wheel.contains(one.seq, LATER_MS) for one in machine.published[1:3])


@pytest.mark.parametrize(
    "error", [CatalogError("read keys", "no"), DamageError("catalog/data.mdb", 0, "no")]
)
def test_what_cannot_be_looked_up_is_an_error_of_its_own(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    together, alone = Machine(), Machine()
    for machine in (together, alone):
        sequencer = machine.sequencer
        bad, key = machine.messages.key_hash(1, "k1"), sequencer.key

        def looked_up(key_hash: bytes, bad: bytes = bad, key: Any = key) -> Any:
            if key_hash == bad:
                raise error
            return key(key_hash)

        def many(key_hashes: Any) -> Any:
            raise error

        monkeypatch.setattr(sequencer, "key", looked_up)
        monkeypatch.setattr(sequencer, "under_keys", many)
    clients = together.ask_together(PLAIN)
    together.end()
    told = [client.told for client in clients]
    assert told == [[wire] for wire in alone.ask_alone(PLAIN)]
    assert [b" 200 " in wire for [wire] in told] == [number != 1 for number in range(len(PLAIN))]


def test_a_mistake_of_ours_is_told_to_all(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine()
    monkeypatch.setattr(machine.calls, "cancel_many", lambda *columns: 1 / 0)
    for client in machine.ask_together(PLAIN):
        assert client.told[0].startswith(b"HTTP/1.1 500 ")


def test_what_was_gathered_is_decided_once() -> None:
    machine = Machine()
    client = Client()
    machine.hot.gather(client, SUBJECT, "k0", None)
    machine.hot.decide()
    machine.groups.flush(START_MS)
    machine.end()
    assert len(client.told) == 1


def test_each_of_many_in_one_call_has_its_result() -> None:
    machine = Machine()
    text = machine.id_path(1).removeprefix(MESSAGE_PATH)
    body = (
        b'{"ids":["%b","x"],"keys":[{"subject":"%b","key":"k2"},{"subject":"%b","key":"none"},'
        b'{"subject":"no subject","key":"k0"},{"subject":"%b","key":"fired"}]}'
    ) % (text.upper().encode(), *[SUBJECT.encode()] * 3)
    answer = at_once(machine.hot.answering(body, None))
    found = msgspec.json.decode(answer.body, type=CancelledDocument)
    states = ["cancelled", None, "cancelled", None, None, "delivered"]
    assert [one.state for one in found.results] == states
    expected = [text, "x", machine.id_path(2), None, None, machine.id_path(-1)]
    ids = [one and one.removeprefix(MESSAGE_PATH) for one in expected]
    assert [one.id for one in found.results] == ids
    assert [one.key for one in found.results] == [None, None, "k2", "none", "k0", "fired"]


@pytest.mark.parametrize("at_a_time", [1, 2, 3])
def test_a_call_of_many_is_decided_in_slices_with_the_same_results(
    monkeypatch: pytest.MonkeyPatch, at_a_time: int
) -> None:
    bodies = []
    for limit in (at_a_time, 1000):
        monkeypatch.setattr("delayserver.api.hot.cancel.CANCELS_TURN", limit)
        machine = Machine()
        ids = [machine.id_path(number).removeprefix(MESSAGE_PATH) for number in (1, 2, 1, 3, -1)]
        keys = [{"subject": SUBJECT, "key": key} for key in ("k2", "none", "k5", "k6", "fired")]
        body = msgspec.json.encode(
            {"ids": [*ids, "x"], "keys": [*keys, {"subject": "no subject", "key": "k"}]}
        )
        work = machine.hot.answering(body, None)
        steps = 0
        while True:
            try:
                next(work)
            except StopIteration as end:
                bodies.append(end.value.body)
                break
            steps += 1
        assert (steps >= 12 // at_a_time) is (limit == at_a_time)
    assert bodies[0] == bodies[1]


def stop(machine: Machine) -> None:
    machine.groups.stopping = True


def fall_behind(machine: Machine) -> None:
    object.__setattr__(machine.settings, "unfiled_max_bytes", -1)


def lose_the_disk(machine: Machine) -> None:
    machine.groups.flush(START_MS)
    if not machine.groups.is_idle:
        machine.end(FULL)


@pytest.mark.parametrize("happens", [stop, fall_behind, lose_the_disk])
def test_an_error_between_slices_has_cancelled_none_or_is_told_of_those_that_it_concerns(
    monkeypatch: pytest.MonkeyPatch, happens: Callable[[Machine], None]
) -> None:
    monkeypatch.setattr("delayserver.api.hot.cancel.CANCELS_TURN", 3)
    monkeypatch.setattr("delayserver.decisions.cancels.OTHERS_TURN", 2)
    outcomes = set()
    for before in range(100):
        machine = Machine()
        machine.cancels.columns_min = 2
        for number in (2, 4, 7, 8, 11):  # These are not plain.
            one = machine.published[number]
            machine.messages.move(one.seq, one.due_ms, TOMORROW_MS, Payload(b"1"), 1)
        machine.commit()
        machine.file()
        wanted = range(1, 13)
        ids = [machine.id_path(number).removeprefix(MESSAGE_PATH) for number in wanted]
        work = machine.hot.answering(msgspec.json.encode({"ids": [*ids, "x"]}), None)
        has_ended = sum(1 for _ in zip(range(before), work, strict=False)) < before
        if has_ended:
            break
        happens(machine)
        answer = at_once(work)
        errors: list[Exception | None] = [None]
        if answer.group is not None:
            machine.groups.flush(START_MS)
            if not machine.groups.is_idle:
                machine.end()
            answer.group.when_durable(errors.append)
        located = [
            machine.messages.locate(one.seq, one.due_ms).state for one in machine.published[1:13]
        ]
        is_cancelled = [state is State.CANCELLED for state in located]
        if answer.status != 200 or errors[-1] is not None:
            assert not any(is_cancelled)
            outcomes.add("none")
        else:
            results = msgspec.json.decode(answer.body, type=CancelledDocument).results
            assert [one.state == "cancelled" for one in results] == [*is_cancelled, False]
            assert all((one.error is None) is (one.state is not None) for one in results)
            outcomes.add("all" if all(is_cancelled) else "some" if any(is_cancelled) else "none")
    assert has_ended
    assert outcomes == {"none", "some", "all"}


def test_which_heads_may_be_gathered() -> None:
    def may(line: bytes, fields: bytes = b"") -> bool:
        found = read_head_of_one(b"%b HTTP/1.1\r\nhost: localhost\r\n%b\r\n" % (line, fields))
        return found is not None and found.may_gather_cancel

    by_key, by_id = b"DELETE /v1/subjects/a/keys/b", b"DELETE /v1/messages/a"
    assert may(by_key)
    assert may(by_id, b"content-length: 0\r\n")
    assert not may(by_key, b'if-match: "1"\r\n')
    assert not may(by_id, b"if-match: *\r\n")
    assert not may(by_key, b"connection: close\r\n")
    assert not may(by_key, b"content-length: 1\r\n")
    assert not may(b"PUT /v1/heartbeats/a", b"content-length: 0\r\n")
