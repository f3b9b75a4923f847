"""Subscribing: in force when it is durable, and for what falls due from then on."""

from __future__ import annotations

import msgspec
import pytest

from delayserver.decisions.subscribing import Subscribing
from delayserver.errors import NotFoundError, StoppingError
from delayserver.records.horizon import Mark
from delayserver.records.message import ScheduleEntry
from delayserver.records.receivers import had
from delayserver.records.subscriptions import (
    FAILURES,
    GONE,
    StandIn,
    SubjectSpan,
    Subscription,
    decode_subscription,
    encode_subscription,
)
from delayserver.schedule.wheel_rows import FiredRows
from storage.errors import DiskFullError
from tests.unit.fakes import START_MS, MessageParts, message, subscription, wheel_rows

NEW = subscription(7, created_ms=START_MS)


class Parts(MessageParts):
    def __init__(self) -> None:
        super().__init__()
        self.kept_since_ms = 0
        self.subscribing = Subscribing(
            self.registry,
            self.sequencer,
            self.groups,
            self.dispatcher,
            kept_since_ms=lambda: self.kept_since_ms,
        )


@pytest.fixture
def parts() -> Parts:
    return Parts()


def test_a_subscription_is_in_force_when_it_is_durable(parts: Parts) -> None:
    group = parts.subscribing.put_subscription(NEW)
    with pytest.raises(NotFoundError):
        parts.subscribing.subscription("s7")
    assert parts.commit() is group
    assert parts.subscribing.subscription("s7").id == 7


def test_a_subscription_that_was_not_written_is_not_there(parts: Parts) -> None:
    parts.subscribing.put_subscription(NEW)
    parts.groups.flush(START_MS)
    parts.groups.on_commit_failed(DiskFullError("pwrite", "messages", "no space"))
    parts.subscribing.on_rolled_back()
    assert len(parts.registry) == 0


def test_a_change_is_made_of_what_is_decided_and_not_of_what_is_in_force(parts: Parts) -> None:
    parts.subscribing.put_subscription(NEW)
    parts.commit()
    parts.subscribing.change(NEW.name, paused=True)
    parts.groups.flush(START_MS)
    moved, _ = parts.subscribing.change(NEW.name, deleted=False)
    assert moved.paused and not parts.registry.by_name(NEW.name).paused  # type: ignore[union-attr]
    parts.subscribing.change(NEW.name, deleted=True)
    with pytest.raises(NotFoundError):
        parts.subscribing.change(NEW.name, paused=False)
    assert parts.subscribing.pause(NEW.id) is None
    assert parts.subscribing.subscription(NEW.name).id == NEW.id


def test_what_was_decided_and_not_written_is_not_built_upon(parts: Parts) -> None:
    parts.subscribing.put_subscription(NEW)
    parts.commit()
    parts.subscribing.change(NEW.name, paused=True)
    parts.groups.flush(START_MS)
    parts.subscribing.change(NEW.name, deleted=True)
    parts.subscribing.put_subscription(subscription(8, name=NEW.name, created_ms=START_MS))
    parts.groups.on_commit_failed(DiskFullError("pwrite", "messages", "no space"))
    assert list(parts.subscribing.decided) == list(parts.registry)
    assert parts.subscribing.decided.by_name(NEW.name) == parts.registry.by_id(NEW.id)


def test_what_has_fallen_due_is_for_others_also_after_the_clock_was_set_back(parts: Parts) -> None:
    parts.publish(message(START_MS))
    parts.subscribing.advance(START_MS + 5_000)
    parts.publish(message(START_MS))
    parts.subscribing.put_subscription(NEW)
    parts.commit()
    [made] = parts.registry
    # Subject and first message; then the second one, and the record itself comes behind.
    marks = Mark(2, START_MS + 5_001), Mark(3, START_MS)
    assert made.history == (SubjectSpan(NEW.subject, 4, marks),)


@pytest.mark.parametrize("subject", [NEW.subject, "other", ["mail", "order.*"]])
def test_what_is_not_understood_keeps_the_history_of_its_shard(
    parts: Parts, subject: str | list[str]
) -> None:
    """And all else as another shard has stored it, so that the two agree from then on."""
    parts.subscribing.put_subscription(NEW)
    parts.commit()
    [made] = parts.registry
    newer = msgspec.to_builtins(NEW) | {"subject": subject, "flow": {"parallel": 3}}
    history = [["elsewhere", 70, []], [subject, 90, []]]
    told = decode_subscription(msgspec.msgpack.encode(newer | {"history": history}))
    for _ in range(2):
        parts.subscribing.put_subscription(told, is_told=True)
        parts.commit()
        [kept] = parts.registry
        assert isinstance(kept, StandIn) and kept.paused
        assert kept.spans[: len(made.spans)] == made.spans
        assert kept.spans[-1].subject == kept.subject
        assert list(parts.subscribing.differing([told], are_all=True)) == []
    stored = msgspec.msgpack.decode(encode_subscription(kept))
    assert stored["flow"] == {"parallel": 3} and stored["subject"] == subject
    for paused in (True, False):
        parts.subscribing.change(NEW.name, paused=paused)
        parts.commit()
    assert parts.registry.by_id(NEW.id) == kept
    parts.subscribing.change(NEW.name, deleted=True)
    parts.commit()
    departed = parts.registry.departed(NEW.id)
    assert departed is not None and departed.spans[:-1] == kept.spans and departed.has_left


def test_a_change_keeps_the_history_and_a_new_subject_adds_to_it(parts: Parts) -> None:
    parts.subscribing.put_subscription(NEW)
    parts.commit()
    [made] = parts.registry
    parts.subscribing.advance(START_MS + 9_000)
    parts.subscribing.put_subscription(msgspec.structs.replace(NEW, paused=True))
    parts.commit()
    [paused] = parts.registry
    assert paused.history == made.history
    parts.subscribing.put_subscription(msgspec.structs.replace(NEW, subject="other"))
    parts.commit()
    [moved] = parts.registry
    marks = (Mark(1, START_MS + 9_001),)
    assert moved.history == (*made.history, SubjectSpan("other", 3, marks))
    parts.subscribing.change(NEW.name, deleted=True)
    parts.commit()
    departed = parts.registry.departed(NEW.id)
    assert departed is not None and departed.history == (*moved.history, SubjectSpan("", 4, marks))


def test_a_definition_of_a_version_without_history_goes_on(parts: Parts) -> None:
    old = msgspec.structs.replace(NEW, horizon=(Mark(7, 90),), subject_since_ms=80)
    for registry in (parts.registry, parts.subscribing.decided):
        registry.put(old)
    parts.subscribing.change(NEW.name, paused=True)
    parts.commit()
    assert list(parts.registry) == [msgspec.structs.replace(old, paused=True)]
    parts.subscribing.advance(START_MS)
    changed = msgspec.structs.replace(NEW, subject="other")
    parts.subscribing.put_subscription(changed)
    parts.commit()
    [moved] = parts.registry
    first, second = moved.history
    assert first == SubjectSpan(NEW.subject, 0, (Mark(7, 90),)) and second.subject == "other"
    assert (moved.horizon, moved.subject_since_ms) == ((), 80)


def test_what_no_message_needs_is_left_out_of_the_next_record(parts: Parts) -> None:
    parts.subscribing.put_subscription(NEW)
    for index in range(1, 4):
        parts.subscribing.advance(START_MS + 1_000 * index)
        parts.subscribing.put_subscription(msgspec.structs.replace(NEW, subject=f"s{index}"))
    parts.commit()
    parts.kept_since_ms = START_MS + 2_500
    parts.groups.checkpoint_seq = parts.sequencer.next_seq
    parts.subscribing.change(NEW.name, paused=True)
    parts.commit()
    [made] = parts.registry
    assert [span.subject for span in made.history] == ["s2", "s3"]
    # One that was deleted is a candidate as long as it may have left something.
    parts.subscribing.change(NEW.name, deleted=True)
    parts.subscribing.put_subscription(subscription(8, created_ms=START_MS))
    parts.commit()
    assert [one.id for one in parts.registry.candidates("s3")] == [NEW.id]
    parts.subscribing.advance(START_MS + 4_000)
    parts.kept_since_ms = START_MS + 5_000
    parts.groups.checkpoint_seq = parts.sequencer.next_seq
    parts.subscribing.change("s8", deleted=True)
    parts.commit()
    assert list(parts.registry.candidates("s3")) == []


@pytest.mark.parametrize("is_written", [True, False])
def test_what_falls_due_while_a_subject_is_recorded_waits_for_it(
    parts: Parts, is_written: bool
) -> None:
    """Else it would go by the definition of before, and after a restart by the new one."""
    parts.subscribing.put_subscription(NEW)
    [seq] = parts.publish(message(START_MS, subject="other"))
    parts.commit()
    entry = ScheduleEntry(seq, START_MS)
    parts.subscribing.put_subscription(msgspec.structs.replace(NEW, subject="other"))
    route = parts.sequencer.subjects["other"]
    fired = FiredRows(entry.hour, wheel_rows(entry.hour, (seq, START_MS), route=route))
    parts.dispatcher.fire([fired], START_MS)
    assert parts.dispatcher.holds(entry) and not parts.dispatcher.parked.count()
    if is_written:
        parts.commit()
    else:
        parts.groups.flush(START_MS)
        parts.groups.on_commit_failed(DiskFullError("pwrite", "messages", "no space"))
    for turn in parts.ports.turns:
        turn()
    assert parts.dispatcher.holds_for(NEW.id, entry) is is_written
    assert parts.dispatcher.parked.contains(entry) is not is_written


def test_what_a_process_before_has_fired_counts(parts: Parts) -> None:
    parts.subscribing.start([Mark(4, START_MS + 50)])
    parts.subscribing.put_subscription(NEW)
    parts.commit()
    [made] = parts.registry
    assert Mark(4, START_MS + 50) in made.history[0].marks


def test_a_roll_back_gives_its_seqs_to_what_has_not_fallen_due(parts: Parts) -> None:
    parts.publish(message(START_MS))
    parts.subscribing.advance(START_MS + 5_000)
    parts.groups.flush(START_MS)
    parts.groups.on_commit_failed(DiskFullError("pwrite", "messages", "no space"))
    parts.subscribing.on_rolled_back()
    parts.subscribing.put_subscription(msgspec.structs.replace(NEW, created_ms=START_MS + 4_000))
    parts.commit()
    [made] = parts.registry
    assert had(made, made.subject, 1, START_MS)


def test_nothing_is_put_while_stopping(parts: Parts) -> None:
    parts.groups.stopping = True
    with pytest.raises(StoppingError):
        parts.subscribing.put_subscription(NEW)


def test_what_differs_from_the_definitions_of_another_shard(parts: Parts) -> None:
    other = subscription(8, name="other", created_ms=START_MS)
    for one in (NEW, other):
        parts.subscribing.put_subscription(one)
    parts.commit()
    subscribing, replace = parts.subscribing, msgspec.structs.replace
    # What had fallen due is the shard's own affair.
    assert subscribing.decided.by_id(7).history  # type: ignore[union-attr]
    assert list(subscribing.differing([NEW, other], are_all=True)) == []
    changed = replace(NEW, lease_ms=7)
    assert list(subscribing.differing([changed], are_all=False)) == [changed]
    gone = replace(NEW, deleted=True)
    assert list(subscribing.differing([gone], are_all=False)) == [gone]
    # What goes goes first: its name may have been given again.
    again = subscription(9, name=NEW.name, created_ms=START_MS)
    found = list(subscribing.differing([again, other], are_all=True))
    assert [(one.id, one.deleted) for one in found] == [(7, True), (9, False)]
    unknown = replace(again, deleted=True)
    assert list(subscribing.differing([unknown], are_all=False)) == []


def test_somebody_is_told_of_a_pause_once(parts: Parts) -> None:
    told: list[int] = []
    parts.subscribing.on_paused = told.append
    parts.subscribing.put_subscription(NEW)
    parts.commit()
    parts.subscribing.pause(NEW.id)
    assert parts.subscribing.pause(NEW.id) is None
    assert parts.subscribing.decided.by_id(NEW.id).pause_reason == GONE  # type: ignore[union-attr]
    parts.subscribing.change(NEW.name, paused=False)
    assert told == [NEW.id]
    assert parts.subscribing.decided.by_id(NEW.id).pause_reason == ""  # type: ignore[union-attr]


def test_failures_for_long_are_recorded_and_survive_what_others_define(parts: Parts) -> None:
    hook = msgspec.structs.replace(NEW, type="webhook", url="http://a/", disable_after_ms=1000)
    subscribing, replace = parts.subscribing, msgspec.structs.replace
    subscribing.put_subscription(hook)
    parts.commit()

    def in_force() -> Subscription:
        return subscribing.subscription(NEW.name)

    assert not subscribing.fails_for_long(in_force(), START_MS)
    assert not subscribing.fails_for_long(in_force(), START_MS + 100)
    before = parts.sequencer.next_seq
    assert not subscribing.fails_for_long(in_force(), START_MS + 101)
    assert parts.sequencer.next_seq == before, "it was recorded twice"
    parts.commit()
    assert in_force().failing_since_ms == START_MS
    # Whoever defines it again does not know of that; another shard that decides does.
    assert list(subscribing.differing([in_force()], are_all=True)) == []
    assert list(subscribing.differing([hook], are_all=True)) == [hook]
    subscribing.put_subscription(replace(hook, lease_ms=7))
    parts.commit()
    assert in_force().failing_since_ms == START_MS
    assert subscribing.fails_for_long(in_force(), START_MS + 1000)
    subscribing.pause(NEW.id, FAILURES)
    parts.commit()
    assert (in_force().paused, in_force().pause_reason) == (True, FAILURES)
    subscribing.change(NEW.name, paused=False)
    parts.commit()
    assert (in_force().pause_reason, in_force().failing_since_ms) == ("", 0)
    assert not subscribing.fails_for_long(in_force(), START_MS + 1000)


def test_what_arrives_or_another_url_takes_back_that_it_fails(parts: Parts) -> None:
    hook = msgspec.structs.replace(NEW, type="webhook", url="http://a/", disable_after_ms=1000)
    subscribing = parts.subscribing
    subscribing.put_subscription(hook)
    parts.commit()
    for end in ("arrives", "url"):
        for now_ms in (START_MS, START_MS + 500):
            subscribing.fails_for_long(subscribing.subscription(NEW.name), now_ms)
        parts.commit()
        assert subscribing.subscription(NEW.name).failing_since_ms == START_MS
        if end == "arrives":
            subscribing.on_arrived(subscribing.subscription(NEW.name), START_MS + 600)
        else:
            subscribing.put_subscription(msgspec.structs.replace(hook, url="http://b/"))
        parts.commit()
        assert subscribing.subscription(NEW.name).failing_since_ms == 0


def test_what_cannot_be_recorded_while_stopping_is_left_out(parts: Parts) -> None:
    hook = msgspec.structs.replace(NEW, type="webhook", disable_after_ms=1000)
    parts.subscribing.put_subscription(hook)
    parts.commit()
    parts.subscribing.fails_for_long(hook, START_MS)
    parts.groups.stopping = True
    before = parts.sequencer.next_seq
    assert not parts.subscribing.fails_for_long(hook, START_MS + 500)
    assert parts.sequencer.next_seq == before


def test_what_another_shard_has_decided_says_since_when_it_fails(parts: Parts) -> None:
    hook = msgspec.structs.replace(NEW, type="webhook", url="http://a/", disable_after_ms=1000)
    subscribing, replace = parts.subscribing, msgspec.structs.replace
    told: list[tuple[int, int]] = []
    subscribing.on_failing = lambda *what: told.append(what)
    subscribing.failing.is_alone = False
    subscribing.put_subscription(replace(hook, failing_since_ms=START_MS), is_told=True)
    parts.commit()
    assert subscribing.subscription(NEW.name).failing_since_ms == START_MS
    assert subscribing.fails_for_long(subscribing.subscription(NEW.name), START_MS + 1000)
    # It is taken back, and what was counted here with it.
    subscribing.put_subscription(hook, is_told=True)
    parts.commit()
    assert not subscribing.fails_for_long(subscribing.subscription(NEW.name), START_MS + 1001)
    assert not told
    # Here something has arrived since.
    subscribing.on_arrived(subscribing.subscription(NEW.name), START_MS + 1002)
    subscribing.put_subscription(replace(hook, failing_since_ms=START_MS + 1001), is_told=True)
    assert not told
    parts.commit()
    assert told == [(NEW.id, 0)]


def test_of_two_times_since_which_it_fails_the_earlier_counts(parts: Parts) -> None:
    hook = msgspec.structs.replace(NEW, type="webhook", disable_after_ms=1000)
    subscribing = parts.subscribing
    subscribing.put_subscription(hook)
    for since_ms, is_recorded in ((7, True), (9, False), (7, False), (5, True), (0, True)):
        assert (subscribing.note_failing(NEW.id, since_ms) is not None) is is_recorded
    assert subscribing.note_failing(99, 5) is None
