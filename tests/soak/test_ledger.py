"""The judgement under a clock that is set: each rule can fail, and what a step allows does not."""

import pytest

from delayserver.cli.demo.ledger import VIOLATIONS, judge
from tests.soak.harness import FILES_MORE, Sample, Samples
from tests.soak.ledger import LATE_MS, LOOK_MS, ServerClock, SoakLedger, Step

NOW = 1_000_000
DUE = NOW + 1000


class SetLedger(SoakLedger):
    """One whose machine has a clock that the test moves."""

    at_ms = NOW

    def now_ms(self):
        return self.at_ms

    def set_clock(self, offset_ms):
        self.clock.steps.append(Step(self.at_ms, self.at_ms + 1, offset_ms))


@pytest.fixture
def ledger():
    return SetLedger()


def published(ledger, *subscriptions):
    order = ledger.order("s", subscriptions or ("hook",))
    ledger.publish_asked(order, DUE - ledger.server_ms())
    ledger.publish_answered(order, "id", DUE)
    return order


def deliver(ledger, order, at_ms, *, settled=True):
    ledger.at_ms = at_ms
    return ledger.receive("hook", "id", order.body, settled=settled)


def broken(ledger):
    verdict = judge(ledger)
    return {name for name in VIOLATIONS if getattr(verdict, name)}


def test_a_good_run(ledger):
    ledger.at_ms -= LOOK_MS
    deliver(ledger, published(ledger), DUE + 3)
    assert broken(ledger) == set()
    assert judge(ledger).lateness_ms == [3]


def test_lost_once_it_is_late(ledger):
    order = published(ledger)
    ledger.at_ms = DUE + LATE_MS - 1
    assert (broken(ledger), ledger.open_count) == (set(), 1)
    ledger.at_ms += 1
    assert broken(ledger) == {"lost"}
    deliver(ledger, order, ledger.at_ms)
    assert broken(ledger) == set()


def test_what_is_not_due_by_the_servers_clock_is_pending(ledger):
    order = published(ledger)
    ledger.set_clock(-60_000)
    ledger.at_ms = DUE + LATE_MS
    assert broken(ledger) == set()
    assert ledger.pending() == [order]


def test_a_clock_that_is_set_forward_makes_it_due(ledger):
    order = published(ledger)
    ledger.at_ms += 10
    ledger.set_clock(1000)
    assert ledger.pending() == []
    deliver(ledger, order, ledger.at_ms + 5)
    assert broken(ledger) == set()
    assert judge(ledger).lateness_ms == []  # nobody was late: the step was early


def test_early(ledger):
    deliver(ledger, published(ledger), DUE - 1)
    assert broken(ledger) == {"early"}


def test_early_by_a_clock_that_was_set_back(ledger):
    order = published(ledger)
    ledger.set_clock(-500)
    deliver(ledger, order, DUE + 499)
    assert broken(ledger) == {"early"}


def test_what_had_fallen_due_stays_due(ledger):
    order = published(ledger)
    ledger.at_ms = DUE
    ledger.set_clock(-60_000)
    deliver(ledger, order, DUE + 100)
    assert broken(ledger) == set()


def test_what_the_clock_showed_before_the_publish_does_not_count(ledger):
    ledger.set_clock(60_000)
    ledger.at_ms += 100
    ledger.set_clock(0)
    ledger.at_ms += 100
    deliver(ledger, published(ledger), DUE - 1)
    assert broken(ledger) == {"early"}


def test_within_a_step_both_clocks_count():
    clock = ServerClock()
    clock.steps.append(Step(100, 110, -1000))
    assert clock.has_shown(109, 0, 109)
    assert not clock.has_shown(111, 0, 500)


def test_an_early_delivery_that_came_before_the_answer(ledger):
    order = ledger.order("s", ("hook",))
    ledger.publish_asked(order, 1000)
    deliver(ledger, order, DUE - 500)
    assert broken(ledger) == set()  # nobody knows yet when it is due
    ledger.publish_answered(order, "id", DUE)
    assert broken(ledger) == {"early"}


def test_cancelled_and_fired(ledger):
    order = published(ledger)
    order.cancelled_ms = ledger.now_ms()
    deliver(ledger, order, DUE + 1)
    assert broken(ledger) == {"fired_cancelled"}


def test_recorded_and_repeated_also_when_the_clock_was_set_back(ledger):
    order = published(ledger)
    deliver(ledger, order, DUE + 1)
    ledger.set_clock(-60_000)
    deliver(ledger, order, DUE + 2000)
    assert broken(ledger) == {"repeated_recorded"}


def test_refused_and_delivered(ledger):
    order = ledger.order("s", ("hook",))
    ledger.publish_asked(order, 0)
    order.refused = True
    deliver(ledger, order, NOW + 1)
    assert broken(ledger) == {"refused_came"}


def test_a_move_without_an_answer_allows_both_times(ledger):
    order = published(ledger)
    order.move_asked(DUE + 60_000)
    ledger.at_ms = DUE + LATE_MS
    assert broken(ledger) == set()
    order.move_answered(DUE, ledger.now_ms())
    assert broken(ledger) == {"lost"}


def test_a_move_that_was_refused_changes_nothing(ledger):
    order = published(ledger)
    order.move_asked(DUE + 60_000)
    order.move_refused(DUE)
    ledger.at_ms = DUE + LATE_MS
    assert broken(ledger) == {"lost"}


@pytest.mark.parametrize(
    ("grown_bytes", "sockets", "files", "said"),
    [
        (0, 3, 20, []),
        (60 << 20, 3, 20, ["memory"]),
        (0, 4, 20, ["sockets"]),
        (0, 3, 21 + FILES_MORE, ["files"]),
    ],
)
def test_what_is_not_flat_is_told(grown_bytes, sockets, files, said):
    flat = Sample(100 << 20, 3, 20)
    grown = Sample(flat.memory_bytes + grown_bytes, sockets, files)
    complaints = list(Samples([flat] * 9 + [grown] * 3).complaints(flat, grown))
    assert len(complaints) == len(said)
    assert all(word in complaint for word, complaint in zip(said, complaints, strict=True))
