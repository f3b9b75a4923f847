"""Messages: publish, cancel, move; every answer definite, every refusal without a trace."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from delayserver.decisions.publishing import NAMED_AT_ONCE
from delayserver.delivery.backlog import Instant
from delayserver.errors import (
    ConflictError,
    DiskReserveError,
    InputErrors,
    KeyConflictError,
    NotFoundError,
    OverloadedError,
    StoppingError,
)
from delayserver.records.direct import DIRECT_FIRST_ID
from delayserver.records.message import Payload, ScheduleEntry, State, decode_payload
from delayserver.records.tables import Change, ChangeState, HourState, hour_key
from delayserver.schedule.wheel_rows import ROUTE_SUBSCRIPTION
from delayserver.slices import at_once
from storage.catalog import Table
from storage.errors import DiskFullError
from storage.rows import HOUR_MS, NO_KEY, RecordKind
from tests.unit.fakes import (
    HOUR,
    MINUTE_MS,
    START_MS,
    SUBJECT,
    MessageParts,
    delivery,
    message,
    seqs,
    subscription,
)
from tests.world.publishes import columns_of, publish_all

SOON_MS = START_MS + 1_000
LATER_MS = START_MS + 30 * MINUTE_MS
NEXT_HOUR_MS = START_MS + HOUR_MS
FULL = DiskFullError("pwrite", "messages", "no space")


@pytest.fixture
def parts() -> MessageParts:
    return MessageParts()


def published(parts: MessageParts, due_ms: int = LATER_MS, **more: Any) -> int:
    """A message that is durable and filed."""
    [seq] = parts.publish(message(due_ms, **more))
    parts.commit()
    parts.file()
    return seq


def advance(parts: MessageParts, now_ms: int) -> list[int]:
    batches = parts.wheel.advance(now_ms, loaded_until_ms=1 << 50, rows_max=1000)
    parts.dispatcher.fire(batches, now_ms)
    return seqs(batches)


# ---- publish ---------------------------------------------------------------------------------


def test_publishing_names_the_subject_first_and_answers_with_the_id(parts: MessageParts) -> None:
    first, second = publish_all(
        parts.publishing, [message(LATER_MS, body=b"1"), message(NEXT_HOUR_MS, body=b"2")], START_MS
    )
    assert parts.ids.decode(first.message_id) == (0, LATER_MS, 2)
    assert parts.ids.decode(second.message_id) == (0, NEXT_HOUR_MS, 3)
    assert (first.due_ms, first.duplicate) == (LATER_MS, False)
    assert first.group is second.group is parts.sequencer.group
    sealed, subject_id = parts.sequencer.group.payload(3)
    assert decode_payload(sealed, "", 0, 3) == Payload(b"2")
    assert parts.sequencer.subject_names[subject_id] == SUBJECT
    assert parts.ports.wakes == 1
    assert parts.publishing.accepted_total == 2


@pytest.mark.parametrize(
    ("due_ms", "express"), [(SOON_MS, True), (LATER_MS, False), (NEXT_HOUR_MS, False)]
)
def test_only_what_is_due_soon_in_a_live_hour_goes_by_the_express_way(
    parts: MessageParts, due_ms: int, express: bool
) -> None:
    [seq] = parts.publish(message(due_ms))
    assert [row[0] for row in parts.sequencer.group.express] == ([seq] if express else [])


def test_what_is_due_soon_in_an_hour_that_is_not_live_is_filed() -> None:
    now_ms = NEXT_HOUR_MS - 500
    parts = MessageParts(now_ms=now_ms)
    parts.publish(message(NEXT_HOUR_MS + 500), now_ms=now_ms)
    assert parts.sequencer.group.express == []


def test_the_express_way_begins_at_the_time_that_the_wheel_has_reached() -> None:
    parts = MessageParts(checkpoint_ms=1000)
    parts.messages.advanced_ms = LATER_MS - 5_000
    parts.publish(message(LATER_MS))
    assert parts.sequencer.group.express == []
    parts.messages.advanced_ms = LATER_MS - 4_999
    parts.publish(message(LATER_MS))
    assert len(parts.sequencer.group.express) == 1


# ---- keys ------------------------------------------------------------------------------------


def test_the_same_key_and_content_again_is_the_first_message(parts: MessageParts) -> None:
    seq = published(parts, key="1001")
    parts.sequencer.prune(seq - 1)
    [again] = publish_all(parts.publishing, [message(NEXT_HOUR_MS, key="1001")], START_MS)
    assert (parts.ids.decode(again.message_id).seq, again.due_ms) == (seq, LATER_MS)
    assert again.duplicate
    assert again.group is None
    assert parts.publishing.accepted_total == 1
    assert not parts.sequencer.group.count


def test_a_duplicate_is_not_told_before_the_first_one_is_durable(parts: MessageParts) -> None:
    [first] = publish_all(parts.publishing, [message(LATER_MS, key="1001")], START_MS)
    [again] = publish_all(parts.publishing, [message(LATER_MS, key="1001")], START_MS)
    assert again.duplicate
    assert again.group is first.group is not None


def test_the_same_key_with_other_content_is_a_conflict_without_a_trace(
    parts: MessageParts,
) -> None:
    published(parts, key="1001")
    before = parts.trace()
    with pytest.raises(ConflictError):
        parts.publish(message(LATER_MS, key="1001", body=b"other"))
    assert parts.trace() == before


def test_keys_of_two_subjects_are_two_keys(parts: MessageParts) -> None:
    published(parts, key="1001")
    [seq] = parts.publish(message(LATER_MS, key="1001", body=b"other", subject="refund"))
    assert seq == parts.sequencer.next_seq - 1


@pytest.mark.parametrize("known", [True, False])
def test_a_batch_with_conflicts_names_them_all_and_leaves_no_trace(
    parts: MessageParts, known: bool
) -> None:
    if known:
        published(parts, key="taken")
    before = parts.trace()
    batch = [
        message(LATER_MS, key="new", subject="fresh"),
        message(LATER_MS, key="new", body=b"other", subject="fresh"),
        message(LATER_MS),
        message(LATER_MS, key="twice"),
        message(LATER_MS, key="twice", body=b"other"),
        message(LATER_MS, key="taken", body=b"other"),
    ]
    with pytest.raises(InputErrors) as caught:
        parts.publish(*batch)
    pointers = [error.pointer for error in caught.value.errors]
    assert pointers == ["/1/key", "/4/key"] + (["/5/key"] if known else [])
    assert parts.trace() == before


def test_a_key_twice_in_a_batch_is_one_message(parts: MessageParts) -> None:
    first, other, again = publish_all(
        parts.publishing,
        [message(LATER_MS, key="a"), message(LATER_MS, key="b"), message(LATER_MS, key="a")],
        START_MS,
    )
    assert [first.duplicate, other.duplicate, again.duplicate] == [False, False, True]
    assert again.message_id == first.message_id != other.message_id
    assert again.group is first.group
    assert parts.publishing.accepted_total == 2


@pytest.mark.parametrize(("after_ms", "duplicate"), [(59_999, True), (60_000, False)])
def test_a_key_stays_taken_for_the_dedupe_window(after_ms: int, duplicate: bool) -> None:
    parts = MessageParts(subscription(), dedupe_window_ms=60_000)
    [seq] = parts.publish(message(SOON_MS, key="1001"))
    parts.commit()
    advance(parts, SOON_MS)
    [fired] = parts.dispatcher.queues.of(subscription()).rows.pop(10, 1, Instant(SOON_MS, 0))
    assert fired.rows["seq"].tolist() == [seq]
    now_ms = SOON_MS + after_ms
    [again] = publish_all(parts.publishing, [message(now_ms, key="1001", body=b"{}")], now_ms)
    assert again.duplicate is duplicate


def test_a_key_stays_taken_while_its_message_waits_however_late_it_is() -> None:
    parts = MessageParts(dedupe_window_ms=0)
    published(parts, SOON_MS, key="1001")
    advance(parts, SOON_MS)  # no subscription: it is parked
    [again] = publish_all(parts.publishing, [message(LATER_MS, key="1001")], LATER_MS)
    assert again.duplicate


@pytest.mark.parametrize("count", [1, 5])
def test_a_publish_behind_a_cancel_is_answered_with_what_was_cancelled(
    parts: MessageParts, count: int
) -> None:
    seq = published(parts, key="1001")
    parts.messages.cancel(seq, LATER_MS)
    late = [message(LATER_MS, key="1001")] + [
        message(LATER_MS, key=f"k{n}") for n in range(1, count)
    ]
    again = publish_all(parts.publishing, late, START_MS)[0]
    assert again.duplicate and parts.ids.decode(again.message_id).seq == seq
    assert parts.messages.locate(seq, LATER_MS).state is State.CANCELLED
    with pytest.raises(KeyConflictError, match="with PUT") as caught:
        publish_all(parts.publishing, [message(LATER_MS, key="1001", body=b"other")], START_MS)
    assert caught.value.state is State.CANCELLED


def test_a_client_that_wants_a_cancelled_key_again_replaces_its_message(
    parts: MessageParts,
) -> None:
    seq = published(parts, key="1001")
    parts.messages.cancel(seq, LATER_MS)
    new, replaced = parts.publishing.replace(message(LATER_MS, key="1001"), START_MS)
    assert new.seq > seq and not replaced
    assert parts.messages.by_key(SUBJECT, "1001") == (0, LATER_MS, new.seq)


def test_a_cancelled_message_gives_its_key_back_behind_the_dedupe_window(
    parts: MessageParts,
) -> None:
    seq = published(parts, key="1001")
    parts.messages.cancel(seq, LATER_MS)
    window_ms = parts.publishing._settings.dedupe_window_ms
    for now_ms, duplicate in ((LATER_MS + window_ms - 1, True), (LATER_MS + window_ms, False)):
        late = message(now_ms + 1, key="1001")
        assert parts.publishing.publish_one(late, now_ms).duplicate is duplicate


def test_a_key_stays_taken_where_the_retry_that_was_cancelled_was_due_before_the_message(
    parts: MessageParts,
) -> None:
    """The clock was set back, and then the message was redriven."""
    seq = published(parts, key="1001")
    advance(parts, LATER_MS)
    parts.dispatcher.parked.remove(ScheduleEntry(seq, LATER_MS))
    retry = parts.sequencer.append(
        RecordKind.REDRIVE, due_ms=SOON_MS, message_seq=seq, subscription_id=1, attempt=1
    )
    parts.sequencer.put_change(retry, seq, 1, Change(ChangeState.RETRYING, retry, SOON_MS, 1, 1))
    parts.insert(retry, SOON_MS, route=ROUTE_SUBSCRIPTION | 1)
    parts.commit()
    parts.messages.cancel(seq, LATER_MS)
    window_ms = parts.publishing._settings.dedupe_window_ms
    for now_ms, duplicate in ((LATER_MS + window_ms - 1, True), (LATER_MS + window_ms, False)):
        again = parts.publishing.publish_one(message(now_ms + 1, key="1001"), now_ms)
        assert again.duplicate is duplicate
    assert parts.messages.locate(seq, LATER_MS).entry == ScheduleEntry(seq, LATER_MS)


def test_a_duplicate_of_a_moved_message_has_its_new_time(parts: MessageParts) -> None:
    seq = published(parts, key="1001")
    parts.messages.move(seq, LATER_MS, NEXT_HOUR_MS, Payload(b"{}", key="1001"), 1)
    [again] = publish_all(parts.publishing, [message(LATER_MS, key="1001")], START_MS)
    assert (parts.ids.decode(again.message_id).seq, again.due_ms) == (seq, NEXT_HOUR_MS)


def test_by_key_knows_nothing_of_other_keys_and_subjects(parts: MessageParts) -> None:
    published(parts, key="1001")
    for subject, key in ((SUBJECT, "1002"), ("refund", "1001")):
        with pytest.raises(NotFoundError):
            parts.messages.by_key(subject, key)


# ---- refusals --------------------------------------------------------------------------------


def _stop(parts: MessageParts) -> None:
    parts.groups.stopping = True


def _fill_disk(parts: MessageParts) -> None:
    parts.publishing.disk_is_low = True


def _overload(parts: MessageParts) -> None:
    while parts.groups.unfiled_bytes <= 2000:
        parts.publish(message(LATER_MS))
        parts.commit()


@pytest.mark.parametrize(
    ("trouble", "error"),
    [(_stop, StoppingError), (_fill_disk, DiskReserveError), (_overload, OverloadedError)],
)
@pytest.mark.parametrize("key", [None, "1001"])
def test_what_is_refused_at_the_door_leaves_no_trace(
    trouble: Callable[[MessageParts], None], error: type[Exception], key: str | None
) -> None:
    parts = MessageParts(group_max_bytes=2000, unfiled_max_bytes=2000, checkpoint_bytes=2000)
    trouble(parts)
    before = parts.trace()
    with pytest.raises(error):
        parts.publish(message(LATER_MS, key=key, subject="new"))
    with pytest.raises(error):
        parts.publishing.replace(message(LATER_MS, key="1001", subject="new"), START_MS)
    assert parts.trace() == before


def test_a_disk_that_is_nearly_full_still_lets_messages_be_cancelled(
    parts: MessageParts,
) -> None:
    seq = published(parts)
    parts.publishing.disk_is_low = True
    parts.messages.cancel(seq, LATER_MS)
    assert parts.messages.locate(seq, LATER_MS).state is State.CANCELLED


def test_the_limit_of_subjects_leaves_no_trace() -> None:
    parts = MessageParts(subjects_max=2)
    published(parts)
    before = parts.trace()
    batch = [message(LATER_MS), *(message(LATER_MS, subject=name) for name in "abb")]
    with pytest.raises(OverloadedError, match="subjects_max"):
        parts.publish(*batch)
    with pytest.raises(OverloadedError):
        parts.publish(*(message(LATER_MS, key="k", subject=name) for name in "ab"))
    assert parts.trace() == before
    assert len(parts.publish(message(LATER_MS, subject="a"), message(LATER_MS))) == 2


def test_an_id_from_the_future_or_from_elsewhere_is_unknown(parts: MessageParts) -> None:
    seq = published(parts)
    assert parts.messages.message_id(parts.ids.encode(LATER_MS, seq)).seq == seq
    for text in (parts.ids.encode(LATER_MS, seq + 1), "0" * 36, ""):
        with pytest.raises(NotFoundError):
            parts.messages.message_id(text)


# ---- cancel ----------------------------------------------------------------------------------


@pytest.mark.parametrize("due_ms", [SOON_MS, LATER_MS, NEXT_HOUR_MS])
@pytest.mark.parametrize("when", ["open", "committing", "durable", "filed"])
def test_a_cancelled_message_does_not_fire(when: str, due_ms: int) -> None:
    parts = MessageParts()
    [seq] = parts.publish(message(due_ms))
    if when == "committing":
        parts.groups.flush(START_MS)
    if when in ("durable", "filed"):
        parts.commit()
    if when == "filed":
        parts.file()
    assert parts.messages.locate(seq, due_ms).state is State.SCHEDULED
    group = parts.messages.cancel(seq, due_ms)
    assert group is parts.sequencer.group
    assert parts.messages.locate(seq, due_ms).state is State.CANCELLED
    if when == "committing":
        parts.commit()
    parts.commit()
    assert advance(parts, due_ms) == []
    assert parts.messages.cancelled_total == 1


def test_a_cancel_is_recorded_once_and_answered_again(parts: MessageParts) -> None:
    seq = published(parts)
    group = parts.messages.cancel(seq, LATER_MS)
    assert group is not None
    row = parts.sequencer.group.rows[-1]
    assert parts.messages.cancel(seq, LATER_MS) is group
    assert parts.sequencer.group.rows[-1] is row
    parts.commit()
    assert parts.messages.cancel(seq, LATER_MS) is None
    assert parts.messages.cancelled_total == 1


def test_a_cancelled_message_counts_until_its_cancel_is_durable(parts: MessageParts) -> None:
    seq = published(parts)
    parts.messages.cancel(seq, LATER_MS)
    assert parts.hours.unsettled() == 1
    parts.commit()
    assert parts.hours.unsettled() == 0


def test_what_fired_cannot_be_cancelled() -> None:
    parts = MessageParts(subscription())
    seq = published(parts, SOON_MS)
    advance(parts, SOON_MS)
    before = parts.trace()
    with pytest.raises(ConflictError) as caught:
        parts.messages.cancel(seq, SOON_MS)
    assert caught.value.state == State.DELIVERING
    assert parts.trace() == before


def test_a_message_that_no_subscription_matched_can_be_cancelled(parts: MessageParts) -> None:
    seq = published(parts, SOON_MS)
    assert advance(parts, SOON_MS) == [seq]
    assert parts.messages.locate(seq, SOON_MS).state is State.SCHEDULED
    parts.messages.cancel(seq, SOON_MS)
    assert parts.dispatcher.parked.count() == 0
    parts.commit()
    assert parts.hours.unsettled() == 0


@pytest.mark.parametrize(
    ("kept", "error"),
    [
        (HourState(), ConflictError),
        (HourState(first_seq=1), ConflictError),
        (None, NotFoundError),
        # It was deleted, and came back.
        (HourState(first_seq=9), NotFoundError),
    ],
)
def test_what_was_delivered_is_told_as_long_as_its_hour_is_kept(
    parts: MessageParts, kept: HourState | None, error: type[Exception]
) -> None:
    seq = published(parts, SOON_MS)
    assert parts.wheel.remove(seq, SOON_MS) is not None
    parts.groups.on_checkpoint(seq)
    assert 1 <= seq < 9
    if kept is not None:
        parts.catalog.commit({Table.HOURS: [(hour_key(HOUR), kept.pack())]})
    with pytest.raises(error):
        parts.messages.cancel(seq, SOON_MS)


def test_a_rolled_back_cancel_lets_the_message_fire(parts: MessageParts) -> None:
    seq = published(parts)
    parts.messages.cancel(seq, LATER_MS)
    parts.groups.flush(START_MS)
    parts.groups.on_commit_failed(FULL)
    assert parts.messages.locate(seq, LATER_MS).state is State.SCHEDULED
    assert parts.hours.unsettled() == 1
    assert advance(parts, LATER_MS) == [seq]


def test_a_rolled_back_cancel_lets_a_parked_message_fire_again(parts: MessageParts) -> None:
    seq = published(parts, SOON_MS)
    advance(parts, SOON_MS)
    parts.messages.cancel(seq, SOON_MS)
    parts.groups.flush(START_MS)
    parts.groups.on_commit_failed(FULL)
    assert advance(parts, SOON_MS) == [seq]
    assert parts.dispatcher.parked.count() == 1
    assert parts.hours.unsettled() == 1


def test_a_rolled_back_publish_was_never_there(parts: MessageParts) -> None:
    before = parts.trace()
    parts.publish(message(SOON_MS, key="1001"))
    parts.groups.flush(START_MS)
    parts.publish(message(SOON_MS, key="1002", subject="other"))
    parts.groups.on_commit_failed(FULL)
    assert parts.trace()[:-2] == before[:-2]  # but for the counter of what was asked for
    with pytest.raises(NotFoundError):
        parts.messages.by_key(SUBJECT, "1001")


# ---- states of a message that went to several subscriptions ----------------------------------


def retrying(parts: MessageParts, *states: tuple[int, ChangeState]) -> int:
    """A message whose first attempt is over; for each subscription what became of it."""
    seq = published(parts, SOON_MS)
    assert parts.wheel.remove(seq, SOON_MS) is not None
    for subscription_id, state in states:
        record = parts.sequencer.append(RecordKind.RETRY, due_ms=LATER_MS)
        entry_seq = seq if state is ChangeState.DEAD else record
        change = Change(state, entry_seq, LATER_MS, 2, 1)
        parts.sequencer.put_change(record, seq, subscription_id, change)
        if state is ChangeState.RETRYING:
            parts.commit()
            parts.groups.on_filed(parts.groups.durable_seq)
            parts.insert(record, LATER_MS)
    return seq


def test_a_retry_that_waits_is_a_scheduled_message(parts: MessageParts) -> None:
    seq = retrying(parts, (1, ChangeState.RETRYING))
    located = parts.messages.locate(seq, SOON_MS)
    assert located.state is State.SCHEDULED
    assert (located.subscription_id, located.attempts) == (1, 1)
    assert located.entry == ScheduleEntry(seq + 1, LATER_MS)


def test_a_message_that_some_subscription_gave_up_is_dead(parts: MessageParts) -> None:
    seq = retrying(parts, (1, ChangeState.DEAD))
    assert parts.messages.locate(seq, SOON_MS).state is State.DEAD


def test_a_retry_for_the_only_subscription_can_be_cancelled() -> None:
    parts = MessageParts(subscription(1), subscription(2, subject="other"))
    seq = retrying(parts, (1, ChangeState.RETRYING))
    parts.messages.cancel(seq, SOON_MS)
    assert parts.messages.locate(seq, SOON_MS).state is State.CANCELLED
    assert advance(parts, LATER_MS) == []


def test_a_retry_cannot_be_cancelled_when_others_may_have_the_message() -> None:
    parts = MessageParts(subscription(1), subscription(2, subject="order.*"))
    seq = retrying(parts, (1, ChangeState.RETRYING))
    with pytest.raises(ConflictError) as caught:
        parts.messages.cancel(seq, SOON_MS)
    assert caught.value.state == State.DELIVERING


def test_a_retry_of_a_message_that_says_where_it_goes_is_nobody_elses() -> None:
    parts = MessageParts(subscription(1))
    seq = retrying(parts, (DIRECT_FIRST_ID, ChangeState.RETRYING))
    parts.messages.cancel(seq, SOON_MS)
    assert parts.messages.locate(seq, SOON_MS).state is State.CANCELLED


@pytest.mark.parametrize("late_ms", [SOON_MS, SOON_MS + 1])
def test_a_retry_is_for_others_only_if_they_were_there(late_ms: int) -> None:
    parts = MessageParts(subscription(1), subscription(2, subject="order.*", created_ms=late_ms))
    seq = retrying(parts, (1, ChangeState.RETRYING))
    state = State.DELIVERING if late_ms == SOON_MS else State.SCHEDULED
    assert parts.messages.locate(seq, SOON_MS).state is state


def test_a_retry_cannot_be_moved() -> None:
    parts = MessageParts(subscription(1))
    seq = retrying(parts, (1, ChangeState.RETRYING))
    before = parts.trace()
    with pytest.raises(ConflictError):
        parts.messages.move(seq, SOON_MS, NEXT_HOUR_MS, Payload(b"{}"), 1)
    assert parts.trace() == before


def test_what_is_on_its_way_is_being_delivered() -> None:
    parts = MessageParts(subscription(1, type="webhook", url="http://127.0.0.1/"))
    seq = published(parts, SOON_MS)
    advance(parts, SOON_MS)
    assert parts.messages.locate(seq, SOON_MS).state is State.DELIVERING
    parts.dispatcher.settling.settle_delivered(delivery(seq, SOON_MS), SOON_MS)
    assert parts.messages.locate(seq, SOON_MS).state is State.DELIVERED


def test_what_is_not_loaded_waits(parts: MessageParts) -> None:
    seq = published(parts)
    assert parts.wheel.remove(seq, LATER_MS) is not None
    parts.hours.loading.add(HOUR)
    assert parts.messages.locate(seq, LATER_MS).state is State.SCHEDULED
    parts.hours.loading.clear()
    assert parts.messages.locate(seq, LATER_MS).state is State.DELIVERED


def test_what_a_restart_left_open_for_some_subscriptions_is_being_delivered() -> None:
    parts = MessageParts(subscription(1), subscription(2))
    seq = published(parts)
    assert parts.wheel.remove(seq, LATER_MS) is not None
    parts.insert(seq, LATER_MS, route=2 | ROUTE_SUBSCRIPTION)
    assert parts.messages.locate(seq, LATER_MS).state is State.DELIVERING
    with pytest.raises(ConflictError):
        parts.messages.cancel(seq, LATER_MS)
    assert parts.wheel.contains(seq, LATER_MS)


# ---- move and replace ------------------------------------------------------------------------


@pytest.mark.parametrize("new_due_ms", [SOON_MS, NEXT_HOUR_MS])
def test_a_moved_message_keeps_its_id_and_fires_at_its_new_time_only(
    parts: MessageParts, new_due_ms: int
) -> None:
    parts.hours.live_through_hour = HOUR + 1
    seq = published(parts)
    group = parts.messages.move(seq, LATER_MS, new_due_ms, Payload(b"{}"), 1)
    record = group.last_seq
    origin = decode_payload(group.payload(record)[0], "", 0, record).origin
    assert origin is not None
    assert (origin.message_seq, origin.published_due_ms, origin.due_ms) == (
        seq,
        LATER_MS,
        new_due_ms,
    )
    located = parts.messages.locate(seq, LATER_MS)
    assert (located.state, located.entry) == (State.SCHEDULED, ScheduleEntry(record, new_due_ms))
    parts.commit()
    parts.file()
    assert advance(parts, NEXT_HOUR_MS) == [record]


def test_a_moved_message_can_be_moved_and_cancelled(parts: MessageParts) -> None:
    seq = published(parts)
    parts.messages.move(seq, LATER_MS, LATER_MS + 1, Payload(b"{}"), 1)
    parts.messages.move(seq, LATER_MS, LATER_MS + 2, Payload(b"{}"), 1)
    parts.commit()
    parts.file()
    assert [parts.wheel.contains(seq + n, LATER_MS + n) for n in (1, 2)] == [False, True]
    parts.messages.cancel(seq, LATER_MS)
    assert not parts.wheel.contains(seq + 2, LATER_MS + 2)
    assert parts.messages.locate(seq, LATER_MS).state is State.CANCELLED
    assert sorted(parts.sequencer.removed) == [seq, seq + 1, seq + 2]


def test_a_rolled_back_move_leaves_the_message_where_it_was(parts: MessageParts) -> None:
    seq = published(parts)
    parts.messages.move(seq, LATER_MS, SOON_MS, Payload(b"{}"), 1)
    parts.groups.flush(START_MS)
    parts.groups.on_commit_failed(FULL)
    located = parts.messages.locate(seq, LATER_MS)
    assert (located.state, located.entry) == (State.SCHEDULED, ScheduleEntry(seq, LATER_MS))
    assert advance(parts, LATER_MS) == [seq]


def test_a_put_under_a_key_replaces_the_message_at_one_moment(parts: MessageParts) -> None:
    seq = published(parts, key="1001")
    new, replaced = parts.publishing.replace(message(SOON_MS, key="1001", body=b"2"), START_MS)
    assert replaced
    new_seq = parts.ids.decode(new.message_id).seq
    assert new_seq > seq
    assert parts.sequencer.group.count == 2
    assert parts.messages.locate(seq, LATER_MS).state is State.CANCELLED
    parts.commit()
    assert advance(parts, LATER_MS) == [new_seq]


def test_a_message_whose_time_has_come_is_left_if_the_caller_wants_that(
    parts: MessageParts,
) -> None:
    seq = published(parts, SOON_MS, key="1001")
    pushed = message(SOON_MS, key="1001", body=b"2")
    early, replaced = parts.publishing.replace(pushed, SOON_MS - 1, leaves_due=True)
    assert replaced and parts.messages.locate(seq, SOON_MS).state is State.CANCELLED
    # It is not durable yet, and has not left; a replacement is due at once, too.
    late = message(SOON_MS, key="1001", body=b"3")
    new, replaced = parts.publishing.replace(late, SOON_MS, leaves_due=True)
    assert not replaced
    parts.commit()
    assert advance(parts, SOON_MS) == [early.seq, new.seq]


def test_replacing_nothing_publishes(parts: MessageParts) -> None:
    new, replaced = parts.publishing.replace(message(LATER_MS, key="1001"), START_MS)
    assert not replaced
    assert not new.duplicate
    assert parts.messages.by_key(SUBJECT, "1001").seq == parts.ids.decode(new.message_id).seq


def test_replacing_what_is_being_delivered_publishes_beside_it() -> None:
    parts = MessageParts(subscription())
    seq = published(parts, SOON_MS, key="1001")
    advance(parts, SOON_MS)
    _, replaced = parts.publishing.replace(message(LATER_MS, key="1001"), SOON_MS)
    assert not replaced
    assert parts.messages.locate(seq, SOON_MS).state is State.DELIVERING


def test_an_unkeyed_message_has_no_key(parts: MessageParts) -> None:
    assert parts.messages.key_hash(1, None) == NO_KEY
    assert parts.messages.key_hash(1, "") != NO_KEY


def test_many_new_subjects_of_a_batch_are_recorded_between_other_works(
    parts: MessageParts,
) -> None:
    """The server stops meanwhile: the batch is refused, and the subjects wait for messages."""
    count = NAMED_AT_ONCE + 1
    batch = columns_of([message(LATER_MS, subject=f"s{number}") for number in range(count)])
    work = parts.publishing.publishing_batch(batch, START_MS)
    named: list[int] = []
    for items in work:
        named.append(len(parts.sequencer.subjects))
        if named[-1] == count // 2:
            parts.groups.stopping = True
            break
        assert items < count
    assert {after - before for before, after in itertools.pairwise(named)} <= {0, 1}
    with pytest.raises(StoppingError):
        at_once(work)
    assert len(parts.sequencer.subjects) < count and not parts.publishing.accepted_total
    parts.groups.stopping = False
    parts.commit()
    assert at_once(parts.publishing.publishing_batch(batch, START_MS)).duplicates == {}
    assert parts.publishing.accepted_total == count


def test_a_long_batch_is_not_refused_for_the_records_of_its_own_new_subjects() -> None:
    """It is longer than a group may be, so it has one to itself, as a batch without them."""
    parts = MessageParts(group_max_bytes=100_000)
    body = b"%d" % (1 << 1000)
    batch = columns_of(
        [message(LATER_MS, subject=f"s{at}", body=body) for at in range(NAMED_AT_ONCE + 1)]
    )
    at_once(parts.publishing.publishing_batch(batch, START_MS))
    assert parts.publishing.accepted_total == NAMED_AT_ONCE + 1
    parts.commit()


def test_batches_that_name_their_subjects_together_keep_to_the_limit() -> None:
    limit = NAMED_AT_ONCE * 3 // 2
    parts = MessageParts(subjects_max=limit)
    works = [
        parts.publishing.publishing_batch(
            columns_of(
                [message(LATER_MS, subject=f"{name}{at}") for at in range(NAMED_AT_ONCE + 1)]
            ),
            START_MS,
        )
        for name in "ab"
    ]
    while not parts.sequencer.subjects:
        next(works[0])
    with pytest.raises(OverloadedError, match="subjects_max"):
        at_once(works[1])
    at_once(works[0])
    assert len(parts.sequencer.subjects) == NAMED_AT_ONCE + 1
