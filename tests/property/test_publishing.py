"""Publishing column by column against publishing one message after the other."""

from __future__ import annotations

import base64
import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from delayserver.api.intake import Intake
from delayserver.decisions.new_messages import NewMessage
from delayserver.decisions.publishing import Accepted
from delayserver.errors import ConflictError, InputError, InputErrors
from delayserver.records.ids import KeyHasher
from tests.unit.fakes import SECRET, START_MS, MessageParts
from tests.world.publishes import columns_of

SUBJECTS = ("order.unpaid", "envelope")
KEYS = ("a", "é", "k" * 256)
TRACE = {"traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"}
HOUR_MS = 3_600_000

bodies = st.sampled_from(['{"n": 1.10}', '"é"', "[]", "null", '"' + "x" * 300 + '"'])
times: st.SearchStrategy[dict[str, Any]] = st.one_of(
    st.fixed_dictionaries({}),
    st.fixed_dictionaries({"delay": st.sampled_from([0, 1, 5_000, "1s", "1h30m", "2d"])}),
    st.fixed_dictionaries(
        {
            "deliver_at": st.sampled_from(
                [5, START_MS - 1, START_MS + 1, START_MS + 2 * HOUR_MS, "2027-01-15T08:00:00.5Z"]
            )
        }
    ),
)
documents = st.builds(
    lambda more, when: {**more, **when},
    st.fixed_dictionaries(
        {"subject": st.sampled_from(SUBJECTS)},
        optional={
            "key": st.sampled_from(KEYS),
            "headers": st.sampled_from([{}, {"x-shop": "7"}]),
            "watch": st.sampled_from([[], ["w"], ["w", "v"]]),
            "ttl": st.sampled_from([None, "1h"]),
            "jitter": st.sampled_from([0, "10s"]),
            "priority": st.integers(0, 9),
            "to": st.sampled_from(
                [None, {"url": "http://127.0.0.1/a"}, {"url": "http://[::1]:9/", "timeout": "1s"}]
            ),
        },
    ),
    times,
)
wrong = st.sampled_from(
    [
        {"subject": "not a subject"},
        {"subject": "a", "key": ""},
        {"subject": "a", "delay": "soon"},
        {"subject": "a", "delay": "9999d"},
        {"subject": "a", "deliver_at": 10**15},
        {"subject": "a", "deliver_at": START_MS // 1000},
        {"subject": "a", "delay": 1, "deliver_at": START_MS},
        {"subject": "a", "headers": {"a b": "c"}},
        {"subject": "a", "body_base64": "?"},
        {"subject": "a", "watch": ["", "a"]},
        {"subject": "a", "on_event": "fire"},
        {"subject": "a", "ttl": 0},
        {"subject": "a", "jitter": "9999d"},
        {"subject": "a", "priority": 10},
        {"subject": "a", "to": {"url": "http://a/"}},
        {"subject": "a", "to": {"url": "http://127.0.0.1/", "retry": {"max_attempts": 0}}},
        {"subject": "a", "nothing": 1},
        {},
    ]
)


def as_json(document: dict[str, Any], body: str | None, *, binary: bool = False) -> bytes:
    """The request, with the body as it stands there."""
    if binary and body is not None:
        document = {**document, "body_base64": base64.b64encode(body.encode()).decode()}
        body = None
    text = json.dumps(document)
    if body is not None:
        text = text[:-1] + (", " if document else "") + f'"body": {body}}}'
    return text.encode()


requests = st.lists(
    st.builds(
        lambda document, body, binary: as_json(document, body, binary=binary),
        documents,
        st.none() | bodies,
        st.booleans(),
    ),
    min_size=1,
    max_size=12,
)
any_requests = st.lists(
    st.one_of(st.builds(as_json, documents, bodies), st.builds(as_json, wrong, st.none())),
    min_size=1,
    max_size=6,
)


class Parts(MessageParts):
    """Publishing whose subjects are known, so that all rows are those of messages."""

    def __init__(self) -> None:
        super().__init__(dedupe_window_ms=0)
        for subject in SUBJECTS:
            self.sequencer.subject_id(subject)
        self.intake = Intake(self.settings, self.sequencer.subjects, lambda: 0.5)
        self.hasher = KeyHasher(SECRET)

    def outcome(self) -> tuple[object, ...]:
        """All that publishing leaves behind."""
        keys = [(subject_id, key) for subject_id in (1, 2) for key in KEYS]
        return (
            self.sequencer.next_seq,
            self.sequencer.group.count,
            self.sequencer.group.payload_bytes,
            self.sequencer.group.encode(),
            list(self.sequencer.group.express),
            [self.sequencer.key(self.hasher(*one)) for one in keys],
            dict(self.publishing.accepted_by_subject),
            [sorted(w.seq for w in self.watches.of(key, 0, 1 << 30)) for key in ("w", "v")],
        )

    def one_by_one(self, messages: list[NewMessage]) -> list[Accepted] | None:
        """What each is answered; None if one of them conflicts with what is there before it."""
        try:
            return [self.publishing.publish_one(message, START_MS) for message in messages]
        except ConflictError:
            return None


def read(intake: Intake, data: list[bytes]) -> list[NewMessage]:
    return [intake.one(one, START_MS) for one in data]


@settings(deadline=None)
@given(before=requests, data=requests, traced=st.booleans())
def test_a_batch_is_accepted_as_its_messages_are(
    before: list[bytes], data: list[bytes], traced: bool
) -> None:
    singly, batch = Parts(), Parts()
    for parts in (singly, batch):
        parts.one_by_one(read(parts.intake, before))
    messages = read(singly.intake, data)
    columns = batch.intake.batch(b"[" + b",".join(data) + b"]", "application/json", START_MS)
    if traced:
        columns.traces = [TRACE] * len(columns)
        for message in messages:
            message.trace = TRACE
    assert [columns.message(index) for index in range(len(data))] == messages
    assert columns_of(messages) == columns
    untouched = batch.outcome()
    expected = singly.one_by_one(messages)
    if expected is None:
        try:
            batch.publishing.publish_batch(columns, START_MS)
        except (ConflictError, InputErrors):
            assert batch.outcome() == untouched
        else:
            raise AssertionError("a conflict was not found")
        return
    done = batch.publishing.publish_batch(columns, START_MS)
    assert batch.ids.texts(done.ids) == [one.message_id for one in expected]
    assert sorted(done.duplicates) == [i for i, one in enumerate(expected) if one.duplicate]
    for index, one in done.duplicates.items():
        assert (one.message_id, one.due_ms) == (
            expected[index].message_id,
            expected[index].due_ms,
        )
    assert done.last_seq == max(one.seq for one in expected)
    assert done.group is batch.sequencer.group
    assert batch.outcome() == singly.outcome()


@settings(deadline=None)
@given(before=requests, data=requests)
def test_what_is_decided_together_is_accepted_as_if_alone(
    before: list[bytes], data: list[bytes]
) -> None:
    singly, together = Parts(), Parts()
    for parts in (singly, together):
        parts.one_by_one(read(parts.intake, before))
    untouched = together.outcome()
    expected = singly.one_by_one(read(singly.intake, data))
    done = together.publishing.publish_new(together.intake.many(data, START_MS))
    if done is None:
        assert together.outcome() == untouched
        return
    assert expected is not None
    assert together.ids.texts(done.ids) == [one.message_id for one in expected]
    assert not any(one.duplicate for one in expected)
    assert together.outcome() == singly.outcome()


@given(data=any_requests)
def test_columns_are_refused_where_a_message_would_be(data: list[bytes]) -> None:
    intake = Parts().intake
    wrong: list[str] = []
    for index, one in enumerate(data):
        try:
            intake.one(one, START_MS)
        except InputError as error:
            wrong.append(f"/{index}{error.pointer}")
    try:
        assert len(intake.many(data, START_MS)) == len(data) and not wrong
    except InputError:
        assert wrong
    try:
        found = intake.batch(b"[" + b",".join(data) + b"]", "application/json", START_MS)
        assert len(found) == len(data) and not wrong
    except InputErrors as errors:
        assert [one.pointer for one in errors.errors] == wrong


@settings(deadline=None)
@given(before=requests, data=requests)
def test_a_batch_that_was_not_written_is_as_if_it_had_never_been(
    before: list[bytes], data: list[bytes]
) -> None:
    parts = Parts()
    parts.one_by_one(read(parts.intake, before))
    parts.commit()
    durable = parts.outcome()
    try:
        done = parts.publishing.publish_batch(
            parts.intake.batch(b"[" + b",".join(data) + b"]", "application/json", START_MS),
            START_MS,
        )
    except (ConflictError, InputErrors):
        return
    if done.group is None:
        return  # all of it was there
    parts.groups.flush(START_MS)
    parts.groups.on_commit_failed(OSError())
    undone = parts.outcome()
    # How many were accepted since the start is a count of decisions.
    assert undone[:6] == durable[:6] and undone[7] == durable[7]
