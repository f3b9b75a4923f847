"""Each rule of the ledger can fail, and a ledger that a strike excuses is clean.

A canary breaks one rule and no other one; a ledger that is excused breaks none. Each is a few lines
on a clock that stands still until it is told to go on."""

from collections.abc import Callable

import pytest

from delayserver.cli.demo.ledger import LATE_MS, RECORD_MS
from tests.harness.ledger import Pulled, Span
from tests.harness.rules import CLOCK_MS, EVERYWHERE, OFFICES, TRANSIT_MS
from tests.unit.harness.book import ASKED, DUE, IDS, LEASE_OVER_MS, OFFICE_MS, Book, broken

Case = Callable[[Book], None]
REFUSED: list[tuple[str, Case]] = []
"""The canaries, each with the rule that it breaks."""
EXCUSED: list[Case] = []


def refused_by(rule: str) -> Callable[[Case], Case]:
    def add(case: Case) -> Case:
        REFUSED.append((rule, case))
        return case

    return add


def excused(case: Case) -> Case:
    EXCUSED.append(case)
    return case


@pytest.fixture
def book() -> Book:
    return Book()


# ── a ledger for each rule ────────────────────────────────────────────────────────────────────


@refused_by("lost")
def lost(book: Book) -> None:
    book.publish()
    book.at_ms = DUE + LATE_MS


@refused_by("early")
def early(book: Book) -> None:
    book.deliver(book.publish(), DUE - 1)


@refused_by("fired_cancelled")
def fired_cancelled(book: Book) -> None:
    order = book.publish()
    order.cancelled_ms = ASKED
    book.deliver(order)


@refused_by("repeated_recorded")
def repeated_recorded(book: Book) -> None:
    order = book.publish()
    book.deliver(order)
    book.deliver(order, DUE + 5000)


@refused_by("other_id")
def other_id(book: Book) -> None:
    order = book.publish()
    book.deliver(order)
    order.message_ids.add(IDS[1])


@refused_by("garbled")
def garbled(book: Book) -> None:
    order = book.publish()
    book.at_ms = DUE
    book.receive("hook", IDS[0], {**order.body, "more": 1}, settled=True)


@refused_by("refused_came")
def refused_came(book: Book) -> None:
    order = book.publish(answer=False)
    order.refused = True
    book.deliver(order)


@refused_by("never_published")
def never_published(book: Book) -> None:
    book.receive("hook", IDS[0], {"order": 5}, settled=True)


@refused_by("leased_to_another")
def leased_to_another(book: Book) -> None:
    book.owned(LEASE_OVER_MS - CLOCK_MS - 1)


@refused_by("not_in_office")
def not_in_office(book: Book) -> None:
    book.sent("n1", LEASE_OVER_MS + TRANSIT_MS + 1)


@refused_by("two_processes")
def two_processes(book: Book) -> None:
    lease_in_turn(book, TRANSIT_MS + 1)


def lease_in_turn(book: Book, late_ms: int) -> None:
    moments = ((100, "a"), (200, "b"), (200 + late_ms, "a"), (300 + late_ms, "b"))
    book.pulls += [Pulled(at_ms, 0, process) for at_ms, process in moments]


# ── more that breaks a rule ───────────────────────────────────────────────────────────────────


def repeat_after(book: Book, strike: Callable[[], None], *, shard: int = 0) -> None:
    """A delivery comes again, and between the two something was struck."""
    order = book.publish(shard=shard)
    book.deliver(order)
    strike()
    book.deliver(order, DUE + 5000)


@refused_by("early")
def early_by_a_clock_that_was_set_back(book: Book) -> None:
    order = book.publish()
    book.set_clock(-500)
    book.deliver(order, DUE + 499)


@refused_by("early")
def early_by_a_time_before_the_publish(book: Book) -> None:
    book.set_clock(60_000)
    book.at_ms += 100
    book.set_clock(0)
    book.at_ms += 100
    early(book)


@refused_by("early")
def early_before_the_answer(book: Book) -> None:
    order = book.publish(answer=False)
    book.deliver(order, DUE - 500)
    book.publish_answered(order, IDS[0], DUE)


@refused_by("early")
def early_after_the_clocks_were_right_again(book: Book) -> None:
    book.skewed(900)
    book.at_ms += 1
    book.skewed(0)
    book.at_ms += 1
    early(book)


@refused_by("early")
def early_by_more_than_the_skew(book: Book) -> None:
    order = book.publish()
    book.at_ms += 1
    book.skewed(900)
    book.deliver(order, DUE - 901)


@refused_by("early")
def early_after_a_move(book: Book) -> None:
    order = book.publish()
    book.at_ms += 1000
    order.move_answered(DUE + 5000, book.now_ms())
    book.deliver(order, DUE + 4000)


@refused_by("early")
def early_in_a_broker(book: Book) -> None:
    book.read("redis", [book.entry(book.publish("redis"), DUE - 1)])


@refused_by("lost")
def lost_in_one_of_two_brokers(book: Book) -> None:
    book.read("nats", [book.entry(book.publish("all-redis", "all-nats"), DUE)])
    book.at_ms = DUE + LATE_MS


@refused_by("lost")
def lost_after_a_move_that_was_refused(book: Book) -> None:
    order = book.publish()
    order.move_asked(DUE + 60_000, book.now_ms())
    order.move_refused(DUE, book.now_ms())
    book.at_ms = DUE + LATE_MS


@refused_by("repeated_recorded")
def repeated_by_another_shard(book: Book) -> None:
    repeat_after(book, lambda: book.struck([1], DUE + 10, DUE + 4000))


@refused_by("repeated_recorded")
def repeated_long_after_it_was_recorded(book: Book) -> None:
    repeat_after(book, lambda: book.struck([0], DUE + RECORD_MS + 1, DUE + 4000))


@refused_by("repeated_recorded")
def repeated_by_the_next_owner(book: Book) -> None:
    repeat_after(book, lambda: book.struck([0], DUE - 4000, DUE - 1000))


@refused_by("repeated_recorded")
def repeated_though_acknowledged(book: Book) -> None:
    order = book.publish()
    book.deliver(order).acknowledged(DUE)
    book.struck([0], DUE + 10, DUE + 4000)
    book.deliver(order, DUE + 5000)


@refused_by("repeated_recorded")
def repeated_when_the_clock_was_set_back(book: Book) -> None:
    repeat_after(book, lambda: book.set_clock(-60_000))


@refused_by("repeated_recorded")
def repeated_behind_the_thaw(book: Book) -> None:
    order = book.publish()
    book.deliver(order).acknowledged(DUE)
    book.late[0].append(Span(DUE + 9000, DUE + 12_000))
    book.deliver(order, DUE + 12_001)


@refused_by("repeated_recorded")
def twice_in_a_broker(book: Book) -> None:
    order = book.publish("redis")
    book.struck(["nats"], DUE + 100, DUE + 110)
    book.struck(["redis"], DUE + 2000, DUE + 2010)  # it was recorded long before
    book.read("redis", [book.entry(order, DUE), book.entry(order, DUE + 5000)])


@refused_by("fired_cancelled")
def fired_in_a_broker_that_was_not_killed(book: Book) -> None:
    order = book.publish("redis")
    order.cancelled_ms = DUE + 1000
    book.struck(["nats"], DUE + 600, DUE + 610)
    book.read("redis", [book.entry(order, DUE + 500)])


@refused_by("other_id")
def an_offset_that_is_two_messages(book: Book) -> None:
    order = book.publish("redis")
    book.struck([0], DUE, DUE)
    book.read("redis", [book.entry(order, DUE, id=one) for one in IDS])


@refused_by("garbled")
def a_body_that_a_broker_has_changed(book: Book) -> None:
    order = book.publish("redis")
    book.read("redis", [book.entry(order, DUE, body={**order.body, "more": 1})])


@refused_by("garbled")
def an_entry_that_belongs_elsewhere(book: Book) -> None:
    order = book.publish("redis")
    book.read("redis", [book.entry(order, DUE)])
    book.read("nats", [book.entry(order, DUE)])


@refused_by("never_published")
def an_entry_of_no_message(book: Book) -> None:
    book.read("redis", [book.entry(book.publish("redis"), DUE, body={"order": 7})])
    assert [one[:7] for one in book.strangers] == ["redis: "]


@refused_by("not_in_office")
def a_delivery_before_the_claim(book: Book) -> None:
    book.sent("n2", LEASE_OVER_MS - CLOCK_MS - 1)


@refused_by("not_in_office")
def a_delivery_of_a_node_that_never_was_in_office(book: Book) -> None:
    book.sent("n3", LEASE_OVER_MS)


# ── ledgers that a strike excuses ─────────────────────────────────────────────────────────────


@excused
def in_time(book: Book) -> None:
    book.deliver(book.publish(), DUE + 3)
    assert book.lateness_ms(book.orders[0], book.orders[0].receipts["hook"][0]) == 3


@excused
def almost_late(book: Book) -> None:
    book.publish()
    book.at_ms = DUE + LATE_MS - 1
    assert book.open_count == 1


@excused
def not_due_by_a_clock_that_was_set_back(book: Book) -> None:
    order = book.publish()
    book.set_clock(-60_000)
    book.at_ms = DUE + LATE_MS
    assert book.pending() == [order]


@excused
def due_by_a_clock_that_was_set_forward(book: Book) -> None:
    order = book.publish()
    book.at_ms += 10
    book.set_clock(DUE - ASKED)
    assert book.pending() == []
    book.deliver(order, ASKED + 15)
    # Nobody was late: the step was early.
    assert book.lateness_ms(order, order.receipts["hook"][0]) is None


@excused
def due_before_the_clock_was_set_back(book: Book) -> None:
    order = book.publish()
    book.at_ms = DUE
    book.set_clock(-60_000)
    book.deliver(order, DUE + 100)


@excused
def a_move_without_an_answer(book: Book) -> None:
    order = book.publish()
    order.move_asked(DUE + 60_000, book.now_ms())
    book.at_ms = DUE + LATE_MS


@excused
def an_answer_that_was_set_back_meanwhile(book: Book) -> None:
    order = book.publish(answer=False)
    book.at_ms += 10
    book.set_clock(-1000)
    book.publish_answered(order, IDS[0], DUE - 1000)
    book.deliver(order, DUE)


@excused
def clocks_that_differ(book: Book) -> None:
    order = book.publish()
    book.at_ms += 1
    book.skewed(900)
    book.deliver(order, DUE - 900)


@excused
def in_flight_at_a_strike(book: Book) -> None:
    repeat_after(book, lambda: book.struck([1], DUE + 10, DUE + 4000), shard=1)


@excused
def an_owner_that_cannot_hear_its_client(book: Book) -> None:
    repeat_after(book, lambda: book.struck([0], DUE, DUE + 3000))


@excused
def an_owner_that_thaws(book: Book) -> None:
    order, cancelled = book.publish(), book.publish()
    book.deliver(order).acknowledged(DUE)
    cancelled.cancelled_ms = DUE + 5000
    book.at_ms = DUE + 9000
    book.thaws([0], 3000)
    book.deliver(cancelled, DUE + 9000)
    book.deliver(order, DUE + 12_000)


@excused
def once_everywhere(book: Book) -> None:
    everywhere, fed = book.publish("all-redis", "all-nats"), book.publish("fed")
    for kind in ("nats", "redis", "redis"):  # all is read as often as the run looks
        entries = [book.entry(everywhere, DUE + 5)]
        entries += [book.entry(fed, DUE + 5)] if kind == "redis" else []
        book.read(kind, entries, fed="fed")
    assert everywhere.is_delivered and fed.is_delivered


@pytest.mark.parametrize("struck", [0, "redis"])
def test_an_entry_may_be_there_twice_if_it_was_on_its_way_at_a_kill(
    struck: int | str, book: Book
) -> None:
    order = book.publish("redis")
    book.read("redis", [book.entry(order, DUE), book.entry(order, DUE + 5000)])
    assert broken(book) == {"repeated_recorded"}
    book.struck([struck], DUE + 900, DUE + 910)
    assert broken(book) == set()


@excused
def an_entry_that_came_at_some_time(book: Book) -> None:
    order = book.publish("amqp")
    book.struck(["amqp"], DUE + 2500, DUE + 2500)
    entries = [book.entry(order, DUE, DUE + 3000), book.entry(order, DUE + 5000)]
    book.read("amqp", entries)


@excused
def an_entry_that_overtakes_a_cancel(book: Book) -> None:
    order = book.publish("redis")
    order.cancelled_ms = DUE + 1000
    book.struck(["redis"], DUE + 600, DUE + 610)
    book.read("redis", [book.entry(order, DUE + 500)])


@excused
def an_entry_of_before_the_move(book: Book) -> None:
    order = book.publish("redis")
    book.struck(["redis"], DUE + 50, DUE + 50)  # and the server did not hear of it
    book.at_ms = DUE + 1000
    order.move_answered(DUE + 5000, book.now_ms())
    book.read("redis", [book.entry(order, DUE + 50), book.entry(order, DUE + 5000)])


@excused
def a_claim_behind_the_lease(book: Book) -> None:
    book.owned(LEASE_OVER_MS)


@excused
def a_claim_behind_a_release(book: Book) -> None:
    book.owned(OFFICE_MS + 1, is_released=True)


@excused
def deliveries_in_office(book: Book) -> None:
    for node, at_ms in (("n1", LEASE_OVER_MS + TRANSIT_MS), ("n2", LEASE_OVER_MS), ("n2", 10**9)):
        book.sent(node, at_ms)
    assert len(book.deliveries) == 3


@excused
def a_late_delivery_of_an_owner_that_thaws(book: Book) -> None:
    book.late[0].append(Span(19_900, 22_900))
    book.sent("n1", 20_000)


@excused
def two_processes_in_turn(book: Book) -> None:
    lease_in_turn(book, TRANSIT_MS)


# ── the tests ─────────────────────────────────────────────────────────────────────────────────


def test_each_rule_has_a_canary() -> None:
    assert {rule for rule, _ in REFUSED} == EVERYWHERE.keys() | OFFICES.keys()


@pytest.mark.parametrize(("rule", "case"), REFUSED, ids=lambda one: getattr(one, "__name__", ""))
def test_a_ledger_that_breaks_a_rule_is_refused(rule: str, case: Case, book: Book) -> None:
    case(book)
    assert broken(book) == {rule}


@pytest.mark.parametrize("case", EXCUSED, ids=lambda one: one.__name__)
def test_a_ledger_that_a_strike_excuses_is_clean(case: Case, book: Book) -> None:
    case(book)
    assert broken(book) == set()
