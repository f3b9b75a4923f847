"""An outlet: a client of one broker, and the opener that makes it.

An `OutletOpener` checks the target against the allow list, and makes the client. All else is the
same for all kinds: see `delayserver.delivery.outlets`. Belongs to the event loop.
"""

from collections.abc import Callable, Hashable
from typing import Protocol, TypeVar

from delayserver.delivery.answers import BrokerAnswer
from delayserver.errors import DelayServerError
from delayserver.records.message import DueDelivery
from delayserver.records.subscriptions import Subscription, Target

T = TypeVar("T", bound=Target)
Report = Callable[[DueDelivery, BrokerAnswer], None]
"""On the event loop, once for each message that was sent."""


class OutletError(DelayServerError):
    """A client cannot be opened; the text names the broker and the reason."""


class Outlet(Protocol):
    """A client of one broker."""

    @property
    def window_bytes(self) -> int:
        """How much it may have under way, see `delayserver.delivery.shares`."""

    @property
    def connections(self) -> int:
        """How many it has."""

    @property
    def channels(self) -> int:
        """How many it has on them, where the protocol knows channels."""

    @property
    def is_broken(self) -> bool:
        """Whether nothing can be sent with it any more."""

    @property
    def is_blocked(self) -> bool:
        """Whether the broker has said that it takes nothing now. It says when that is over."""

    def send(
        self, subscription: Subscription, deliveries: list[DueDelivery], report: Report
    ) -> None:
        """Send them. Each is reported, before or behind the return, within the time-out of the
        subscription; if the broker is blocked, when the result is known."""

    def let_go(self, subscription_id: int) -> None:
        """A subscription sends nothing more here: free the resources of it alone."""

    async def close(self) -> None:
        """Let go of everything. Messages that are not confirmed are reported as unknown."""


class OutletOpener(Protocol):
    """Makes the outlets of one kind of broker."""

    def key(self, subscription: Subscription) -> Hashable:
        """Subscriptions with the same key share an outlet."""

    async def open(self, subscription: Subscription) -> Outlet:
        """A client that is connected. Raises InputError where the target is not allowed, and
        OutletError."""


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
