"""One call of `deliver`: each message is told of once, with its own result."""

from delayserver.delivery.answers import STORED, Certainty, not_stored, unknown
from delayserver.delivery.outlet import OutletError
from delayserver.delivery.sink import Confirmed, Failed
from tests.unit.delivery.outlet_machine import Machine, run, to
from tests.unit.fakes import delivery
from tests.waiting import turns


def test_what_comes_together_is_told_together() -> None:
    machine = run(lambda m: m.deliver(to("a"), 1, 2, 3))
    assert machine.told == [([1, 2, 3], Confirmed())]


def test_each_has_a_result_of_its_own_and_who_is_cancelled_is_told_nothing() -> None:
    async def main(m: Machine) -> None:
        m.opener.answers_at_once = False
        first, second = m.start(to("a"), 1), m.start(to("a"), 2, 3)
        await turns(10)
        first.cancel()
        await turns(10)
        (outlet,) = m.opener.made
        (_, report), *rest = outlet.open
        report(delivery(1), STORED)
        outlet.open = rest[1:]
        rest[0][1](rest[0][0], not_stored("no"))
        outlet.answer()
        await second

    assert run(main).told == [([3], Confirmed()), ([2], Failed("no"))]


def lost_together(m: Machine) -> None:
    """The connection ends under messages that the broker may have, and cannot be made again."""
    m.opener.error = OutletError("away")
    m.opener.made[0].is_broken = True
    m.opener.made[0].answer(unknown("lost", is_shared=True))


def test_messages_that_may_be_stored_are_told_so_where_they_cannot_go_apart() -> None:
    async def main(m: Machine) -> None:
        m.opener.answers_at_once = False
        task = m.start(to("a"), 1, 2)
        await turns(10)
        lost_together(m)
        await task
        assert m.sink.counts.answers[Certainty.UNKNOWN] == 2

    assert run(main).told == [([1], Failed("lost")), ([2], Failed("lost"))]


def test_messages_that_may_be_stored_are_not_untried_when_their_subscription_is_paused() -> None:
    async def main(m: Machine) -> None:
        m.opener.answers_at_once = False
        task = m.start(to("a"), 1, 2)
        await turns(10)
        lost_together(m)
        m.sink.on_subscription(to("a", paused=True))
        await task

    assert run(main).told == [([1], Failed("lost")), ([2], Failed("lost"))]


def test_a_message_that_may_be_stored_stays_so_when_it_is_refused_later() -> None:
    async def main(m: Machine) -> None:
        m.opener.answers_at_once = False
        task = m.start(to("a"), 1, 2)
        await turns(10)
        m.opener.made[0].answer(unknown("lost", is_shared=True))
        m.opener.answers_at_once = True
        m.opener.bad = {1}
        await task
        counts = m.sink.counts.answers
        assert (counts[Certainty.UNKNOWN], counts[Certainty.STORED]) == (1, 1)

    told = {seq: result for seqs, result in run(main).told for seq in seqs}
    assert told == {1: Failed("bad"), 2: Confirmed()}


def test_an_unknown_answer_is_told_as_such() -> None:
    async def main(m: Machine) -> None:
        m.opener.answers_at_once = False
        task = m.start(to("a"), 1)
        await turns(10)
        m.opener.made[0].answer(unknown("no answer within 1 ms"))
        await task
        assert m.sink.counts.answers[Certainty.UNKNOWN] == 1

    assert run(main).told == [([1], Failed("no answer within 1 ms"))]
