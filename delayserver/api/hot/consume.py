"""The calls of consumers: pull, ack, nack, extend. From request to answer.

    pull   ─▶ ConsumerCalls.pull   ──▶ messages, at once or within `wait` ──▶ answered
              with `ack`: ConsumerCalls.ack_soon before, whose record nobody waits for
    ack    ─▶ ConsumerCalls.ack    ──▶ the dispatch log is synced         ──▶ answered
    nack   ─▶ ConsumerCalls.nack   ──▶ with a delay: its records are durable ──▶ answered
    extend ─▶ ConsumerCalls.extend ──▶ answered

An answer is given through a callback, when it may be: no task and no future waits for it. There are
two ways in, as for publishing (`delayserver.api.hot.publish`). A call that was read and checked is
done by `Grants`, which asks all shards where there are several (`delayserver.shards.consuming`).

Cost: some 50 µs per call, and 1 µs for each message. Threads: belongs to the event loop.
"""

from collections.abc import Callable
from enum import StrEnum
from functools import partial
from typing import NamedTuple, Protocol

from delayserver.api.documents import encode, encode_pulled
from delayserver.api.hot.paths import ConsumerCall
from delayserver.api.intake import Intake
from delayserver.delivery.delayed_fetch import Pulled, PullRequest
from delayserver.errors import AccessError, ConflictError, InputError
from delayserver.records.subscriptions import Subscription
from delayserver.security.tokens import Action, Caller
from delayserver.server.calls import Calls
from delayserver.wire.pulls import (
    AckedDocument,
    ExtendBody,
    ExtendedDocument,
    LeasesBody,
    NackBody,
    NackedDocument,
    PullBody,
)
from delayserver.wire.reading import read

_CONSUME = (Action.CONSUME,)

AnswerCallback = Callable[[bytes | Exception], None]
"""Gets the answer (status 200, JSON), or why there is none."""
Cancel = Callable[[], None]
WHEN_GONE = "when_gone"
"""The key of an ASGI scope for a function: it takes the `Cancel` to call when the client is gone,
or None to take that back. A message of ASGI would report it some turns of the event loop later."""
_Done = type[AckedDocument] | type[NackedDocument] | type[ExtendedDocument]


class ToldExpired(Protocol):
    """Gets the tokens of leases that were over, once the others are done with; or why they are
    not."""

    def __call__(self, expired: list[str], error: Exception | None = None) -> None: ...


class PullCall(NamedTuple):
    """The call of a consumer, checked."""

    max_messages: int
    min_messages: int
    wait_ms: int
    lease_ms: int
    subjects: tuple[str, ...] = ()
    """Patterns of the subjects that it may read; empty: all."""


class Ending(StrEnum):
    """How leases end, or go on."""

    ACK = "ack"
    ACK_SOON = "ack soon"
    NACK = "nack"
    EXTEND = "extend"


class LeaseEnd(NamedTuple):
    """Leases, and their end."""

    ending: Ending
    subscription_id: int
    """The subscription may be deleted."""
    tokens: list[str]
    duration_ms: int = 0
    """After which they are delivered again, or how long they go on."""


class Grants(Protocol):
    """Gives consumers messages, and ends their leases."""

    def wait(
        self,
        subscription: Subscription,
        asked: PullCall,
        leases: list[str] | None,
        tell: AnswerCallback,
    ) -> Cancel:
        """Acknowledge leases, and then have `tell` called once with messages, at once or later.

        Returns the function to call if the consumer is gone before that. Raises StoppingError."""

    def end(self, leased: LeaseEnd, done: ToldExpired) -> None:
        """Have leases end, or go on; `done` is called when all is done. Raises OverloadedError."""


class OwnGrants:
    """`Grants` of one shard for its own messages."""

    def __init__(self, calls: Calls) -> None:
        self._consumers = calls.consumers

    def wait(
        self,
        subscription: Subscription,
        asked: PullCall,
        leases: list[str] | None,
        tell: AnswerCallback,
    ) -> Cancel:
        """See Grants."""
        self._consumers.check_handing_out()
        acked: AckedDocument | None = None
        if leases is not None:
            over = self._consumers.ack_soon(subscription.id, leases)
            acked = AckedDocument(len(leases) - len(over), over)

        def answer(pulled: Pulled) -> None:
            try:
                document: bytes | Exception = encode_pulled(pulled, acked)
            except Exception as error:  # told to whoever asked
                document = error
            tell(document)

        most, least, wait_ms, lease_ms, subjects = asked
        request = PullRequest(most, lease_ms, wait_ms, answer, least, subjects)
        return self._consumers.pull(subscription, request).cancel

    def end(self, leased: LeaseEnd, done: ToldExpired) -> None:
        """See Grants."""
        consumers = self._consumers
        ending, subscription_id, leases, duration_ms = leased
        match ending:
            case Ending.ACK:
                consumers.ack(subscription_id, leases, done)
            case Ending.ACK_SOON:
                done(consumers.ack_soon(subscription_id, leases))
            case Ending.NACK:
                consumers.nack(subscription_id, leases, duration_ms, done)
            case Ending.EXTEND:
                done(consumers.extend(subscription_id, leases, duration_ms))


class Consuming:
    """The calls, apart from how they came in."""

    def __init__(self, calls: Calls, intake: Intake, grants: Grants) -> None:
        self._calls = calls
        self._grants = grants
        self._intake = intake

    def serve(
        self, call: ConsumerCall, data: bytes, caller: Caller | None, told: AnswerCallback
    ) -> Cancel:
        """Serve a call; `told` is called once, before this returns or later.

        Returns the function to call if the client is gone before that."""
        try:
            subscription = self.subscription(call, caller)
            match call.action:
                case "pull":
                    return self._pull(subscription, data, caller, told)
                case "ack":
                    self._ack(subscription, data, told)
                case "nack":
                    self._nack(subscription, data, told)
                case _:
                    self._extend(subscription, data, told)
        except Exception as error:  # told to whoever asked
            told(error)
        return _nothing

    def subscription(self, call: ConsumerCall, caller: Caller | None) -> Subscription:
        """The one that a call is for. Raises NotFoundError, AccessError."""
        subscription = self._calls.subscription(call.subscription)
        if caller is not None:
            caller.require(_CONSUME, subscription.subject)
        return subscription

    def _pull(
        self, subscription: Subscription, data: bytes, caller: Caller | None, told: AnswerCallback
    ) -> Cancel:
        wanted = read(data or b"{}", PullBody)
        lease_ms = int(wanted.lease or subscription.lease_ms)
        if wanted.min_messages > wanted.max:
            raise InputError("min_messages is at most max", "/min_messages")
        if subscription.type != "pull":
            raise ConflictError(f"the subscription {subscription.name!r} is a webhook")

        subjects = () if caller is None else caller.patterns(_CONSUME[0])
        asked = PullCall(wanted.max, wanted.min_messages, int(wanted.wait), lease_ms, subjects)
        tokens, is_told = self._calls.tokens, False

        def tell(answer: bytes | Exception) -> None:
            nonlocal is_told
            is_told = True
            tokens.remove_wait(caller, refuse)
            told(answer)

        def leave() -> None:
            tokens.remove_wait(caller, refuse)
            cancel()

        def refuse() -> None:
            cancel()
            told(AccessError("the pull waited, and its token is not valid any more"))

        cancel = self._grants.wait(subscription, asked, wanted.ack, tell)
        if not is_told:
            tokens.add_wait(caller, refuse)
        return leave

    def _ack(self, subscription: Subscription, data: bytes, told: AnswerCallback) -> None:
        leases = read(data, LeasesBody).leases
        done = partial(_tell, told, AckedDocument, len(leases))
        self._grants.end(LeaseEnd(Ending.ACK, subscription.id, leases), done)

    def _nack(self, subscription: Subscription, data: bytes, told: AnswerCallback) -> None:
        wanted = read(data, NackBody)
        delay_ms = int(wanted.delay)
        self._intake.check_wait(delay_ms, "/delay")
        leases = wanted.leases
        done = partial(_tell, told, NackedDocument, len(leases))
        self._grants.end(LeaseEnd(Ending.NACK, subscription.id, leases, delay_ms), done)

    def _extend(self, subscription: Subscription, data: bytes, told: AnswerCallback) -> None:
        wanted = read(data, ExtendBody)
        leases = wanted.leases
        done = partial(_tell, told, ExtendedDocument, len(leases))
        leased = LeaseEnd(Ending.EXTEND, subscription.id, leases, int(wanted.lease))
        self._grants.end(leased, done)


def _nothing() -> None:
    """The cancel of a call that goes on, even if its client does not wait any more."""


def _tell(
    told: AnswerCallback,
    document: _Done,
    count: int,
    expired: list[str],
    error: Exception | None = None,
) -> None:
    told(encode(document(count - len(expired), expired)) if error is None else error)
