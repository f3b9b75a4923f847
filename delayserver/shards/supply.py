"""A shard's messages for consumers of other shards: it tells their count, and lends them.

    other ── want ID ──▶ ready ID COUNT, now and whenever it is another number
          ── fetch ────▶ leased ──▶ a part: encoded messages ──▶ handed PREFIX, or back PREFIX

A count is told at the end of the turn of the event loop in which it has changed, and after each
fetch in any case. Only these notices count: a part may be overtaken by a notice that came later, so
the part does not report the rest. A count that is too high costs a fetch that gets nothing; one
that is too low would leave a message behind until the next falls due.

A lent message is confirmed when the consumer was answered. Else it comes back, and was no attempt:
either the other shard says that the consumer is gone, or the link to it ends.

Cost: a fetch 60 µs besides a pull of the same size; a notice 2 µs for each shard that wants it, in
turns in which something changed. Threads: belongs to the event loop.
"""

import asyncio
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final

import msgspec

from delayserver.api.documents import encode_messages
from delayserver.delivery.delayed_fetch import DelayedFetch, Pulled, PullRequest
from delayserver.server.calls import Calls
from delayserver.shards.peers import PeerAnswer, PeerCall, Peers

FETCH_PATH: Final = "/internal/pull"
WANTS: Final = "wants"
"""The topic of a shard that waits: a `NoticeKind` and its argument, in MessagePack."""
READY: Final = "ready"
"""The topic of a count: the id of a subscription and the number that is ready, in MessagePack."""


class NoticeKind(IntEnum):
    """The first element of a notice."""

    LINK = 0
    """The number of the link: a fetch over another link is void."""
    BEGIN = 1
    """The id of a subscription that consumers wait for."""
    END = 2
    """… and of one that none waits for any more."""
    HANDED = 3
    """The prefix of the leases of a part: the consumer was answered."""
    BACK = 4
    """… the consumer is gone."""


class Fetch(msgspec.Struct, array_like=True):
    """The request for a part."""

    asker: int
    link: int
    subscription_id: int
    max_messages: int
    max_bytes: int
    lease_ms: int
    subjects: tuple[str, ...] = ()
    """As `PullRequest.subjects`."""


class LentPart(msgspec.Struct, array_like=True):
    """Some messages of one shard, leased."""

    count: int = 0
    prefix: str = ""
    """The prefix of the tokens of their leases."""
    is_cut: bool = False
    """There were more, which did not fit."""
    messages: bytes = b""
    """With commas between them."""


encode = msgspec.msgpack.Encoder().encode
_decode_fetch = msgspec.msgpack.Decoder(Fetch).decode
_decode_notice = msgspec.msgpack.Decoder(tuple[int, int | str]).decode


@dataclass(slots=True, eq=False)
class _Asker:
    """Another shard, as long as a link lasts."""

    link: int = -1
    told: dict[int, int | None] = field(default_factory=dict)
    """Subscriptions that it wants, and the count that it was told last; None: it is told anew."""
    lent: dict[str, None] = field(default_factory=dict)
    """The parts that it has not confirmed, in the order in which they were lent."""
    reading: dict["_Lending", None] = field(default_factory=dict)
    """The parts that are being read for it."""


class Supply:
    """The messages that other shards may have of this one."""

    def __init__(self, calls: Calls, peers: Peers) -> None:
        self._calls = calls
        self._peers = peers
        self._askers: dict[int, _Asker] = {}
        self._changed: set[int] = set()
        """Subscriptions that are looked at in the end of this turn."""
        peers.on_told(WANTS, self._hear)
        peers.on_change(self._on_change)

    def on_ready(self, subscription_id: int) -> None:
        """Other rows of it may leave than before, perhaps."""
        if any(subscription_id in asker.told for asker in self._askers.values()):
            if not self._changed:
                self._calls.call_soon(self._tell)
            self._changed.add(subscription_id)

    def _tell(self) -> None:
        changed, self._changed = self._changed, set()
        for subscription_id in changed:
            count = self._calls.consumers.ready(subscription_id) or 0
            for shard, asker in self._askers.items():
                if asker.told.get(subscription_id, count) != count:
                    asker.told[subscription_id] = count
                    self._peers.tell(shard, READY, encode((subscription_id, count)))

    def _tell_anew(self, asker: _Asker, subscription_id: int) -> None:
        """Whatever it knows of the count is not so any more."""
        if subscription_id in asker.told:
            asker.told[subscription_id] = None
            self.on_ready(subscription_id)

    # ── notices of other shards ────────────────────────────────────────────────────────────────

    def _on_change(self, shard: int, is_there: bool) -> None:
        if is_there:
            self._askers[shard] = _Asker()
            return
        asker = self._askers.pop(shard)
        for lending in list(asker.reading):
            lending.cancel()
        for prefix in asker.lent:
            self._calls.consumers.give_back(prefix)

    def _hear(self, shard: int, notice: bytes) -> None:
        asker = self._askers[shard]
        what, about = _decode_notice(notice)
        match what, about:
            case NoticeKind.LINK, int(link):
                asker.link = link
            case NoticeKind.BEGIN, int(subscription_id):
                asker.told[subscription_id] = None
                self.on_ready(subscription_id)
            case NoticeKind.END, int(subscription_id):
                asker.told.pop(subscription_id, None)
            case NoticeKind.HANDED, str(prefix):
                asker.lent.pop(prefix, None)
            case NoticeKind.BACK, str(prefix):
                asker.lent.pop(prefix, None)
                self._calls.consumers.give_back(prefix)
            case _:
                raise AssertionError(notice)

    # ── calls of other shards ──────────────────────────────────────────────────────────────────

    async def answer(self, call: PeerCall) -> PeerAnswer | None:
        """A part. Raises StoppingError."""
        if call.path != FETCH_PATH:
            return None
        return PeerAnswer(200, (), encode(await self._lend(_decode_fetch(call.body))))

    async def _lend(self, wanted: Fetch) -> LentPart:
        asker = self._askers.get(wanted.asker)
        if asker is None or asker.link != wanted.link:
            return (
                LentPart()
            )  # The other shard has ended, or has begun anew and forgotten its fetch.
        subscription = self._calls.registry.by_id(wanted.subscription_id)
        if subscription is None:
            return LentPart()
        there = min(self._calls.consumers.ready(subscription.id) or 0, wanted.max_messages)
        lending = _Lending(asker)
        request = PullRequest(
            wanted.max_messages,
            wanted.lease_ms,
            0,
            lending.lend,
            subjects=wanted.subjects,
            max_bytes=wanted.max_bytes,
        )
        lending.begin(self._calls.consumers.pull(subscription, request))
        self._tell_anew(asker, subscription.id)
        pulled = await lending.lent
        deliveries = pulled.deliveries
        if deliveries is None or not deliveries:
            return LentPart()
        try:
            messages = encode_messages(pulled)
        except BaseException:
            asker.lent.pop(pulled.lease_prefix, None)  # as by a server alone: until they are over
            raise
        count = len(deliveries)
        return LentPart(count, pulled.lease_prefix, count < there, messages)


class _Lending:
    """A part that is read, until it is lent."""

    def __init__(self, asker: _Asker) -> None:
        self._asker = asker
        self._fetch: DelayedFetch | None = None
        self.lent: asyncio.Future[Pulled] = asyncio.get_running_loop().create_future()

    def begin(self, fetch: DelayedFetch) -> None:
        """Remember a read, which is cancelled if the other has ended before the part is lent."""
        if not self.lent.done():
            self._fetch = fetch
            self._asker.reading[self] = None

    def lend(self, pulled: Pulled) -> None:
        """It is leased: from here on the other gives it back, or its end does."""
        self._asker.reading.pop(self, None)
        if pulled.lease_prefix:
            self._asker.lent[pulled.lease_prefix] = None
        self.lent.set_result(pulled)

    def cancel(self) -> None:
        """The other has ended: messages that are being read go back."""
        assert self._fetch is not None
        self._fetch.cancel()
        self.lent.set_result(Pulled())
