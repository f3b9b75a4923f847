"""The judgement: each broken promise is found, and what a crash allows is not one."""

import pytest

from delayserver.cli.demo.ledger import RECORD_MS, RULES, DemoLedger, Outage, judge

DUE = 10_000


@pytest.fixture
def ledger():
    return DemoLedger()


def published(ledger, *subscriptions):
    order = ledger.order("s", subscriptions or ("hook",))
    order.publish_asked(DUE, DUE - 1000)
    order.publish_answered("id", DUE, DUE - 990, DUE)
    return order


def deliver(order, at_ms, *, subscription="hook", message_id="id", settled=True):
    return order.received(subscription, message_id, at_ms, settled=settled)


def broken(ledger):
    verdict = judge(ledger)
    assert verdict.is_clean != any(verdict.broken.values())
    return {name for name in RULES if verdict.broken[name]}


def test_a_good_run(ledger):
    deliver(published(ledger), DUE + 3)
    verdict = judge(ledger)
    assert verdict.is_clean
    assert (verdict.published, verdict.delivered, verdict.repeated) == (1, 1, 0)
    assert verdict.lateness_ms == [3]


def test_nothing_was_promised(ledger):
    ledger.order("s", ("hook",)).publish_asked(DUE, DUE)
    assert judge(ledger).is_clean


def test_lost(ledger):
    published(ledger)
    assert broken(ledger) == {"lost"}


def test_lost_at_one_of_two(ledger):
    order = published(ledger, "hook", "pull")
    deliver(order, DUE)
    assert broken(ledger) == {"lost"}


def test_a_failed_delivery_is_not_one(ledger):
    deliver(published(ledger), DUE, settled=False)
    assert broken(ledger) == {"lost"}


def test_a_cancel_without_an_answer_leaves_it_open(ledger):
    published(ledger).cancel_asked = True
    assert judge(ledger).is_clean


def test_early(ledger):
    deliver(published(ledger), DUE - 1)
    assert broken(ledger) == {"early"}


def test_early_by_what_was_asked_even_if_the_answer_allows_it(ledger):
    order = ledger.order("s", ("hook",))
    order.publish_asked(DUE + 1000, DUE)
    order.publish_answered("id", DUE + 500, DUE, DUE + 1000)
    deliver(order, DUE + 600)
    assert broken(ledger) == {"early"}


def test_a_move_under_way_allows_both_times(ledger):
    order = published(ledger)
    order.move_asked(DUE - 500, DUE - 900)
    deliver(order, DUE - 400)
    assert judge(ledger).is_clean


def test_a_move_that_was_answered_allows_one(ledger):
    order = published(ledger)
    order.move_asked(DUE + 500, DUE - 900)
    order.move_answered(DUE + 500, DUE - 100)
    deliver(order, DUE + 1)
    assert broken(ledger) == {"early"}


def test_cancelled_yet_delivered(ledger):
    order = published(ledger)
    order.cancelled_ms = DUE - 1
    deliver(order, DUE)
    assert broken(ledger) == {"fired_cancelled"}


def test_delivered_yet_answered_as_cancelled(ledger):
    order = published(ledger)
    deliver(order, DUE)
    order.cancelled_ms = DUE + 5
    assert broken(ledger) == {"fired_cancelled"}


def test_cancelled_between_two_attempts(ledger):
    order = published(ledger)
    deliver(order, DUE, settled=False)
    order.cancelled_ms = DUE + 5
    assert judge(ledger).is_clean


def test_cancelled_after_a_kill_that_kept_the_delivery_from_being_recorded(ledger):
    order = published(ledger)
    deliver(order, DUE)
    order.cancelled_ms = DUE + 2000
    ledger.kills_ms = [DUE + 10]
    assert judge(ledger).is_clean
    ledger.kills_ms = [DUE + RECORD_MS + 1]
    assert broken(ledger) == {"fired_cancelled"}


def test_in_flight_at_a_kill_may_come_again(ledger):
    order = published(ledger)
    deliver(order, DUE)
    deliver(order, DUE + 5000)
    ledger.kills_ms = [DUE + 10]
    verdict = judge(ledger)
    assert verdict.is_clean
    assert verdict.repeated == 1


def test_a_receiver_that_answers_late_gives_the_server_no_less_time(ledger):
    order = published(ledger)
    deliver(order, DUE).settled_ms = DUE + RECORD_MS + 500
    deliver(order, DUE + 5000)
    ledger.kills_ms = [DUE + RECORD_MS + 510]
    assert judge(ledger).is_clean
    ledger.kills_ms = [DUE + 2 * RECORD_MS + 501]
    assert broken(ledger) == {"repeated_recorded"}


@pytest.mark.parametrize("kills", [[], [DUE - 1000], [DUE + RECORD_MS + 1], [DUE + 5001]])
def test_recorded_may_not(ledger, kills):
    order = published(ledger)
    deliver(order, DUE)
    deliver(order, DUE + 5000)
    ledger.kills_ms = kills
    assert broken(ledger) == {"repeated_recorded"}


def test_acknowledged_may_not_whatever_happened(ledger):
    order = published(ledger)
    deliver(order, DUE, settled=False).acknowledged(DUE + 1)
    deliver(order, DUE + 5000, settled=False)
    ledger.kills_ms = [DUE + 1]
    assert broken(ledger) == {"repeated_recorded"}


def test_an_acknowledgement_without_an_answer_may_come_again_or_not(ledger):
    order = published(ledger)
    deliver(order, DUE, settled=False).ack_asked = True
    assert judge(ledger).is_clean
    deliver(order, DUE + 5000, settled=False)
    assert judge(ledger).is_clean


def test_another_id(ledger):
    order = published(ledger)
    deliver(order, DUE, message_id="other")
    assert broken(ledger) == {"other_id"}


def test_a_body_that_changed(ledger):
    published(ledger)
    ledger.receive("hook", "id", {"order": 0, "more": 1}, settled=True)
    assert "garbled" in broken(ledger)


def test_what_was_never_published(ledger):
    bodies: list[object] = [None, {"order": 5}, {"order": "x"}, []]
    for body in bodies:
        ledger.receive("hook", "id", body, settled=True)
    assert len(ledger.strangers) == 4


def test_lateness_counts_only_while_the_server_was_up(ledger):
    deliver(published(ledger), DUE + 900)
    ledger.outages = [Outage(DUE - 900, DUE - 800), Outage(DUE + 901, DUE + 2000)]
    assert judge(ledger).lateness_ms == [900]
    for outage in (Outage(DUE - 10, DUE + 800), Outage(DUE + 10, DUE + 800)):
        ledger.outages = [outage]
        assert judge(ledger).lateness_ms == []


def test_percentiles():
    ledger = DemoLedger()
    verdict = judge(ledger)
    assert verdict.lateness_percentile_ms(50) is None
    verdict.lateness_ms = list(range(100))
    assert verdict.lateness_percentile_ms(50) == 50
    assert verdict.lateness_percentile_ms(99) == 99
    assert verdict.lateness_percentile_ms(100) == 99
