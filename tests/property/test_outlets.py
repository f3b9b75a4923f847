"""Any broker and any course of events: each message is told of once, and nothing is kept.

An outlet here refuses, hangs, is blocked, breaks with messages under way, before they have left or
at once, and cannot be opened, as dice say. Some messages are poison: with one of them under way a
group is refused, or the connection ends.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Hashable

import msgspec
import pytest

from delayserver.delivery import open_outlets, outlets
from delayserver.delivery.answers import (
    STORED,
    UNSENT,
    BrokerAnswer,
    Certainty,
    not_stored,
    unknown,
)
from delayserver.delivery.outlet import Outlet, OutletError, Report
from delayserver.delivery.outlets import OutletSink
from delayserver.delivery.sink import Confirmed, Failed, Result, Untried
from delayserver.records.message import DueDelivery
from delayserver.records.subscriptions import RedisTarget, Subscription
from tests.unit.fakes import always, delivery, subscription

POISON = 13
"""Every so many seqs."""


class DicedOutlet:
    """A client of a broker that is in no good state."""

    window_bytes = 20_000
    connections, channels = 1, 0

    def __init__(
        self, dice: random.Random, is_kind: bool, answers: dict[int, list[BrokerAnswer]]
    ) -> None:
        """`answers`: by seq those of brokers that have got the message."""
        self._dice = dice
        self._is_kind = is_kind
        self._answers = answers
        self.is_broken = not is_kind and dice.random() < 0.05
        self.is_blocked = False
        self.is_closed = False
        self._waiting: list[tuple[DueDelivery, Report]] = []

    def send(
        self, subscription: Subscription, deliveries: list[DueDelivery], report: Report
    ) -> None:
        assert not self.is_closed
        if self.is_broken:
            for one in deliveries:
                report(one, UNSENT)
            return
        self._waiting += [(one, self._noting(report)) for one in deliveries]
        dice = 1.0 if self._is_kind else self._dice.random()
        if dice < 0.1:
            self._break()
        elif dice < 0.3:
            self._answer()
        else:
            asyncio.get_running_loop().call_soon(self._answer)

    def _noting(self, report: Report) -> Report:
        def note(one: DueDelivery, answer: BrokerAnswer) -> None:
            if answer is not UNSENT:
                self._answers.setdefault(one.entry.seq, []).append(answer)
            report(one, answer)

        return note

    def _answer(self) -> None:
        waiting, self._waiting = self._waiting, []
        shared = BrokerAnswer(Certainty.NOT_STORED, "poison", is_shared=True)
        is_bad = any(one.entry.seq % POISON == 0 for one, _ in waiting)
        for one, report in waiting:
            if is_bad:
                report(one, shared if len(waiting) > 1 else shared.alone())
            elif not self._is_kind and self._dice.random() < 0.05:
                report(one, self._dice.choice((not_stored("no"), unknown("who knows"))))
            else:
                report(one, STORED)
        if not self._is_kind and self._dice.random() < 0.05:
            self.is_blocked = True
            asyncio.get_running_loop().call_later(0.002, self._go_on)

    def _go_on(self) -> None:
        self.is_blocked = False

    def _break(self) -> None:
        self.is_broken = True
        waiting, self._waiting = self._waiting, []
        for one, report in waiting:
            lost = unknown("lost", is_shared=len(waiting) > 1)
            report(one, self._dice.choice((UNSENT, lost)))

    def let_go(self, subscription_id: int) -> None:
        """Nothing."""

    async def close(self) -> None:
        assert not self.is_closed
        self.is_closed = True
        self._break()
        if self._dice.random() < 0.1:
            raise ValueError("the far side is odd")


class DicedOpener:
    def __init__(self, dice: random.Random, is_kind: bool) -> None:
        self._dice = dice
        self._is_kind = is_kind
        self.made: list[DicedOutlet] = []
        self.answers: dict[int, list[BrokerAnswer]] = {}

    def key(self, subscription: Subscription) -> Hashable:
        target = subscription.target
        assert isinstance(target, RedisTarget)
        return target.url

    async def open(self, subscription: Subscription) -> Outlet:
        await asyncio.sleep(0)
        if not self._is_kind and self._dice.random() < 0.1:
            raise OutletError("away")
        self.made.append(DicedOutlet(self._dice, self._is_kind, self.answers))
        return self.made[-1]


def to(number: int, url: str, **more: bool) -> Subscription:
    return subscription(number, type="redis", target=RedisTarget(url, "s"), **more)


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("REOPEN_MIN_S", "BLOCKED_LOOK_S", "ROOM_LOOK_S"):
        monkeypatch.setattr(open_outlets, name, 0.0005)
    monkeypatch.setattr(open_outlets, "REOPEN_MAX_S", 0.002)
    monkeypatch.setattr(outlets, "BLOCKED_LOOK_S", 0.0005)


@pytest.mark.parametrize("is_kind", [True, False])
@pytest.mark.parametrize("seed", range(8))
def test_each_message_is_told_of_once_and_nothing_is_kept(seed: int, is_kind: bool) -> None:
    dice = random.Random(seed)
    told: Counter[int] = Counter()
    results: dict[int, Result] = {}

    def tell(some: list[DueDelivery], result: Result) -> None:
        for one in some:
            told[one.entry.seq] += 1
            results[one.entry.seq] = result

    def check_what_is_told(sink: OutletSink, answers: dict[int, list[BrokerAnswer]]) -> None:
        """If a broker may have a message, from whichever time, no result says that it never
        left; and it is counted as such."""
        may_be_stored = 0
        for seq, result in results.items():
            kept = [one.kept for one in answers.get(seq, [])]
            assert (result == Confirmed()) == (Certainty.STORED in kept)
            if result != Confirmed() and Certainty.UNKNOWN in kept:
                may_be_stored += 1
                assert result == answers[seq][-1].result()
        assert sink.counts.answers[Certainty.UNKNOWN] == may_be_stored

    async def main() -> OutletSink:
        opener = DicedOpener(dice, is_kind)
        sink = OutletSink(opener)
        seq, work = 0, []
        for _ in range(60):
            number = dice.randrange(1, 6)
            to_it = to(number, f"b{number % 2}")
            ones = [delivery(seq + n) for n in range(1, dice.choice((1, 3, 40)) + 1)]
            seq += len(ones)
            work.append(asyncio.create_task(sink.deliver(to_it, ones, always, tell)))
            if dice.random() < 0.5:
                await asyncio.sleep(dice.choice((0, 0.001)))
            if not is_kind and dice.random() < 0.1:
                sink.on_subscription(to(number, f"b{number % 2}", paused=dice.random() < 0.5))
        await asyncio.wait_for(asyncio.gather(*work), 30)
        assert all(not one.shares and not one.shares.used_bytes for one in sink.outlets.all_open())
        check_what_is_told(sink, opener.answers)
        for number in range(1, 6):
            gone = msgspec.structs.replace(to(number, f"b{number % 2}"), deleted=True)
            sink.on_subscription(gone)
        assert sink.outlets.away == 0 and not sink.outlets._used_by and not sink.outlets._opened
        await sink.close()
        assert all(one.is_closed for one in opener.made)
        assert not sink._sending and told == Counter(range(1, seq + 1))
        return sink

    asyncio.run(main())
    kinds = {type(result) for result in results.values()}
    assert kinds <= {Confirmed, Failed, Untried}
    if is_kind:
        # Only what is poison has failed, whatever travelled with it.
        failed = {seq for seq, result in results.items() if result != Confirmed()}
        assert failed == {seq for seq in results if seq % POISON == 0}
