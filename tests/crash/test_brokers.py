"""What the ledger of `scripts/crash --brokers` says of entries; the run itself takes minutes."""

from delayserver.cli.demo.ledger import LATE_MS
from tests.crash.brokers import ALL, BrokerTraffic
from tests.harness.ledger import timed
from tests.sinks.programs import Entry
from tests.unit.harness.book import DUE, Book, broken


def test_what_is_missing_somewhere_is_lost() -> None:
    book = Book()
    names = BrokerTraffic.subscribers[ALL]
    order = book.publish(*names)
    for name in names[1:]:
        book.read(name.removeprefix("all-"), [book.entry(order, DUE)])
    book.at_ms = DUE + LATE_MS
    assert broken(book) == {"lost"}
    book.read("redis", [book.entry(order, DUE)])
    assert broken(book) == set()


def test_marks_say_when_the_entries_between_them_came() -> None:
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
