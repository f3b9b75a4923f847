"""Outlets: clients of brokers, and the one sink that all kinds of brokers share.

    deliver ──▶ shares of the outlet (a line for each subscription) ──▶ Outlet.send ──▶ broker
                 │ the outlet is opened at first use               │
      told ◀───── HandedDeliveries.report ◀─── stored, not stored, unknown
                              └─ failed with others: sent again, apart

A kind of broker is a module with an `OutletOpener`: it checks the target against the allow list,
and makes the client. The code here is the same for all. An outlet serves every subscription with
the same `OutletOpener.key`; it is opened once for all who wait for it, replaced when it is broken,
and closed when the last subscription that used it was deleted or goes elsewhere, or when nobody has
used it for IDLE_S. Each message has a result of its own: those that come in one turn of the event
loop are told together.

**Shared, with a share for each.** A message waits here, in the line of its subscription, until its
share of the outlet has room (`delayserver.delivery.shares`). `_send_some` is the one place where a
message leaves for the client library, and `may_begin` is asked there. Until then it has not begun:
if its subscription is paused, changed or deleted, the message is given back untried.

**Apart.** Where an answer may be for the sake of a neighbour (`BrokerAnswer.is_shared`), it is no
attempt. The messages go again over an outlet of their own: halves, then singly, so that after
log2(n) rounds the one that is bad stands alone, and only that one has failed. APART_MAX of these
outlets are there at once, in turn between subscriptions.

**Away.** A broker that cannot be reached is asked again after a pause that grows from 0 to
REOPEN_MAX_S, by those who wait for it. It is said once, then ever more rarely
(`delayserver.delivery.complaints`).

There are at most OUTLETS_MAX for each kind. Where there are so many, one that is idle makes room.
If none is, a delivery waits for ROOM_S, and then has failed and is tried again.

Rejected: a connection for each subscription, whose number no budget of descriptors bounds.

Cost: 2 µs for a message. Threads: belongs to the event loop, whatever an outlet has besides.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Hashable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Protocol, TypeVar

import structlog

from delayserver.delivery.answers import (
    CONFIRMED,
    DUPLICATE,
    UNSENT,
    BrokerAnswer,
    Certainty,
    unknown,
)
from delayserver.delivery.complaints import Complaints
from delayserver.delivery.shares import Shares
from delayserver.delivery.sink import Confirmed, Failed, MayBegin, Result, ResultCallback, Untried
from delayserver.delivery.turns import Turns
from delayserver.errors import DelayServerError, InputError
from delayserver.records.message import DueDelivery
from delayserver.records.subscriptions import Subscription, Target

OUTLETS_MAX: Final = 64
IDLE_S: Final = 300.0
"""After which an outlet that nobody uses is closed."""
SWEEP_S: Final = 30.0
BLOCKED_LOOK_S: Final = 0.1
"""After which a broker that takes nothing now is looked at again."""
REOPEN_MIN_S: Final = 0.1
REOPEN_MAX_S: Final = 2.0
"""Between two openings of an outlet that fails."""
ROOM_S: Final = 5.0
ROOM_LOOK_S: Final = 0.1
APART_MAX: Final = 4
ENDS_AT_ONCE: Final = "the broker ends connections before it has answered anything"

log = structlog.get_logger()

T = TypeVar("T", bound=Target)
Item = TypeVar("Item")
Report = Callable[[DueDelivery, BrokerAnswer], None]
"""On the event loop, once for each message that was sent."""


class OutletError(DelayServerError):
    """A client cannot be opened; the text names the broker and the reason."""


class Outlet(Protocol):
    """A client of one broker."""

    @property
    def window_bytes(self) -> int:
        """How much it may have under way, see `delayserver.delivery.shares`."""
        ...

    @property
    def connections(self) -> int:
        """How many it has."""
        ...

    @property
    def channels(self) -> int:
        """How many it has on them, where the protocol knows channels."""
        ...

    @property
    def is_broken(self) -> bool:
        """Whether nothing can be sent with it any more."""
        ...

    @property
    def is_blocked(self) -> bool:
        """Whether the broker has said that it takes nothing now. It says when that is over."""
        ...

    def send(
        self, subscription: Subscription, deliveries: list[DueDelivery], report: Report
    ) -> None:
        """Send them. Each is reported, before or behind the return, within the time-out of the
        subscription; if the broker is blocked, when the result is known."""
        ...

    def let_go(self, subscription_id: int) -> None:
        """A subscription sends nothing more here: free the resources of it alone."""
        ...

    async def close(self) -> None:
        """Let go of everything. Messages that are not confirmed are reported as unknown."""
        ...


class OutletOpener(Protocol):
    """Makes the outlets of one kind of broker."""

    def key(self, subscription: Subscription) -> Hashable:
        """Subscriptions with the same key share an outlet."""
        ...

    async def open(self, subscription: Subscription) -> Outlet:
        """A client that is connected. Raises InputError where the target is not allowed, and
        OutletError."""
        ...


def target_of(subscription: Subscription, kind: type[T]) -> T:
    """A broker's rules for the messages of a subscription."""
    target = subscription.target
    assert isinstance(target, kind)
    return target


class NoClient:
    """Opens nothing: for a server whose subscriptions need an extra that is not installed."""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def key(self, subscription: Subscription) -> Hashable:
        """See `OutletOpener`."""
        return self._kind

    async def open(self, subscription: Subscription) -> Outlet:
        """See `OutletOpener`."""
        raise OutletError(missing_client(self._kind))


def missing_client(kind: str) -> str:
    """The error, and the way out; the extra is called like the type of the subscription."""
    return (
        f"this server has no client for {kind}: install it with pip install 'delayserver[{kind}]'"
    )


class HandedDeliveries:
    """Deliveries that a sink was given together, and the callback for their results."""

    def __init__(self, count: int, told: ResultCallback) -> None:
        self._left = count
        self._told = told
        self._waiting: list[tuple[DueDelivery, Confirmed | Failed]] = []
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """All were told of; cancelled with the task that waits for it."""

    def tell(self, deliveries: list[DueDelivery], result: Result) -> None:
        """Report the result of some of them, unless the task was cancelled."""
        if self.done.done():
            return
        self._told(deliveries, result)
        self._left -= len(deliveries)
        if not self._left:
            self.done.set_result(None)

    def report(self, delivery: DueDelivery, result: Confirmed | Failed) -> None:
        """The result of one. Those that come in one turn of the event loop are told together."""
        if not self._waiting:
            self.done.get_loop().call_soon(self._tell_waiting)
        self._waiting.append((delivery, result))

    def _tell_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        taken = [delivery for delivery, result in waiting if result is CONFIRMED]
        if taken:
            self.tell(taken, CONFIRMED)
        for delivery, result in waiting:
            if result is not CONFIRMED:
                self.tell([delivery], result)


class _Sending:
    """One call of `deliver`, as long as it goes on."""

    def __init__(
        self, subscription: Subscription, handed: HandedDeliveries, may_begin: MayBegin
    ) -> None:
        self.subscription = subscription
        self.handed = handed
        self.may_begin = may_begin
        self.is_withdrawn = False
        """Nothing of it may begin any more."""
        self.is_alone = False
        """One message goes by an outlet that nothing else uses: no other is the cause."""
        self._open = 0
        self._answered: asyncio.Future[None] | None = None
        self.unsent: list[DueDelivery] = []
        """They have not left yet."""
        self.suspects: list[_Suspect] = []
        """They failed with others, any of which may be the cause."""
        self.groups: deque[list[_Suspect]] = deque()
        """Suspects that go again, each group apart from the others."""

    async def round(self, count: int, send: Callable[[], None]) -> None:
        """Call `send`, and wait until there is an answer for each of so many messages."""
        self._open = count
        self._answered = asyncio.get_running_loop().create_future()
        send()
        if self._open:
            await self._answered

    def on_unsent(self, delivery: DueDelivery) -> None:
        """One of them has not left."""
        if self.is_withdrawn:
            self.handed.tell([delivery], Untried())
        else:
            self.unsent.append(delivery)
        self.count()

    def on_untried(self, delivery: DueDelivery) -> None:
        """One of them may not leave."""
        self.handed.tell([delivery], Untried())
        self.count()

    def count(self) -> None:
        """There is an answer for one of them."""
        self._open -= 1
        if not self._open and self._answered is not None and not self._answered.done():
            self._answered.set_result(None)


_Item = tuple[_Sending, DueDelivery]
_Suspect = tuple[DueDelivery, BrokerAnswer]
"""A message, and the answer that it shares with others."""


@dataclass(eq=False, slots=True)
class _Opened:
    key: Hashable
    opening: asyncio.Task[Outlet]
    users: int = 0
    idle_since_s: float = 0.0
    shares: Shares[_Item] | None = None
    """Once it is open."""
    is_sending: bool = False
    looks_again: asyncio.TimerHandle | None = None
    has_taken: bool = False
    """Some message has left through it."""
    has_answered: bool = False
    """A broker is not known to be well because it can be connected to."""

    @property
    def outlet(self) -> Outlet | None:
        """None: it is not open."""
        opening = self.opening
        is_open = opening.done() and not opening.cancelled() and opening.exception() is None
        return opening.result() if is_open else None

    @property
    def is_broken(self) -> bool:
        if not self.opening.done():
            return False
        outlet = self.outlet
        return outlet is None or outlet.is_broken


@dataclass(slots=True)
class OutletCounts:
    """The counts of a sink, for metrics."""

    answers: dict[Certainty, int] = field(default_factory=lambda: dict.fromkeys(Certainty, 0))
    duplicates: int = 0
    """Messages that brokers had already, from an earlier attempt."""
    apart: int = 0
    """Messages that were sent again apart from those with which they had failed."""


class OutletSink:
    """A `Sink` for one kind of broker."""

    def __init__(self, opener: OutletOpener) -> None:
        self._opener = opener
        self._opened: dict[Hashable, _Opened] = {}
        self._used_by: dict[int, Hashable] = {}
        """By subscription id."""
        self._sending: dict[int, set[_Sending]] = {}
        """By subscription id, none empty."""
        self._changed: dict[int, Subscription] = {}
        """By id those that were changed or deleted in this turn of the event loop."""
        self._leaving: set[_Opened] = set()
        """No sender takes them any more; closed when those that do have done."""
        self._closing: set[asyncio.Task[None]] = set()
        self._sweeper: asyncio.TimerHandle | None = None
        self._failed: dict[Hashable, int] = {}
        """How often an outlet could not be opened, or broke before it had answered; of those that
        some subscription uses."""
        self._away = Complaints()
        self._apart = Turns(APART_MAX)
        self.counts = OutletCounts()

    # ---- gauges ------------------------------------------------------------------------------

    @property
    def connections(self) -> int:
        """Connections to brokers."""
        return sum(one.outlet.connections for one in self._all() if one.outlet is not None)

    @property
    def channels(self) -> int:
        """Channels on them."""
        return sum(one.outlet.channels for one in self._all() if one.outlet is not None)

    @property
    def blocked(self) -> int:
        """Brokers that have said that they take nothing now."""
        outlets = (opened.outlet for opened in self._opened.values())
        return sum(outlet is not None and outlet.is_blocked for outlet in outlets)

    @property
    def away(self) -> int:
        """Brokers that could not be reached when that was tried last."""
        return len(self._away)

    @property
    def waiting(self) -> int:
        """Messages that wait for room in the share of their subscription."""
        return sum(one.shares.waiting for one in self._all() if one.shares is not None)

    @property
    def under_way_bytes(self) -> int:
        """Bytes of messages that clients of brokers have and that are not answered."""
        return sum(one.shares.used_bytes for one in self._all() if one.shares is not None)

    def _all(self) -> list[_Opened]:
        return [*self._opened.values(), *self._leaving]

    # ---- delivering --------------------------------------------------------------------------

    async def deliver(
        self,
        subscription: Subscription,
        deliveries: list[DueDelivery],
        may_begin: MayBegin,
        told: ResultCallback,
    ) -> None:
        """See `Sink`."""
        changed = self._changed.get(subscription.id)
        if changed is not None and changed != subscription:
            # They were handed over before that, and this task begins behind it.
            told(deliveries, Untried())
            return
        handed = HandedDeliveries(len(deliveries), told)
        sending = _Sending(subscription, handed, may_begin)
        sending.unsent = deliveries
        self._sending.setdefault(subscription.id, set()).add(sending)
        try:
            try:
                while sending.unsent:
                    await self._send_shared(sending)
                if sending.suspects:
                    await self._send_apart(sending)
            except (InputError, OutletError) as error:
                reason = error.detail if isinstance(error, InputError) else str(error)
                if sending.unsent:
                    untried = sending.is_withdrawn
                    handed.tell(sending.unsent, Untried() if untried else Failed(reason))
                self._give_up(sending)
            await handed.done
        finally:
            handed.done.cancel()
            of_subscription = self._sending[subscription.id]
            of_subscription.discard(sending)
            if not of_subscription:
                del self._sending[subscription.id]

    async def _send_shared(self, sending: _Sending) -> None:
        """Send with all others what has not left. Raises InputError, OutletError where the outlet
        cannot be opened, or broke before anything had left through it."""
        opened = await self._outlet(sending.subscription)
        opened.users += 1
        try:
            # Shared by all who wait: that one of them is cancelled does not end it.
            outlet = await asyncio.shield(opened.opening)
            if opened.shares is None:
                opened.shares = Shares(outlet.window_bytes)
            shares, subscription_id = opened.shares, sending.subscription.id
            deliveries, sending.unsent = sending.unsent, []

            def send() -> None:
                if sending.is_withdrawn:
                    for delivery in deliveries:
                        sending.on_untried(delivery)
                    return
                for delivery in deliveries:
                    item = sending, delivery
                    shares.add(subscription_id, body_bytes(delivery), item)
                self._send_some(opened, outlet)

            await sending.round(len(deliveries), send)
            if sending.unsent and outlet.is_broken and not opened.has_taken:
                # Else the messages would go from one connection to the next for good.
                raise OutletError(ENDS_AT_ONCE)
        finally:
            opened.users -= 1
            opened.idle_since_s = asyncio.get_running_loop().time()
            if not opened.users and opened in self._leaving:
                self._close_soon(opened)

    def _send_some(self, opened: _Opened, outlet: Outlet) -> None:
        """Let messages leave, as far as there is room for them."""
        shares = opened.shares
        if opened.is_sending or not shares:
            return  # A report within `send`: the loop below goes on.
        opened.is_sending = True
        try:
            while shares and not outlet.is_broken:
                if outlet.is_blocked:
                    self._look_again(opened, outlet)
                    return
                items = shares.take()
                if not items:
                    return
                self._leave_together(opened, outlet, items)
        finally:
            opened.is_sending = False
        if shares and outlet.is_broken:
            for sending, delivery in shares.clear():
                sending.on_unsent(delivery)

    def _leave_together(self, opened: _Opened, outlet: Outlet, items: list[_Item]) -> None:
        """Messages of one subscription leave for the client library."""
        assert opened.shares is not None
        by_sending: dict[_Sending, list[DueDelivery]] = {}
        for sending, delivery in items:
            # This is the moment at which a delivery begins.
            if sending.handed.done.done() or not sending.may_begin([delivery]):
                opened.shares.give_back(sending.subscription.id, body_bytes(delivery))
                sending.on_untried(delivery)
            else:
                by_sending.setdefault(sending, []).append(delivery)
        for sending, deliveries in by_sending.items():
            report = partial(self._on_answer, opened, outlet, sending)
            outlet.send(sending.subscription, deliveries, report)

    def _look_again(self, opened: _Opened, outlet: Outlet) -> None:
        if opened.looks_again is None:

            def look() -> None:
                opened.looks_again = None
                self._send_some(opened, outlet)

            loop = asyncio.get_running_loop()
            opened.looks_again = loop.call_later(BLOCKED_LOOK_S, look)

    def _on_answer(
        self,
        opened: _Opened,
        outlet: Outlet,
        sending: _Sending,
        delivery: DueDelivery,
        answer: BrokerAnswer,
    ) -> None:
        assert opened.shares is not None
        opened.shares.give_back(sending.subscription.id, body_bytes(delivery))
        if answer is UNSENT:
            sending.on_unsent(delivery)
        else:
            opened.has_taken = True
            if not opened.has_answered and answer.kept is not Certainty.UNKNOWN:
                opened.has_answered = True
                self._is_well(opened.key)
            self._on_sent(sending, delivery, answer)
        if opened.shares:
            self._send_some(opened, outlet)

    # ---- apart -------------------------------------------------------------------------------

    async def _send_apart(self, sending: _Sending) -> None:
        """Send messages that failed together in halves, then singly, over an outlet that nothing
        else uses. Raises InputError, OutletError: `sending.groups` are not told of."""
        subscription_id = sending.subscription.id
        groups = sending.groups
        groups += halves(sending.suspects)
        sending.suspects = []
        await self._apart.take(subscription_id)
        outlet: Outlet | None = None
        try:
            while groups:
                if sending.is_withdrawn:
                    self._give_up(sending)
                    break
                if outlet is not None and outlet.is_broken:
                    await _close_quietly(outlet)
                    outlet = None
                if outlet is None:
                    outlet = await self._opener.open(sending.subscription)
                if outlet.is_blocked:
                    await asyncio.sleep(BLOCKED_LOOK_S)
                    continue
                group = self._those_that_may_begin(sending, groups.popleft())
                if not group:
                    continue
                self.counts.apart += len(group)
                sending.is_alone = len(group) == 1
                before = {id(delivery): answer for delivery, answer in group}
                report = partial(self._on_answer_apart, sending, before)
                deliveries = [delivery for delivery, _ in group]
                send = partial(outlet.send, sending.subscription, deliveries, report)
                await sending.round(len(group), send)
                groups.extendleft(reversed(halves(sending.suspects)))
                sending.suspects = []
        finally:
            self._apart.give_back(subscription_id)
            if outlet is not None:
                self._in_background(_close_quietly(outlet))

    def _those_that_may_begin(self, sending: _Sending, group: list[_Suspect]) -> list[_Suspect]:
        may: list[_Suspect] = []
        for delivery, answer in group:
            if sending.may_begin([delivery]):
                may.append((delivery, answer))
            else:
                self._give_back(sending, delivery, answer)
        return may

    def _on_answer_apart(
        self,
        sending: _Sending,
        before: dict[int, BrokerAnswer],
        delivery: DueDelivery,
        answer: BrokerAnswer,
    ) -> None:
        former = before[id(delivery)]
        if answer is UNSENT:
            answer = former  # It has not left this time.
        elif former.kept is Certainty.UNKNOWN and answer.kept is Certainty.NOT_STORED:
            # This time; the broker may have it from the time before.
            answer = unknown(answer.reason, is_shared=answer.is_shared)
        self._on_sent(sending, delivery, answer)

    def _on_sent(self, sending: _Sending, delivery: DueDelivery, answer: BrokerAnswer) -> None:
        if answer.is_shared and not sending.is_alone:
            sending.suspects.append((delivery, answer))
        else:
            self._conclude(sending, delivery, answer)
        sending.count()

    def _conclude(self, sending: _Sending, delivery: DueDelivery, answer: BrokerAnswer) -> None:
        sending.handed.report(delivery, answer.result())
        self.counts.answers[answer.kept] += 1
        self.counts.duplicates += answer is DUPLICATE

    def _give_up(self, sending: _Sending) -> None:
        """Those that have failed with others go apart no more."""
        suspects = [*sending.suspects, *(one for group in sending.groups for one in group)]
        sending.suspects = []
        sending.groups.clear()
        for delivery, answer in suspects:
            if sending.is_withdrawn:
                self._give_back(sending, delivery, answer)
            else:
                self._conclude(sending, delivery, answer)

    def _give_back(self, sending: _Sending, delivery: DueDelivery, answer: BrokerAnswer) -> None:
        """A message that may not leave again. It is untried, unless the broker may have it."""
        if answer.kept is Certainty.UNKNOWN:
            self._conclude(sending, delivery, answer)
        else:
            sending.handed.tell([delivery], Untried())

    # ---- subscriptions come and go -----------------------------------------------------------

    def on_subscription(self, subscription: Subscription) -> None:
        """See `Sink`."""
        self._changed[subscription.id] = subscription
        asyncio.get_running_loop().call_soon(self._forget_change, subscription)
        self._withdraw(subscription.id)
        key = self._used_by.get(subscription.id)
        if key is None or (not subscription.deleted and self._opener.key(subscription) == key):
            return
        del self._used_by[subscription.id]
        opened = self._opened.get(key)
        if key in self._used_by.values():
            if opened is not None and opened.outlet is not None:
                opened.outlet.let_go(subscription.id)
            return
        self._failed.pop(key, None)
        self._away.forget(key)
        if opened is not None:
            self._leave(key)

    def _forget_change(self, subscription: Subscription) -> None:
        """The tasks that were ready when it was changed have begun."""
        if self._changed.get(subscription.id) is subscription:
            del self._changed[subscription.id]

    def _withdraw(self, subscription_id: int) -> None:
        """Give back the deliveries of a subscription that wait: they were handed over before it
        changed."""
        for sending in self._sending.get(subscription_id, ()):
            sending.is_withdrawn = True
        for opened in self._all():
            if opened.shares is not None:
                for sending, delivery in opened.shares.remove(subscription_id):
                    sending.on_untried(delivery)

    async def close(self) -> None:
        """See `Sink`."""
        if self._sweeper is not None:
            self._sweeper.cancel()
        for key in list(self._opened):
            self._leave(key)
        for opened in list(self._leaving):
            self._close_soon(opened)
        while self._closing:
            await asyncio.gather(*self._closing)

    # ---- outlets -----------------------------------------------------------------------------

    async def _outlet(self, subscription: Subscription) -> _Opened:
        """Raises OutletError where there are too many."""
        key = self._opener.key(subscription)
        self._used_by[subscription.id] = key
        opened = self._opened.get(key)
        if opened is not None and opened.is_broken:
            if opened.outlet is not None and not opened.has_answered:
                self._is_bad(key, subscription, ENDS_AT_ONCE)
            self._leave(key)
            opened = None
        if opened is None and not self._has_room():
            await self._wait_for_room()
            opened = self._opened.get(key)
        if opened is None:
            loop = asyncio.get_running_loop()
            opened = _Opened(key, loop.create_task(self._open(key, subscription)))
            self._opened[key] = opened
            if self._sweeper is None:
                self._sweeper = loop.call_later(SWEEP_S, self._sweep)
        return opened

    async def _open(self, key: Hashable, subscription: Subscription) -> Outlet:
        failed = self._failed.get(key, 0)
        if failed:
            await asyncio.sleep(min(REOPEN_MIN_S * 2 ** min(failed - 1, 10), REOPEN_MAX_S))
        try:
            return await self._opener.open(subscription)
        except (InputError, OutletError) as error:
            reason = error.detail if isinstance(error, InputError) else str(error)
            self._is_bad(key, subscription, reason)
            raise

    def _is_bad(self, key: Hashable, subscription: Subscription, reason: str) -> None:
        subscriptions = sum(one == key for one in self._used_by.values())
        if not subscriptions:
            return  # The last one went while the outlet was opened.
        self._failed[key] = self._failed.get(key, 0) + 1
        said = self._away.wrong(key, reason)
        if said is not None:
            log.error(
                "a broker takes nothing",
                error=reason,
                times=said.total,
                subscription=subscription.name,
                subscriptions=subscriptions,
            )

    def _is_well(self, key: Hashable) -> None:
        self._failed.pop(key, None)
        over = self._away.right(key)
        if over is not None:
            log.info("a broker takes messages again", error=over.words, times=over.total)

    def _has_room(self) -> bool:
        if len(self._opened) < OUTLETS_MAX:
            return True
        idle = [(one.idle_since_s, key) for key, one in self._opened.items() if not one.users]
        if not idle:
            return False
        self._leave(min(idle, key=lambda one: one[0])[1])
        return True

    async def _wait_for_room(self) -> None:
        """Brokers that hang let go of their places as their messages time out."""
        for _ in range(int(ROOM_S / ROOM_LOOK_S)):
            await asyncio.sleep(ROOM_LOOK_S)
            if self._has_room():
                return
        raise OutletError(f"{OUTLETS_MAX} brokers are in use already, the most of one kind")

    def _leave(self, key: Hashable) -> None:
        opened = self._opened.pop(key)
        self._leaving.add(opened)
        if not opened.users or opened.is_broken:
            self._close_soon(opened)

    def _close_soon(self, opened: _Opened) -> None:
        self._leaving.discard(opened)
        if opened.looks_again is not None:
            opened.looks_again.cancel()
        if opened.shares is not None:
            # Those who wait look for another outlet.
            for sending, delivery in opened.shares.clear():
                sending.on_unsent(delivery)
        self._in_background(self._close(opened.opening))

    async def _close(self, opening: asyncio.Task[Outlet]) -> None:
        # No delivery waits for it any more. Those that did were told why it could not be opened.
        if not opening.done():
            opening.cancel()
        with suppress(InputError, OutletError, asyncio.CancelledError):
            await _close_quietly(await opening)

    def _in_background(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    def _sweep(self) -> None:
        loop = asyncio.get_running_loop()
        now_s = loop.time()
        for key, opened in list(self._opened.items()):
            is_idle = not opened.users and now_s - opened.idle_since_s >= IDLE_S
            if is_idle or opened.is_broken:
                self._leave(key)
        self._sweeper = loop.call_later(SWEEP_S, self._sweep) if self._opened else None


async def _close_quietly(outlet: Outlet) -> None:
    """Close it. A client library may raise whatever it likes about an odd far side; that is logged,
    and ends nothing else."""
    try:
        await outlet.close()
    except Exception as error:
        log.warning("a connection to a broker was not closed", error=repr(error))


def body_bytes(delivery: DueDelivery) -> int:
    """Bytes of a message as it was published: body, headers and key."""
    payload = delivery.payload
    size = len(payload.body) + len(payload.key or "")
    if payload.headers:
        size += sum(len(name) + len(text) for name, text in payload.headers.items())
    return size


def halves(group: list[Item]) -> list[list[Item]]:
    """The two halves of a group, without those that are empty."""
    middle = (len(group) + 1) // 2
    return [part for part in (group[:middle], group[middle:]) if part]
