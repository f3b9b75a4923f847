"""Subscriptions: who gets which messages.

A subscription's subject is exact, or a prefix that ends in `.*` (any depth), or `*`. A definition
keeps the subjects that the subscription had, and since when (`SubjectSpan`). The rule of who gets a
message is a function of these histories and of the message (`records.receivers`), so it gives the
same answer after a restart, and whatever the clock shows then (`horizon`). Here are its candidates.

A subscription that is not understood here (`records.understanding`) is a `StandIn`: it matches as
far as its subject can be read, and everything where it cannot, so that its messages wait for it and
none is lost; and it is paused, whatever it says.

Cost: a look-up is some dictionary accesses, however many subscriptions there are, and a change
touches its own pattern alone (`subject_index`). Threads: changed on the event loop only; `snapshot`
is immutable and may be read anywhere.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, Literal, NamedTuple

import msgspec

from delayserver.errors import InputError
from delayserver.records.direct import DIRECT_COUNT, DIRECT_FIRST_ID, DIRECT_NAME, is_direct
from delayserver.records.horizon import Mark
from delayserver.records.message import Payload, check_headers, header_pointer
from delayserver.records.subject_index import SubjectIndex
from delayserver.records.subjects import is_pattern, matches, patterns_of
from delayserver.records.tracecontext import TRACE_NAMES
from delayserver.records.understanding import Understanding, parts_of
from delayserver.wire.fields import ATTEMPTS_MAX, MASK, BackoffMs
from delayserver.wire.subscriptions import SubscriptionType
from storage.rows import SEQ_MAX

RETRY_DELAY_MS_MAX: Final = BackoffMs.most_ms
"""Neither growth nor a receiver's `Retry-After` makes a retry wait longer (before jitter)."""
HEADERS_BYTES_MAX: Final = 8 * 1024
"""Their names and values, all together."""
GONE: Final = "gone"
"""Why the server has paused a subscription: its receiver answered 410."""
FAILURES: Final = "failures"
"""Likewise: nothing but failures for as long as it said (`disable_after`)."""
NOT_UNDERSTOOD: Final = "not_understood"
"""Likewise: this server does not understand it."""
SCHEDULES_REMEMBERED: Final = 1_000
"""Retry schedules: each answer of a receiver asks for one."""
_SET_BY_SERVER = frozenset(("user-agent", *TRACE_NAMES))


@dataclass(frozen=True, slots=True)
class RetrySchedule:
    """When to try again, within the limits of `delayserver.wire`.

    Attempt n+1 follows attempt n after `backoff_ms[n-1]`; where the list ends, its last delay is
    doubled from one attempt to the next. The default spreads ten attempts over 31 hours."""

    max_attempts: int = 10
    backoff_ms: tuple[int, ...] = (5_000, 30_000, 120_000, 600_000, 3_600_000)

    def __post_init__(self) -> None:
        assert 1 <= self.max_attempts <= ATTEMPTS_MAX, self.max_attempts
        assert 1 <= len(self.backoff_ms) <= ATTEMPTS_MAX, len(self.backoff_ms)
        assert all(1 <= one <= RETRY_DELAY_MS_MAX for one in self.backoff_ms), self.backoff_ms

    @staticmethod
    @lru_cache(maxsize=SCHEDULES_REMEMBERED)
    def within_limits(max_attempts: int, backoff_ms: tuple[int, ...]) -> "RetrySchedule":
        """A schedule that was accepted once, cut to the limits of today. Empty `backoff_ms`: the
        default delays."""
        max_attempts = min(max(1, max_attempts), ATTEMPTS_MAX)
        if not backoff_ms:
            return RetrySchedule(max_attempts)
        delays_ms = (min(max(1, one), RETRY_DELAY_MS_MAX) for one in backoff_ms)
        return RetrySchedule(max_attempts, tuple(delays_ms)[:ATTEMPTS_MAX])

    def delay_ms(self, attempt: int) -> int:
        """The wait between this attempt and the next, before jitter."""
        beyond = attempt - len(self.backoff_ms)
        if beyond <= 0:
            return self.backoff_ms[attempt - 1]
        # 2**27 ms is more than a day, so no list needs more doublings than that.
        return min(self.backoff_ms[-1] << min(beyond, 27), BackoffMs.most_ms)


class KafkaTarget(
    msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True, tag="kafka"
):
    """A topic that messages go to. Each kind of broker has a struct with a tag of its own, which is
    the type of its subscriptions."""

    bootstrap: str
    """Brokers to begin with, `host:port` with commas between them."""
    topic: str
    key: str = "{key}"
    """The key of a record: that of the message, its `{subject}` or `{id}`, or this text."""
    exactly_once: bool = False
    """Whether a record and that it is settled are one transaction."""
    username: str = ""
    """Whom the brokers let in (SASL); empty: anybody."""
    password: str = ""
    mechanism: str = "PLAIN"
    tls: bool = False


class RedisTarget(
    msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True, tag="redis"
):
    """A stream that messages are added to."""

    url: str
    """`redis://` or `rediss://`; may hold a password."""
    stream: str
    """Its key."""
    max_length: int = 0
    """About how many entries it keeps; 0: all."""


class NatsTarget(
    msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True, tag="nats"
):
    """A subject of NATS, which a stream of JetStream stores."""

    url: str
    """`nats://` or `tls://`; may hold a password or a token."""
    subject: str = "{subject}"
    """May hold the `{subject}`, `{key}` and `{id}` of a message."""


class AmqpTarget(
    msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True, tag="amqp"
):
    """An exchange of RabbitMQ."""

    url: str
    """`amqp://` or `amqps://`; may hold a password."""
    exchange: str
    """Empty: the default exchange, whose routing keys are names of queues."""
    routing_key: str = "{subject}"
    """May hold the `{subject}`, `{key}` and `{id}` of a message."""


Target = KafkaTarget | RedisTarget | NatsTarget | AmqpTarget
"""What a broker does with messages."""


SPANS_MAX: Final = 100
"""Subjects that a subscription may have while messages of the first one are still kept."""


class SubjectSpan(NamedTuple):
    """A subject that a subscription had, until the next span began."""

    subject: str
    """Empty: it was deleted."""
    since_seq: int
    """The record that brought it, in the log of this shard; 0: not known, it is of a version that
    did not keep that."""
    marks: tuple[Mark, ...]
    """Rows that had fallen due by then, and so are of the time before."""


class Subscription(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """A definition as it stands in the log and in the catalog (MessagePack)."""

    id: int
    name: str
    subject: str
    type: SubscriptionType
    created_ms: int
    url: str = ""
    """Webhook: where to POST."""
    secrets: tuple[str, ...] = ()
    timeout_ms: int = 15_000
    max_in_flight: int = 64
    max_attempts: int = 10
    backoff_ms: tuple[int, ...] = ()
    """Empty: the default delays of RetrySchedule."""
    lease_ms: int = 30_000
    rate_per_s: float = 0.0
    """Not pull: messages a second, with `rate_burst` at once; 0: no limit."""
    rate_burst: int = 0
    batch_max: int = 0
    """Webhook: messages in one request, as an array; 0: one each, as it was published."""
    linger_ms: int = 0
    """How long after it fell due a message waits for others to fill a batch."""
    spread_ms: int = 0
    """Messages that fell due during downtime or a pause are handed out over so long; 0: at once."""
    drop_older_than_ms: int = 0
    """A message that is not handed out within this time is a dead letter; 0: it never is."""
    paused: bool = False
    deleted: bool = False
    subject_since_ms: int = 0
    """A version that kept no history has changed its subject: when, and nothing due since had
    fallen due. 0: none has. Before that it had a subject that is not known."""
    horizon: tuple[Mark, ...] = ()
    """Where there is no history, what had fallen due when it was made; empty: all that was due
    before `created_ms`."""
    target: Target | None = None
    """Where messages go, for types that are named like its tag."""
    headers: dict[str, str] = {}
    """Webhook: sent along with each request, by names in lower case; secrets, as a rule."""
    method: Literal["POST", "PUT"] = "POST"
    disable_after_ms: int = 0
    """Webhook: after so long of nothing but failures the server pauses it; 0: never."""
    pause_reason: str = ""
    """Why the server has paused it: GONE, FAILURES; empty: somebody asked, or it is not paused."""
    failing_since_ms: int = 0
    """Since when there were nothing but failures, if that has lasted; 0: it has not."""
    history: tuple[SubjectSpan, ...] = ()
    """The subjects that it had, the newest last, as far as messages of that time are kept; empty:
    a version that kept none has made it. See `spans`."""

    @property
    def spans(self) -> tuple[SubjectSpan, ...]:
        """Which subject it had since when, the newest last; at least one."""
        if self.history:
            return self.history
        marks = self.horizon or (Mark(SEQ_MAX, self.created_ms),)
        return (SubjectSpan(self.subject, 0, marks),)

    @property
    def has_left(self) -> bool:
        """Whether it was deleted, and its history says when."""
        return bool(self.history) and not self.history[-1].subject

    @property
    def unchanged_since_ms(self) -> int:
        """Whatever is due at this moment or later fell due when it had the subject of now."""
        marks = self.history[-1].marks if self.history else self.spans[0].marks
        return marks[0].before_ms if marks else 0  # Each later mark has an earlier time.

    @property
    def is_pushed(self) -> bool:
        """Whether a sink delivers its messages, and no consumer asks for them."""
        return self.type != "pull"

    @property
    def takes_many(self) -> bool:
        """Whether what leaves its queue together goes to its sink together, and yet each message
        has a result of its own."""
        return self.target is not None

    @property
    def is_exactly_once(self) -> bool:
        """Whether what it is delivered is settled in the same transaction."""
        return isinstance(self.target, KafkaTarget) and self.target.exactly_once

    @property
    def retry_schedule(self) -> RetrySchedule:
        """When to try again, and how often."""
        return RetrySchedule.within_limits(self.max_attempts, self.backoff_ms)

    def matches(self, subject: str) -> bool:
        """Whether the subject of now is for messages of that subject. The receivers of a message
        are another question: see `records.receivers`."""
        return matches(self.subject, subject)

    @property
    def asked_pause(self) -> tuple[bool, str]:
        """Whether it is paused as it is stored, and why the server did it (`pause_reason`)."""
        return self.paused, self.pause_reason

    def stays_paused(self, url: str) -> bool:
        """Whether its pause outlives a new definition, with this URL. A PUT repairs a subscription
        that failed or was not understood, and a new URL one whose receiver was gone; a pause that a
        client asked for ends with `resume`."""
        is_paused, reason = self.asked_pause
        is_repaired = reason == FAILURES or (reason == GONE and url != self.url)
        return is_paused and not is_repaired

    def with_changes(self, **changes: Any) -> "Subscription":
        """The same with other values of some fields."""
        return msgspec.structs.replace(self, **changes)

    def of_shard_of(self, known: "Subscription") -> "Subscription":
        """The same with what is of each shard, as `known` has it."""
        return self.with_changes(**{name: getattr(known, name) for name in _OF_SHARD})


class StandIn(Subscription, frozen=True):
    """A subscription that is not understood, as far as it can be read; it stands still."""

    stored: bytes = b""
    """All of it, as it was written."""
    problem: str = ""
    """Why it is not understood."""

    def with_changes(self, **changes: Any) -> Subscription:
        """The same with other values of some fields, and all others as they are stored."""
        parts = parts_of(self.stored)
        if not parts:
            # It cannot be changed, only deleted: a deletion needs no more than its name.
            plain = {one.name: getattr(self, one.name) for one in _FIELDS} | changes
            return Subscription(**plain) if changes.get("deleted") else self
        for one in _FIELDS:
            if one.name in changes:
                parts.pop(one.name, None)
                if changes[one.name] != one.default:
                    parts[one.name] = _raw(changes[one.name])
        # Two servers that make the same change come to the same bytes.
        ours = {one.name: parts[one.name] for one in _FIELDS if one.name in parts}
        return decode_subscription(msgspec.msgpack.encode({**ours, **parts}), self.id)

    def of_shard_of(self, known: Subscription) -> Subscription:
        """The same with what is of each shard, as `known` has it, or has it stored."""
        theirs = parts_of(known.stored) if isinstance(known, StandIn) else {}
        if not theirs:
            return Subscription.of_shard_of(self, known)
        kept = {one.name: theirs.get(one.name, one.default) for one in _FIELDS}
        return self.with_changes(**{name: kept[name] for name in _OF_SHARD})

    @property
    def asked_pause(self) -> tuple[bool, str]:
        """See Subscription; what cannot be read of it is no pause."""
        stored = parts_of(self.stored)
        reason = next((one for one in _REASONS if stored.get("pause_reason") == _raw(one)), "")
        return stored.get("paused") == _raw(True), reason

    @property
    def can_be_changed(self) -> bool:
        """Whether a part of it can be changed, and the others kept."""
        return bool(parts_of(self.stored))


_FIELDS: Final = msgspec.structs.fields(Subscription)
_OF_SHARD: Final = ("history", "horizon", "subject_since_ms")
"""Kept for each shard: the messages that had fallen due, and under which subject, differ."""
_REASONS: Final = (GONE, FAILURES)


def _raw(value: object) -> msgspec.Raw:
    return msgspec.Raw(msgspec.msgpack.encode(value))


def check_own_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """The headers of a subscription, with names in lower case.

    Raises InputError at `/headers[/<name>]`: besides what a message's own may not be, there are
    names that only the server sets, and the mask of an answer is no value."""
    check_headers(headers)
    for name, value in headers.items():
        if name.lower() in _SET_BY_SERVER:
            raise InputError(
                f"the header {name.lower()} is set by the server", header_pointer(name)
            )
        if value == MASK:
            raise InputError(
                f"{MASK} is what answers show instead of a value; give the value itself",
                header_pointer(name),
            )
    if sum(len(name) + len(value) for name, value in headers.items()) > HEADERS_BYTES_MAX:
        raise InputError(f"headers are at most {HEADERS_BYTES_MAX} bytes in all", "/headers")
    return {name.lower(): value for name, value in headers.items()}


def encode_subscription(subscription: Subscription) -> bytes:
    """The definition as bytes; of one that is not understood those that were stored."""
    if isinstance(subscription, StandIn):
        return subscription.stored
    return msgspec.msgpack.encode(subscription)


def _check(subscription: Subscription) -> None:
    """Raises where it is not known what goes to a subscription."""
    if not is_pattern(subscription.subject):
        raise ValueError(f"{subscription.subject!r} is no subject, and no pattern of subjects")


_SUBSCRIPTIONS: Final = Understanding(
    Subscription, {"id": 0, "name": "", "subject": "*", "type": "pull", "created_ms": 0}, _check
)


def decode_subscription(data: bytes, number: int | None = None) -> Subscription:
    """The definition again, or a StandIn. Never raises.

    `number`: of the subscription, where somebody else knows it; it need not be readable then."""
    known = {} if number is None else {"id": number}
    found, problem = _SUBSCRIPTIONS.read(data, **known)
    if not problem and number is not None and found.id != number:
        found, problem = _SUBSCRIPTIONS.stand_in(data, id=number), "it has another number"
    if not problem:
        history = _history_of(found.history, found.subject)
        return found if history is found.history else found.with_changes(history=history)
    values = {one.name: getattr(found, one.name) for one in _FIELDS}
    if not is_pattern(found.name) or "*" in found.name:
        values["name"] = f"unreadable-{found.id}"
    if not is_pattern(found.subject):
        values["subject"] = "*"
    values["history"] = _history_of(found.history, values["subject"])
    return StandIn(
        **values | {"paused": True, "pause_reason": NOT_UNDERSTOOD}, stored=data, problem=problem
    )


def _history_of(history: tuple[SubjectSpan, ...], subject: str) -> tuple[SubjectSpan, ...]:
    """A history, so that its newest subject is the one of now, as far as that can be read: a server
    that read less may have recorded it."""
    if not history or history[-1].subject in ("", subject):
        return history
    return (*history[:-1], history[-1]._replace(subject=subject))


DIRECT: Final = tuple(
    Subscription(number, DIRECT_NAME, "", "webhook", 0)
    for number in range(DIRECT_FIRST_ID, DIRECT_FIRST_ID + DIRECT_COUNT)
)
"""Who gets the messages that say themselves where they go."""


def for_message(subscription: Subscription, payload: Payload) -> Subscription:
    """How a subscription is sent one message: a direct one as that says itself."""
    to = payload.to
    if to is None or not is_direct(subscription.id):
        return subscription
    return msgspec.structs.replace(
        subscription,
        url=to.url,
        secrets=(to.secret,) if to.secret else (),
        timeout_ms=to.timeout_ms,
        max_attempts=to.max_attempts,
        backoff_ms=to.backoff_ms,
    )


class Registry:
    """All subscriptions that exist, oldest first; by their numbers alone, the direct ones; and, as
    candidates, those that were deleted and may have left something."""

    def __init__(self, subscriptions: Iterable[Subscription] = (), *, last_id: int = 0) -> None:
        known = sorted(subscriptions, key=lambda s: s.id)
        self._by_id = {s.id: s for s in known if not s.deleted}
        self._by_name = {s.name: s for s in self._by_id.values()}
        self._index: SubjectIndex[Subscription] = SubjectIndex()
        for subscription in self._by_id.values():
            self._index.put(subscription.subject, subscription.id, subscription)
        self._candidates: dict[str, tuple[Subscription, ...]] = {}
        self._departed = {s.id: s for s in known if s.deleted and s.has_left}
        self._earlier: dict[str, dict[int, Subscription]] = {}
        """By a subject that they had and do not have now."""
        for one in (*self._by_id.values(), *self._departed.values()):
            self._note_earlier(one)
        # Numbers of deleted subscriptions are never given again: dispatch rows still name them.
        self._last_id = max([last_id, *(s.id for s in known)])

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Subscription]:
        return iter(self._by_id.values())

    def by_id(self, subscription_id: int) -> Subscription | None:
        """The subscription with that number."""
        if is_direct(subscription_id):
            return DIRECT[subscription_id - DIRECT_FIRST_ID]
        return self._by_id.get(subscription_id)

    def by_name(self, name: str) -> Subscription | None:
        """The subscription of that name."""
        return self._by_name.get(name)

    def departed(self, subscription_id: int) -> Subscription | None:
        """A subscription that was deleted, as long as its history may be needed."""
        return self._departed.get(subscription_id)

    def spans(self) -> Iterator[SubjectSpan]:
        """All that the histories say, also of those that were deleted."""
        for one in (*self._by_id.values(), *self._departed.values()):
            yield from one.history

    def next_id(self) -> int:
        """A number that no subscription ever had."""
        self._last_id += 1
        return self._last_id

    def put(self, subscription: Subscription) -> None:
        """Add, change or (with `deleted`) remove a subscription."""
        self._last_id = max(self._last_id, subscription.id)
        before = self._by_id.get(subscription.id)
        if before is not None and (subscription.deleted or before.subject != subscription.subject):
            self._index.remove(before.subject, before.id)
        self._forget_earlier(subscription.id)
        if subscription.deleted:
            self._by_id.pop(subscription.id, None)
            self._by_name.pop(subscription.name, None)
            if subscription.has_left:
                self._departed[subscription.id] = subscription
        else:
            self._index.put(subscription.subject, subscription.id, subscription)
            self._departed.pop(subscription.id, None)
            self._by_id[subscription.id] = subscription
            self._by_name[subscription.name] = subscription
        self._note_earlier(subscription)

    def matching(self, subject: str) -> Sequence[Subscription]:
        """All subscriptions that have a matching subject now, oldest first."""
        return self._index.candidates(subject)

    # ── candidates: the rule (`records.receivers`) decides about them ──────────────────────────

    def candidates(self, subject: str) -> Sequence[Subscription]:
        """All that have or had a matching subject, oldest first; also deleted ones."""
        if not self._earlier:
            return self.matching(subject)
        found = self._candidates.get(subject)
        if found is None:
            by_id = {one.id: one for one in self.matching(subject)}
            for pattern in patterns_of(subject):
                by_id.update(self._earlier.get(pattern, {}))
            found = tuple(by_id[number] for number in sorted(by_id))
            self._candidates[subject] = found
        return found

    def forget(self, is_needed: Callable[[Subscription], bool]) -> None:
        """Let deleted subscriptions go that no message needs any more, those first that were
        deleted first."""
        while self._departed:
            first = next(iter(self._departed.values()))
            if is_needed(first):
                return
            self._forget_earlier(first.id)
            del self._departed[first.id]

    def _note_earlier(self, one: Subscription) -> None:
        self._candidates.clear()
        if one.deleted and not one.has_left:
            return
        for span in one.history:
            if span.subject and (one.deleted or span.subject != one.subject):
                self._earlier.setdefault(span.subject, {})[one.id] = one

    def _forget_earlier(self, subscription_id: int) -> None:
        """Before another definition of it comes."""
        self._candidates.clear()
        known = self._by_id.get(subscription_id) or self._departed.get(subscription_id)
        for span in () if known is None else known.history:
            if (had := self._earlier.get(span.subject)) is not None:
                had.pop(subscription_id, None)
                if not had:
                    del self._earlier[span.subject]

    def snapshot(self) -> "Registry":
        """A copy that never changes, for another thread."""
        known = (*self._by_id.values(), *self._departed.values())
        return Registry(known, last_id=self._last_id)
