"""What the ledger of `scripts/crash --brokers` says of entries; the run itself takes minutes."""

import json
from typing import Any

import pytest

from delayserver.cli.demo.ledger import Order, Verdict, judge
from tests.crash.brokers import (
    ALL,
    FED,
    KINDS,
    BrokersCrashRun,
    BrokersLedger,
    TimedEntry,
    timed,
)
from tests.sinks.programs import Entry

NOW_MS = 1_800_000_000_000


class Book:
    """A ledger whose clock a test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ms = NOW_MS
        monkeypatch.setattr("time.time_ns", lambda: self.ms * 1_000_000)
        self.ledger = BrokersLedger()
        self.entries: dict[str, list[TimedEntry]] = {kind: [] for kind in KINDS}

    def order(self, subject: str = "load.redis", delay_ms: int = 0) -> Order:
        order = self.ledger.order(subject, BrokersCrashRun.subscribers.get(subject, (FED,)))
        self.ledger.publish_asked(order, delay_ms)
        self.ledger.publish_answered(order, f"m{order.number}", self.ledger.now_ms() + delay_ms)
        return order

    def stored(self, order: Order, at_ms: int, kind: str = "redis", **more: Any) -> None:
        headers = {"delay-id": more.get("message_id", f"m{order.number}")}
        to_ms = more.get("to_ms", at_ms)
        body = json.dumps(more.get("body", order.body)).encode()
        self.entries[kind].append(TimedEntry(headers, body, at_ms, to_ms))

    def killed(self, kind: str | None, at_ms: int) -> None:
        kills_ms = self.ledger.broker_kills_ms[kind] if kind else self.ledger.kills_ms
        kills_ms.append(at_ms)

    def verdict(self) -> Verdict:
        for _ in range(2):  # all is read as often as somebody looks
            for kind, entries in self.entries.items():
                self.ledger.read(kind, entries)
        return judge(self.ledger)

    def broken(self) -> list[str]:
        return [name for name, _ in self.verdict().violations()]


@pytest.fixture
def book(monkeypatch: pytest.MonkeyPatch) -> Book:
    return Book(monkeypatch)


def test_what_is_there_once_is_well(book: Book) -> None:
    everywhere = book.order(ALL)
    for kind in KINDS:
        book.stored(everywhere, NOW_MS + 5, kind)
    book.stored(book.order(FED), NOW_MS + 5)
    verdict = book.verdict()
    assert verdict.is_clean and (verdict.delivered, verdict.repeated) == (2, 0)
    assert not book.ledger.strangers


def test_what_is_missing_somewhere_is_lost(book: Book) -> None:
    everywhere = book.order(ALL)
    for kind in KINDS[1:]:
        book.stored(everywhere, NOW_MS + 5, kind)
    assert book.broken() == ["lost"]


@pytest.mark.parametrize(
    ("victim", "at_ms", "broken"),
    [
        (None, 100, []),
        ("redis", 100, []),
        ("redis", 900, []),
        ("redis", 2000, ["repeated_recorded"]),  # it was recorded long before
        ("redis", -1000, ["repeated_recorded"]),
        ("nats", 100, ["repeated_recorded"]),
    ],
)
def test_what_is_there_twice_was_under_way_at_a_kill(
    book: Book, victim: str | None, at_ms: int, broken: list[str]
) -> None:
    order = book.order()
    book.stored(order, NOW_MS)
    book.stored(order, NOW_MS + 5000)
    book.killed(victim, NOW_MS + at_ms)
    assert book.broken() == broken


def test_of_an_entry_that_came_at_some_time_the_whole_time_counts(book: Book) -> None:
    order = book.order("load.amqp")
    book.stored(order, NOW_MS, "amqp", to_ms=NOW_MS + 3000)
    book.stored(order, NOW_MS + 5000, "amqp")
    book.killed("amqp", NOW_MS + 2500)
    assert book.broken() == []


def test_an_offset_that_is_two_messages_was_published_twice(book: Book) -> None:
    order = book.order(FED)
    book.killed(None, NOW_MS)
    for message_id in ("m0", "another"):
        book.stored(order, NOW_MS + 5, message_id=message_id)
    assert book.broken() == ["other_id"]


@pytest.mark.parametrize(("victim", "broken"), [("redis", []), ("nats", ["fired_cancelled"])])
def test_what_was_cancelled_is_there_only_if_it_was_under_way_at_a_kill(
    book: Book, victim: str, broken: list[str]
) -> None:
    order = book.order()
    order.cancelled_ms = NOW_MS + 1000
    book.stored(order, NOW_MS + 500)
    book.killed(victim, NOW_MS + 600)
    assert book.broken() == broken


def test_what_is_there_before_it_is_due_is_early(book: Book) -> None:
    book.stored(book.order(delay_ms=100), NOW_MS + 99)
    book.stored(book.order(delay_ms=100), NOW_MS + 100)
    assert book.broken() == ["early"]


def test_a_move_counts_from_then_on(book: Book) -> None:
    order = book.order()
    book.killed("redis", NOW_MS + 50)
    book.stored(order, NOW_MS + 50)  # and the server did not hear of it
    book.ms += 1000
    order.move_answered(NOW_MS + 5000, book.ledger.now_ms())
    book.stored(order, NOW_MS + 5000)
    assert book.broken() == []
    book.stored(order, NOW_MS + 4000)
    assert "early" in book.broken()


def test_the_clock_of_the_server_may_be_ahead(book: Book) -> None:
    order = book.order(delay_ms=3_600_000)
    book.ms += 1000
    book.ledger.offset_ms += 3_600_000
    book.stored(order, NOW_MS + 1001)
    assert book.broken() == []
    book.stored(order, NOW_MS + 999)
    assert "early" in book.broken()


def test_what_nobody_has_published_is_named(book: Book) -> None:
    order = book.order()
    book.stored(order, NOW_MS, body={"order": 7})
    book.stored(order, NOW_MS, "nats")
    assert "garbled" in book.broken()
    assert [one[:7] for one in book.ledger.strangers] == ["redis: "]


def test_marks_say_when_what_is_between_them_came() -> None:
    def entry(name: str, stored_ms: int = 0) -> Entry:
        return Entry({"delay-id": name}, b"1", stored_ms)

    def mark(at_ms: int) -> Entry:
        return Entry({"mark": str(at_ms)}, b"0")

    entries = [entry("a"), mark(10), entry("b"), entry("c"), mark(20), entry("d"), mark(30)]
    found = [(one.headers["delay-id"], one.from_ms, one.to_ms) for one in timed(entries, 99)]
    # The next mark is made when the one before is there.
    assert found == [("a", 0, 20), ("b", 10, 30), ("c", 10, 30), ("d", 20, 99)]
    (told,) = timed([entry("e", 15)], 99)
    assert (told.from_ms, told.to_ms) == (15, 15)
