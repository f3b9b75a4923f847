"""Outlets: clients of brokers, and the one sink that all kinds of brokers share.

    deliver ──▶ outlet of the subscription's broker ──▶ Outlet.send ──▶ broker
                 │ opened at first use, by an OutletOpener         │
      told ◀─────┴───── Handed.report ◀───── confirmed, or why not

A kind of broker is a module with an `OutletOpener`: it checks the target against the allow list,
and makes the client. What is here is the same for all. An outlet serves every subscription with the
same `OutletOpener.key`; it is opened once for all who wait for it, replaced when it is broken, and
closed when the last subscription that used it was deleted or goes elsewhere, or when nobody has
used it for IDLE_S. Each message has a result of its own: those that come in one turn of the event
loop are told together.

There are at most OUTLETS_MAX for each kind. Where there are so many, one that is idle makes room,
and if none is, the delivery has failed and is tried again.

Rejected: a connection for each subscription, whose number no budget of descriptors bounds.

Cost: 2 µs for a message. Threads: belongs to the event loop, whatever an outlet has besides.
"""

import asyncio
from collections.abc import Callable, Hashable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, Protocol, TypeVar

import structlog

from delayserver.delivery.sink import Confirmed, Failed, MayBegin, Result, Told, Untried
from delayserver.errors import DelayServerError, InputError
from delayserver.records.message import DueDelivery
from delayserver.records.subscriptions import Subscription, Target

OUTLETS_MAX: Final = 64
IDLE_S: Final = 300.0
"""After which an outlet that nobody uses is closed."""
SWEEP_S: Final = 30.0

log = structlog.get_logger()

T = TypeVar("T", bound=Target)
Report = Callable[[DueDelivery, str | None], None]
"""On the event loop, once for each: None where the broker has it, else why it is not known to."""


class OutletError(DelayServerError):
    """A client cannot be opened; says of what, and why."""


class Outlet(Protocol):
    """A client of one broker."""

    @property
    def is_broken(self) -> bool:
        """Whether nothing can be sent with it any more."""
        ...

    async def send(
        self, subscription: Subscription, deliveries: list[DueDelivery], report: Report
    ) -> None:
        """Send them, as soon as there is room for them. Each is reported, before or behind the
        return, within the time-out of the subscription once it was sent."""
        ...

    async def close(self) -> None:
        """Let go of everything. What is not confirmed is reported as failed."""
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
    """What a broker of that kind does with the messages of a subscription."""
    target = subscription.target
    assert isinstance(target, kind)
    return target


class NoClient:
    """Opens nothing: what a server has whose subscriptions need an extra that is not installed."""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def key(self, subscription: Subscription) -> Hashable:
        """See `OutletOpener`."""
        return self._kind

    async def open(self, subscription: Subscription) -> Outlet:
        """See `OutletOpener`."""
        raise OutletError(missing_client(self._kind))


def missing_client(kind: str) -> str:
    """What is wrong, and what to do; the extra is called like the type of the subscription."""
    return (
        f"this server has no client for {kind}: install it with pip install 'delayserver[{kind}]'"
    )


class Handed:
    """What was given to a sink together, and who is told of it."""

    def __init__(self, count: int, told: Told) -> None:
        self._left = count
        self._told = told
        self._waiting: list[tuple[DueDelivery, str | None]] = []
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """All were told of; cancelled with the task that waits for it."""

    def tell(self, deliveries: list[DueDelivery], result: Result) -> None:
        """What came of some of them; of nobody's business once the task was cancelled."""
        if self.done.done():
            return
        self._told(deliveries, result)
        self._left -= len(deliveries)
        if not self._left:
            self.done.set_result(None)

    def report(self, delivery: DueDelivery, failure: str | None) -> None:
        """What came of one. See `Report`."""
        if not self._waiting:
            self.done.get_loop().call_soon(self._tell_waiting)
        self._waiting.append((delivery, failure))

    def _tell_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        taken = [delivery for delivery, failure in waiting if failure is None]
        if taken:
            self.tell(taken, Confirmed())
        for delivery, failure in waiting:
            if failure is not None:
                self.tell([delivery], Failed(failure))


@dataclass(eq=False, slots=True)
class _Opened:
    opening: asyncio.Task[Outlet]
    users: int = 0
    idle_since_s: float = 0.0

    @property
    def is_broken(self) -> bool:
        if not self.opening.done():
            return False
        is_failed = self.opening.cancelled() or self.opening.exception() is not None
        return is_failed or self.opening.result().is_broken


class OutletSink:
    """A `Sink` for one kind of broker."""

    def __init__(self, opener: OutletOpener) -> None:
        self._opener = opener
        self._opened: dict[Hashable, _Opened] = {}
        self._used_by: dict[int, Hashable] = {}
        """By subscription id."""
        self._leaving: set[_Opened] = set()
        """Nobody is to use them any more; closed when those who do have done."""
        self._closing: set[asyncio.Task[None]] = set()
        self._sweeper: asyncio.TimerHandle | None = None

    async def deliver(
        self,
        subscription: Subscription,
        deliveries: list[DueDelivery],
        may_begin: MayBegin,
        told: Told,
    ) -> None:
        """See `Sink`."""
        handed = Handed(len(deliveries), told)
        try:
            opened = self._outlet(subscription)
            opened.users += 1
        except OutletError as error:
            handed.tell(deliveries, Failed(str(error)))
            return
        try:
            # Shared by all who wait: that one of them is cancelled does not end it.
            outlet = await asyncio.shield(opened.opening)
            if not may_begin(deliveries):
                handed.tell(deliveries, Untried())
                return
            await outlet.send(subscription, deliveries, handed.report)
            await handed.done
        except InputError as error:
            handed.tell(deliveries, Failed(error.detail))
        except OutletError as error:
            handed.tell(deliveries, Failed(str(error)))
        finally:
            handed.done.cancel()
            opened.users -= 1
            opened.idle_since_s = asyncio.get_running_loop().time()
            if not opened.users and opened in self._leaving:
                self._close_soon(opened)

    def on_subscription(self, subscription: Subscription) -> None:
        """See `Sink`."""
        key = self._used_by.get(subscription.id)
        if key is None or (not subscription.deleted and self._opener.key(subscription) == key):
            return
        del self._used_by[subscription.id]
        if key in self._opened and key not in self._used_by.values():
            self._leave(key)

    async def close(self) -> None:
        """See `Sink`."""
        if self._sweeper is not None:
            self._sweeper.cancel()
        for key in list(self._opened):
            self._leave(key)
        for opened in list(self._leaving):
            self._close_soon(opened)
        await asyncio.gather(*self._closing)

    # Outlets

    def _outlet(self, subscription: Subscription) -> _Opened:
        """Raises OutletError where there are too many."""
        key = self._opener.key(subscription)
        self._used_by[subscription.id] = key
        opened = self._opened.get(key)
        if opened is not None and opened.is_broken:
            self._leave(key)
            opened = None
        if opened is None:
            self._make_room()
            loop = asyncio.get_running_loop()
            opened = _Opened(loop.create_task(self._opener.open(subscription)))
            self._opened[key] = opened
            if self._sweeper is None:
                self._sweeper = loop.call_later(SWEEP_S, self._sweep)
        return opened

    def _make_room(self) -> None:
        if len(self._opened) < OUTLETS_MAX:
            return
        idle = [(one.idle_since_s, key) for key, one in self._opened.items() if not one.users]
        if not idle:
            raise OutletError(f"{OUTLETS_MAX} brokers are in use already, the most of one kind")
        self._leave(min(idle, key=lambda one: one[0])[1])

    def _leave(self, key: Hashable) -> None:
        opened = self._opened.pop(key)
        self._leaving.add(opened)
        if not opened.users or opened.is_broken:
            self._close_soon(opened)

    def _close_soon(self, opened: _Opened) -> None:
        self._leaving.discard(opened)
        task = asyncio.get_running_loop().create_task(self._close(opened.opening))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def _close(self, opening: asyncio.Task[Outlet]) -> None:
        # Why it could not be opened was told to those who waited for it.
        with suppress(InputError, OutletError):
            await (await opening).close()

    def _sweep(self) -> None:
        loop = asyncio.get_running_loop()
        now_s = loop.time()
        for key, opened in list(self._opened.items()):
            is_idle = not opened.users and now_s - opened.idle_since_s >= IDLE_S
            if is_idle or opened.is_broken:
                self._leave(key)
        self._sweeper = loop.call_later(SWEEP_S, self._sweep) if self._opened else None
