"""The outlets that are open: each is opened once for all who wait for it, and shared by them.

An outlet serves every subscription with the same `OutletOpener.key`. It is replaced when it is
broken, and closed when the last subscription that used it was deleted or goes elsewhere, or when
nobody has used it for IDLE_S.

**Shared, with a share for each.** A message waits in the line of its subscription, until its share
of the outlet has room (`delayserver.delivery.shares`). `SharedOutlet._send_some` is the one place
where a message leaves for the client library, and `may_begin` is asked there. Until then it has not
begun: if its subscription is paused, changed or deleted, the message is given back untried.

**Away.** A broker that cannot be reached is asked again after a pause that grows from 0 to
REOPEN_MAX_S, by those who wait for it. It is said once, then ever more rarely
(`delayserver.delivery.complaints`).

There are at most OUTLETS_MAX for each kind. Where there are so many, one that is idle makes room.
If none is, a delivery waits for ROOM_S, and then has failed and is tried again.

Rejected: a connection for each subscription, whose number no budget of descriptors bounds.

Cost: 1 µs for a message. Belongs to the event loop.
"""

import asyncio
from collections.abc import Callable, Coroutine, Hashable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Final

import structlog

from delayserver.delivery.answers import UNSENT, BrokerAnswer, Certainty
from delayserver.delivery.complaints import Complaints
from delayserver.delivery.outlet import Outlet, OutletError, OutletOpener
from delayserver.delivery.sending import Sending
from delayserver.delivery.shares import Shares
from delayserver.errors import InputError
from delayserver.records.message import DueDelivery
from delayserver.records.subscriptions import Subscription

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
ENDS_AT_ONCE: Final = "the broker ends connections before it has answered anything"

log = structlog.get_logger()


class SharedOutlet:
    """An outlet that is open, and the messages that wait for their share of it."""

    def __init__(self, outlet: Outlet, on_well: Callable[[], None]) -> None:
        """`on_well`: called once, when the broker has answered."""
        self.outlet = outlet
        self.shares: Shares[tuple[Sending, DueDelivery]] = Shares(outlet.window_bytes)
        self._on_well = on_well
        self._is_sending = False
        self._looks_again: asyncio.TimerHandle | None = None
        self.has_taken = False
        """Some message has left through it."""
        self.has_answered = False
        """A broker is not known to be well because it can be connected to."""

    def send(self, sending: Sending, deliveries: list[DueDelivery]) -> None:
        """Send them with all others, each when there is room for it."""
        if sending.is_withdrawn:
            for delivery in deliveries:
                sending.on_untried(delivery)
            return
        for delivery in deliveries:
            self.shares.add(sending.subscription.id, body_bytes(delivery), (sending, delivery))
        self._send_some()

    def _send_some(self) -> None:
        """Let messages leave, as far as there is room for them."""
        shares = self.shares
        if self._is_sending or not shares:
            return  # A report within `send`: the loop below goes on.
        outlet = self.outlet
        self._is_sending = True
        try:
            while shares and not outlet.is_broken:
                if outlet.is_blocked:
                    self._look_again()
                    return
                items = shares.take()
                if not items:
                    return
                self._leave_together(items)
        finally:
            self._is_sending = False
        if shares and outlet.is_broken:
            self._clear()

    def _leave_together(self, items: list[tuple[Sending, DueDelivery]]) -> None:
        """Messages of one subscription leave for the client library."""
        by_sending: dict[Sending, list[DueDelivery]] = {}
        for sending, delivery in items:
            # This is the moment at which a delivery begins.
            if sending.handed.done.done() or not sending.may_begin([delivery]):
                self.shares.give_back(sending.subscription.id, body_bytes(delivery))
                sending.on_untried(delivery)
            else:
                by_sending.setdefault(sending, []).append(delivery)
        for sending, deliveries in by_sending.items():
            self.outlet.send(sending.subscription, deliveries, partial(self._on_answer, sending))

    def _look_again(self) -> None:
        if self._looks_again is None:

            def look() -> None:
                self._looks_again = None
                self._send_some()

            loop = asyncio.get_running_loop()
            self._looks_again = loop.call_later(BLOCKED_LOOK_S, look)

    def _on_answer(self, sending: Sending, delivery: DueDelivery, answer: BrokerAnswer) -> None:
        self.shares.give_back(sending.subscription.id, body_bytes(delivery))
        if answer is UNSENT:
            sending.on_unsent(delivery)
        else:
            self.has_taken = True
            if not self.has_answered and answer.kept is not Certainty.UNKNOWN:
                self.has_answered = True
                self._on_well()
            sending.on_answer(delivery, answer)
        if self.shares:
            self._send_some()

    def stop(self) -> None:
        """Nothing more leaves: those who wait look for another outlet."""
        if self._looks_again is not None:
            self._looks_again.cancel()
        self._clear()

    def _clear(self) -> None:
        for sending, delivery in self.shares.clear():
            sending.on_unsent(delivery)


@dataclass(eq=False, slots=True)
class _OpenedOutlet:
    opening: asyncio.Task[SharedOutlet]
    users: int = 0
    idle_since_s: float = 0.0

    @property
    def shared(self) -> SharedOutlet | None:
        """None: it is not open."""
        opening = self.opening
        is_open = opening.done() and not opening.cancelled() and opening.exception() is None
        return opening.result() if is_open else None

    @property
    def is_broken(self) -> bool:
        if not self.opening.done():
            return False
        shared = self.shared
        return shared is None or shared.outlet.is_broken


class OpenOutlets:
    """The outlets of one kind of broker."""

    def __init__(self, opener: OutletOpener) -> None:
        self._opener = opener
        self._opened: dict[Hashable, _OpenedOutlet] = {}
        self._used_by: dict[int, Hashable] = {}
        """By subscription id."""
        self._leaving: set[_OpenedOutlet] = set()
        """No sender takes them any more; closed when those that do have done."""
        self._closing: set[asyncio.Task[None]] = set()
        self._sweeper: asyncio.TimerHandle | None = None
        self._failed: dict[Hashable, int] = {}
        """How often an outlet could not be opened, or broke before it had answered; of those that
        some subscription uses."""
        self._away = Complaints()

    def all_open(self) -> list[SharedOutlet]:
        """All that can be sent to, or that have messages under way."""
        opened = (one.shared for one in (*self._opened.values(), *self._leaving))
        return [shared for shared in opened if shared is not None]

    @property
    def away(self) -> int:
        """Brokers that could not be reached when that was tried last."""
        return len(self._away)

    async def send(self, sending: Sending) -> None:
        """Send with all others the messages that have not left. Raises InputError, OutletError
        where the outlet cannot be opened, or broke before anything had left through it."""
        opened = await self._outlet(sending.subscription)
        opened.users += 1
        try:
            # Shared by all who wait: that one of them is cancelled does not end it.
            shared = await asyncio.shield(opened.opening)
            deliveries, sending.unsent = sending.unsent, []
            await sending.round(len(deliveries), partial(shared.send, sending, deliveries))
            if sending.unsent and shared.outlet.is_broken and not shared.has_taken:
                # Else the messages would go from one connection to the next for good.
                raise OutletError(ENDS_AT_ONCE)
        finally:
            opened.users -= 1
            opened.idle_since_s = asyncio.get_running_loop().time()
            if not opened.users and opened in self._leaving:
                self._close_soon(opened)

    def on_subscription(self, subscription: Subscription) -> None:
        """A subscription was changed or deleted: its messages that wait were handed over before."""
        for shared in self.all_open():
            for sending, delivery in shared.shares.remove(subscription.id):
                sending.on_untried(delivery)
        key = self._used_by.get(subscription.id)
        if key is None or (not subscription.deleted and self._opener.key(subscription) == key):
            return
        del self._used_by[subscription.id]
        opened = self._opened.get(key)
        if key in self._used_by.values():
            if opened is not None and opened.shared is not None:
                opened.shared.outlet.let_go(subscription.id)
            return
        self._failed.pop(key, None)
        self._away.forget(key)
        if opened is not None:
            self._leave(key)

    async def close(self) -> None:
        """Close all, and wait for those that are being closed."""
        if self._sweeper is not None:
            self._sweeper.cancel()
        for key in list(self._opened):
            self._leave(key)
        for opened in list(self._leaving):
            self._close_soon(opened)
        while self._closing:
            await asyncio.gather(*self._closing)

    async def _outlet(self, subscription: Subscription) -> _OpenedOutlet:
        """Raises OutletError where there are too many."""
        key = self._opener.key(subscription)
        self._used_by[subscription.id] = key
        opened = self._opened.get(key)
        if opened is not None and opened.is_broken:
            if opened.shared is not None and not opened.shared.has_answered:
                self._is_bad(key, subscription, ENDS_AT_ONCE)
            self._leave(key)
            opened = None
        if opened is None and not self._has_room():
            await self._wait_for_room()
            opened = self._opened.get(key)
        if opened is None:
            loop = asyncio.get_running_loop()
            opened = _OpenedOutlet(loop.create_task(self._open(key, subscription)))
            self._opened[key] = opened
            if self._sweeper is None:
                self._sweeper = loop.call_later(SWEEP_S, self._sweep)
        return opened

    async def _open(self, key: Hashable, subscription: Subscription) -> SharedOutlet:
        failed = self._failed.get(key, 0)
        if failed:
            await asyncio.sleep(min(REOPEN_MIN_S * 2 ** min(failed - 1, 10), REOPEN_MAX_S))
        try:
            outlet = await self._opener.open(subscription)
        except (InputError, OutletError) as error:
            self._is_bad(key, subscription, str(error))
            raise
        return SharedOutlet(outlet, partial(self._is_well, key))

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

    def _close_soon(self, opened: _OpenedOutlet) -> None:
        self._leaving.discard(opened)
        if opened.shared is not None:
            opened.shared.stop()
        self.in_background(self._close(opened.opening))

    async def _close(self, opening: asyncio.Task[SharedOutlet]) -> None:
        # No delivery waits for it any more. Those that did were told why it could not be opened.
        if not opening.done():
            opening.cancel()
        with suppress(InputError, OutletError, asyncio.CancelledError):
            await close_quietly((await opening).outlet)

    def in_background(self, work: Coroutine[None, None, None]) -> None:
        """Close an outlet, shared or not; `close` waits for that, too."""
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


async def close_quietly(outlet: Outlet) -> None:
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
