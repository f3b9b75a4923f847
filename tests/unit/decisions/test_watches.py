"""Watch keys and events: the index, and what an event decides."""

from __future__ import annotations

from typing import Any

import pytest

from delayserver.decisions.events import Events
from delayserver.decisions.new_messages import NewMessage
from delayserver.decisions.watches import Watches
from delayserver.records.message import Payload, Watch
from delayserver.records.message_state import MessageState
from delayserver.records.tables import OnEvent, pack_watch, parse_watch_key, unpack_watch, watch_key
from storage.catalog import Table
from storage.frame import unseal
from storage.rows import FLAG_WATCHES, HOUR_MS, RecordKind
from tests.unit.fakes import START_MS, SUBJECT, MessageParts, rows_of

LATER_MS = START_MS + 100 * HOUR_MS


class Parts(MessageParts):
    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        messages = self.messages
        self.events = Events(self.settings, self.sequencer, self.groups, messages, self.watches)

    def watching(self, *keys: str, on_event: OnEvent = OnEvent.CANCEL, body: bytes = b"1") -> int:
        payload = Payload(body, watch=Watch(keys, on_event))
        return self.publish(NewMessage(SUBJECT, LATER_MS, payload))[0]

    def event(self, key: str) -> tuple[list[int], list[int]]:
        watchers, _ = self.events.watchers(key, self.sequencer.next_seq)
        bodies = {one.seq: (Payload(b"1", watch=Watch((key,))), 1) for one in watchers}
        done = self.events.complete(key, watchers, bodies, START_MS)
        return done.cancelled, done.fired


@pytest.mark.parametrize("key", ["k", "order:1001", "ü/\0 ", "x" * 256])
def test_entries_of_the_index_read_back(key: str) -> None:
    assert parse_watch_key(watch_key(key, 7)) == (key, 7)
    assert unpack_watch(pack_watch(5, OnEvent.FIRE)) == (5, OnEvent.FIRE)
    with pytest.raises(ValueError, match="another length"):
        parse_watch_key(watch_key(key, 7) + b"x")
    with pytest.raises(ValueError, match="OnEvent"):
        unpack_watch(pack_watch(5, 2))


def test_a_key_does_not_find_what_watches_a_longer_one() -> None:
    parts = Parts()
    short, long = parts.watching("ab"), parts.watching("abc")
    watches = parts.watches
    assert [one.seq for one in watches.of("ab", 0, 99)] == [short]
    parts.catalog.commit(
        {
            Table.WATCHES: [
                (watch_key("ab", 90), pack_watch(1, 0)),
                (watch_key("abc", 91), pack_watch(1, 0)),
            ]
        }
    )
    assert [one.seq for one in watches.of("ab", 0, 99)] == [short, 90]
    assert [one.seq for one in watches.of("abc", 0, 99)] == [long, 91]


def test_what_a_checkpoint_covers_is_forgotten_and_nothing_else() -> None:
    parts = Parts()
    watches = Watches(parts.catalog)
    for seq in (1, 2):
        watches.add(parts.sequencer.group, seq, 5, Watch(("k",)))
    watches.prune(0)
    watches.add(parts.sequencer.group, 3, 5, Watch(("k",)))
    watches.prune(2)
    assert [one.seq for one in watches.of("k", 0, 99)] == [3]


def test_a_message_that_watches_is_flagged_and_one_that_does_not_keeps_its_bytes() -> None:
    parts = Parts()
    parts.watching("k")
    parts.publish(NewMessage(SUBJECT, LATER_MS, Payload(b"1")))
    publishes = rows_of(parts.sequencer.group)[1:]
    assert publishes["flags"].tolist() == [FLAG_WATCHES, 0]
    data = unseal(parts.sequencer.group.payload(int(publishes["seq"][1]))[0])
    assert data == b"\x95\xc4\x011\x00\xc0\xc0\xc0"


def test_an_event_cancels_and_fires_once() -> None:
    parts = Parts()
    cancelled = parts.watching("a", "b")
    fired = parts.watching("a", "b", on_event=OnEvent.FIRE)
    other = parts.watching("b")
    assert parts.event("a") == ([cancelled], [fired])
    assert parts.event("a") == ([], [])
    assert parts.event("b") == ([other], [])
    kinds = rows_of(parts.sequencer.group)["kind"].tolist()
    assert kinds[-3:] == [RecordKind.CANCEL, RecordKind.FIRE, RecordKind.CANCEL]


def test_a_batch_watches_too() -> None:
    parts = Parts()
    watch = Watch(("k",))
    seqs = parts.publish(
        *(NewMessage(SUBJECT, LATER_MS, Payload(b"1", watch=watch)) for _ in range(3)),
        NewMessage(SUBJECT, LATER_MS, Payload(b"1")),
    )
    assert parts.event("k") == (seqs[:3], [])


def test_a_group_that_is_rolled_back_leaves_no_watcher_and_no_completion() -> None:
    parts = Parts()
    kept = parts.watching("k")
    parts.commit()
    parts.watching("k")
    parts.event("k")
    parts.groups.flush(START_MS)
    parts.groups.on_commit_failed(OSError())
    assert [one.seq for one in parts.watches.of("k", 0, 99)] == [kept]
    assert parts.event("k") == ([kept], [])


def test_an_event_does_not_touch_what_was_published_after_it_came_in() -> None:
    parts = Parts()
    seq = parts.watching("k")
    assert parts.events.watchers("k", seq) == ([], None)
    [found], _ = parts.events.watchers("k", seq + 1)
    assert found.seq == seq


def test_a_message_that_was_fired_watches_nothing_wherever_it_is_moved() -> None:
    parts = Parts()
    seq = parts.watching("a", "b", on_event=OnEvent.FIRE)
    parts.event("a")
    payload = Payload(b"1", watch=Watch(("a", "b"), OnEvent.FIRE))
    parts.messages.move(seq, LATER_MS, LATER_MS + 5, payload, 1)
    assert parts.event("b") == ([], [])


def test_an_event_lets_go_of_what_is_settled_and_does_not_look_at_it_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parts = Parts()
    delivered = [
        parts.publish(NewMessage(SUBJECT, START_MS, Payload(b"1", watch=Watch(("k",)))))[0]
        for _ in range(3)
    ]
    waiting, cancelled = parts.watching("k"), parts.watching("k")
    parts.commit()
    parts.wheel.advance(START_MS, loaded_until_ms=1 << 50, rows_max=9)  # and they are settled
    parts.messages.cancel(cancelled, LATER_MS)
    looked: list[int] = []
    locate = parts.messages.locate

    def counting(seq: int, due_ms: int) -> MessageState:
        looked.append(seq)
        return locate(seq, due_ms)

    monkeypatch.setattr(parts.messages, "locate", counting)
    assert [one.seq for one in parts.events.watchers("k", 1 << 60)[0]] == [waiting]
    # The cancel is not durable: rolled back, its message waits and is watched for again.
    assert parts.forgotten == [watch_key("k", seq) for seq in delivered]
    assert looked == [*delivered, waiting]
    parts.watches.let_go("k", [], waiting)
    looked.clear()
    assert [one.seq for one in parts.events.watchers("k", 1 << 60)[0]] == [waiting]
    assert looked == [waiting]


def test_what_is_all_settled_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also before a checkpoint has removed it."""
    monkeypatch.setattr("delayserver.decisions.events.EVENT_MESSAGES_MAX", 2)
    parts = Parts()
    for _ in range(5):
        parts.publish(NewMessage(SUBJECT, START_MS, Payload(b"1", watch=Watch(("k",)))))
    parts.commit()
    parts.wheel.advance(START_MS, loaded_until_ms=1 << 50, rows_max=9)
    from_seq: int | None = 0
    pages = 0
    while from_seq is not None:
        found, from_seq = parts.events.watchers("k", 1 << 60, from_seq)
        assert not found
        pages += 1
    assert (pages, len(parts.forgotten)) == (3, 5)
    assert parts.events.watchers("k", 1 << 60) == ([], None)
    assert len(parts.forgotten) == 5


def test_what_does_not_fit_into_a_group_still_watches() -> None:
    parts = Parts(group_max_bytes=1000, body_max_bytes=900)
    for _ in range(3):
        parts.watching("k", on_event=OnEvent.FIRE)
        parts.commit()
    watchers, _ = parts.events.watchers("k", parts.sequencer.next_seq)
    bodies = {one.seq: (Payload(bytes(400)), 1) for one in watchers}
    first = parts.events.complete("k", watchers, bodies, START_MS)
    assert len(first.fired) == 1
    assert first.left == watchers[1:]
    assert parts.events.watchers("k", parts.sequencer.next_seq) == (watchers[1:], None)


def test_one_whose_body_cannot_be_read_is_left_alone() -> None:
    parts = Parts()
    parts.watching("k", on_event=OnEvent.FIRE)
    watchers, _ = parts.events.watchers("k", parts.sequencer.next_seq)
    done = parts.events.complete("k", watchers, {}, START_MS)
    assert (done.cancelled, done.fired) == ([], [])


@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_many_watchers_are_found_page_by_page_and_each_is_looked_at_once(
    monkeypatch: pytest.MonkeyPatch, *, is_checkpointed: bool
) -> None:
    monkeypatch.setattr("delayserver.decisions.events.EVENT_MESSAGES_MAX", 3)
    parts = Parts()
    others = [parts.watching("j"), parts.watching("k", "l")]
    seqs = [parts.watching("k") for _ in range(9)]
    before_seq = parts.sequencer.next_seq
    parts.watching("k")
    if is_checkpointed:
        half = [(watch_key("k", seq), pack_watch(LATER_MS, OnEvent.CANCEL)) for seq in seqs[:5]]
        parts.catalog.commit({Table.WATCHES: half})
    parts.messages.cancel(seqs[4], LATER_MS)
    looked: list[int] = []
    locate = parts.messages.locate

    def noted(seq: int, due_ms: int) -> MessageState:
        looked.append(seq)
        return locate(seq, due_ms)

    monkeypatch.setattr(parts.messages, "locate", noted)
    pages: list[list[int]] = []
    from_seq: int | None = 0
    while from_seq is not None:
        watchers, from_seq = parts.events.watchers("k", before_seq, from_seq)
        pages.append([one.seq for one in watchers])
    waiting = [others[1], *seqs]
    assert pages == [waiting[:3], waiting[3:5], waiting[6:9], waiting[9:]]
    assert looked == [seq for page in pages for seq in page]
