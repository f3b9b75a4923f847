"""Many cancels in one step against the same ones one by one, whatever happened before."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from delayserver.errors import ConflictError, DelayServerError, NotFoundError
from delayserver.records.message import Payload
from delayserver.records.message_id import MessageId
from delayserver.schedule.wheel_rows import ROUTE_SUBSCRIPTION
from storage.errors import DiskFullError
from storage.rows import HOUR_MS
from tests.unit.fakes import (
    MINUTE_MS,
    START_MS,
    SUBJECT,
    MessageParts,
    message,
    subscription,
)

DUES_MS = (
    START_MS,
    START_MS + 700,
    START_MS + 30 * MINUTE_MS,
    START_MS + 30 * MINUTE_MS + 200,
    START_MS + HOUR_MS,
    START_MS + 20 * HOUR_MS,
)
FULL = DiskFullError("pwrite", "messages", "no space")


@dataclass
class Publish:
    dues_ms: list[int]


@dataclass
class Cancel:
    which: list[int]
    by_key: bool


@dataclass
class Move:
    which: int
    due_ms: int


@dataclass
class Settle:
    """After a restart only one subscription still waits for the row."""

    which: int


@dataclass
class Advance:
    now_ms: int


class Commit:
    pass


class Fail:
    pass


class File:
    pass


Step = Publish | Cancel | Move | Settle | Advance | Commit | Fail | File


@dataclass
class Side:
    """One of the two that must not differ."""

    parts: MessageParts
    published: list[MessageId] = field(default_factory=list)
    answers: list[object] = field(default_factory=list)

    def cancel_each(self, step: Cancel) -> list[object]:
        """One by one."""
        answers: list[object] = []
        for index in step.which:
            one = self.published[index % len(self.published)]
            try:
                self.parts.messages.cancel(one.seq, one.due_ms, subject=SUBJECT * step.by_key)
                answers.append(None)
            except (ConflictError, NotFoundError) as error:
                answers.append((type(error), str(error), getattr(error, "state", None)))
        return answers

    def cancel_many(self, step: Cancel) -> list[object]:
        """In one step; by key after a look at the keys."""
        wanted = [index % len(self.published) for index in step.which]
        found = [self.published[index] for index in wanted]
        seqs = np.array([one.seq for one in found], np.uint64)
        dues_ms = np.array([one.due_ms for one in found], np.int64)
        subject_id = self.parts.sequencer.subjects[SUBJECT]
        if step.by_key:
            keys = [f"key {index}" for index in wanted]
            by_keys = self.parts.cancels.by_keys([SUBJECT] * len(keys), keys)
            assert not by_keys.refusals
            assert by_keys.seqs.tolist() == seqs.tolist()
            assert by_keys.dues_ms.tolist() == dues_ms.tolist()
        subject_ids = np.full(len(found), subject_id * step.by_key, np.uint32)
        refusals = self.parts.cancels.cancel(seqs, dues_ms, subject_ids)
        return [
            None if one is None else (type(one), str(one), getattr(one, "state", None))
            for one in map(refusals.get, range(len(found)))
        ]

    def state(self) -> object:
        """All that a cancel changes."""
        parts = self.parts
        return (
            self.answers,
            [parts.messages.locate(one.seq, one.due_ms) for one in self.published],
            [parts.messages.version(one.seq) for one in self.published],
            [parts.wheel.contains(one.seq, one.due_ms) for one in self.published],
            parts.hours._unsettled,
            dict(parts.messages.cancelled_by_subject),
            parts.sequencer.next_seq,
            parts.groups.not_durable() is None,
        )


def apply(side: Side, step: Step, *, many: bool) -> None:
    parts, published = side.parts, side.published
    match step:
        case Publish(dues_ms=dues_ms):
            first = len(published)
            new = [
                message(due_ms, key=f"key {first + index}") for index, due_ms in enumerate(dues_ms)
            ]
            published += [
                MessageId(0, due_ms, seq)
                for due_ms, seq in zip(dues_ms, parts.publish(*new), strict=True)
            ]
        case Cancel() if published:
            side.answers += side.cancel_many(step) if many else side.cancel_each(step)
        case Move(which=which, due_ms=due_ms) if published:
            one = published[which % len(published)]
            try:
                parts.messages.move(one.seq, one.due_ms, due_ms, Payload(b"1"), 1)
            except DelayServerError as error:
                side.answers.append(str(error))
        case Settle(which=which) if published:
            one = published[which % len(published)]
            if (row := parts.wheel.get(one.seq, one.due_ms)) is not None:
                row["route"] = ROUTE_SUBSCRIPTION | 1
        case Advance(now_ms=now_ms):
            parts.dispatcher.fire(
                parts.wheel.advance(now_ms, loaded_until_ms=1 << 50, rows_max=1000), now_ms
            )
        case Commit() if parts.sequencer.group.count:
            parts.commit()
        case Fail() if parts.sequencer.group.count:
            parts.groups.flush(START_MS)
            parts.groups.on_commit_failed(FULL)
            del published[sum(one.seq < parts.sequencer.next_seq for one in published) :]
        case File():
            parts.file()


dues_ms = st.sampled_from(DUES_MS)
which = st.integers(0, 30)
steps = st.lists(
    st.one_of(
        st.builds(Publish, st.lists(dues_ms, min_size=1, max_size=8)),
        st.builds(Cancel, st.lists(which, min_size=1, max_size=12), st.booleans()),
        st.builds(Move, which, dues_ms),
        st.builds(Settle, which),
        st.builds(Advance, dues_ms),
        st.builds(Commit),
        st.builds(Fail),
        st.builds(File),
    ),
    max_size=20,
)
EVERYWHERE = [Publish([*DUES_MS, *DUES_MS]), Commit(), File()]


@pytest.mark.parametrize("subscribed", [False, True])
@settings(deadline=None, max_examples=150)
@given(steps=steps)
@example([*EVERYWHERE, Cancel(list(range(12)), True), Fail(), Cancel([3, 3, 1], False), Commit()])
@example(
    [
        *EVERYWHERE,
        Settle(2),
        Move(3, DUES_MS[4]),
        Advance(DUES_MS[1]),
        Cancel([0, 1, 2, 3, 9], False),
    ]
)
@example([Publish([*DUES_MS]), Cancel([0, 2, 4], True), Commit(), File(), Cancel([0, 1, 5], True)])
def test_many_cancels_are_the_same_as_each_of_them(subscribed: bool, steps: list[Step]) -> None:
    subscriptions = [subscription()] if subscribed else []
    one_by_one, at_once = (Side(MessageParts(*subscriptions)) for _ in range(2))
    at_once.parts.cancels.columns_min = 1
    for step in steps:
        apply(one_by_one, step, many=False)
        apply(at_once, step, many=True)
        assert at_once.state() == one_by_one.state()
