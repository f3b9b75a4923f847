"""Subscriptions of all shards: one truth, at shard 0, and in every shard before it is answered.

    PUT … ──▶ shard 0: all are there? ──▶ decided, durable ──▶ durable in the others ──▶ answered
    410   ──▶ any shard: paused at once ──▶ shard 0 ──▶ all
    fails ──▶ any shard, since when; or it does not any more ──▶ shard 0 ──▶ all

Shard 0 is the home: it decides, and each definition stands in the log of each shard, so that a
shard recovers from its own files, and delivers while the home is away. A message over a link
changes a shard only as far as it differs, so it may be sent twice.

A crash may come in between. Then the shard that has ended learns of all definitions when it is
linked again: it takes over the definitions that it lacks, and deletes those that the home does not
have. No client had an answer about either. No shard says that it is ready until every
shard has met all others and has heard all definitions once.

Cost: a sync in two shards, one after the other, for a change. After a crash a MessagePack document
of some 300 bytes a subscription. Threads: belongs to the event loop.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from enum import StrEnum
from typing import Any, Final

import msgspec
import structlog

from delayserver.errors import DelayServerError, ShardAwayError
from delayserver.records.subscriptions import (
    GONE,
    Subscription,
    decode_subscription,
    encode_subscription,
)
from delayserver.server.calls import Calls
from delayserver.shards.peers import PeerAnswer, PeerCall, Peers
from storage.errors import StorageError

HOME: Final = 0
"""The shard that decides."""
SPREAD_S: Final = 10.0
"""After this time nobody waits any more for a shard that is there and does not take a definition;
it is asked again all the same."""
RETRY_S: Final = 0.2
_DONE: Final = PeerAnswer(204, (), b"")

log = structlog.get_logger()


class _Paths(StrEnum):
    DEFINE = "/internal/definitions"
    PAUSE = "/internal/pause"
    FAILING = "/internal/failing"


class _Definitions(msgspec.Struct, array_like=True):
    are_all: bool
    """Whether these are all: then the shard deletes every other subscription."""
    subscriptions: Sequence[msgspec.Raw]
    """As they are stored: a node that does not understand one passes it on to a node that may."""


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Definitions).decode


class _Follower:
    """The home's knowledge of another shard."""

    def __init__(self) -> None:
        self.is_linked = False
        self.needs_all = True
        self.pending: dict[int, Subscription] = {}
        """The definitions that it has not confirmed, by id, as they were decided last."""
        self.revision = -1
        """It has everything up to this one; -1: it has not said so since it was linked."""
        self.changed = asyncio.Event()
        self.confirmed = asyncio.Event()
        """Set, and replaced, when it has confirmed something, or its link has ended."""

    def tell_waiters(self) -> None:
        self.confirmed.set()
        self.confirmed = asyncio.Event()

    def take(self, everything: Iterable[Subscription]) -> _Definitions:
        """The next message to this shard. Definitions that it was sent and has not confirmed are
        sent again, together with all the rest."""
        pending, self.pending = self.pending, {}
        are_all, self.needs_all = self.needs_all, False
        said = map(encode_subscription, everything if are_all else pending.values())
        return _Definitions(are_all, list(map(msgspec.Raw, said)))


class Definitions:
    """The definitions of one shard among others. `begin` and `close` are those of the member."""

    def __init__(self, calls: Calls, peers: Peers, moving_s: float = 0.0) -> None:
        """`moving_s`: so long a shard may be away that moves to another node."""
        self._calls = calls
        self._peers = peers
        self._moving_s = moving_s
        self._others = [shard for shard in range(peers.count) if shard != peers.own]
        self._unmet = set(self._others)
        self._is_home = peers.own == HOME
        self._has_all = self._is_home
        self._revision = 0
        self._followers = {shard: _Follower() for shard in self._others} if self._is_home else {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.whole = asyncio.Event()
        """Set once all shards have met, and have all definitions; it stays set."""
        if self._followers:
            calls.subscriptions.spreading = self
        self._failing: dict[int, int] = {}
        """The reports that the home has not confirmed: by subscription, since when it fails."""
        if self._others:
            calls.subscriptions.when_paused(self._on_paused)
            calls.subscriptions.when_failing(self._on_failing)
        self._look()

    def begin(self) -> None:
        """From now on others may come."""
        self._peers.on_change(self._on_change)
        for shard in self._followers:
            self._start(self._keep(shard))
        self._look()

    def when_whole(self, tell: Callable[[], None]) -> None:
        """Call `tell` once they are whole."""

        async def wait() -> None:
            await self.whole.wait()
            tell()

        self._start(wait())

    def close(self) -> None:
        """Say nothing more."""
        for task in self._tasks:
            task.cancel()

    def check_whole(self) -> None:
        """Raises ShardAwayError until all have met once, and have the definitions."""
        if not self.whole.is_set():
            missing = min(self._unmet, default=HOME)
            if self._is_home and not self._unmet:
                missing = next(k for k, one in self._followers.items() if one.revision < 0)
            raise ShardAwayError(missing)

    def _on_change(self, shard: int, is_there: bool) -> None:
        if is_there:
            self._unmet.discard(shard)
        follower = self._followers.get(shard)
        if follower is not None:
            # Whatever it had is gone, or may be.
            follower.is_linked = is_there
            follower.needs_all = True
            follower.revision = -1
            follower.tell_waiters()
            if is_there:
                follower.changed.set()
        self._look()

    def _look(self) -> None:
        are_told = all(follower.revision >= 0 for follower in self._followers.values())
        if not self._unmet and self._has_all and are_told:
            self.whole.set()

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._end)

    def _end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._calls.on_fatal(error)  # a mistake of ours: definitions would differ for good

    # ── at the home ────────────────────────────────────────────────────────────────────────────

    async def check(self) -> None:
        """Whether a definition may be changed: it has to reach all. A shard that moves is waited
        for. Raises ShardAwayError."""
        away = 0
        try:
            async with asyncio.timeout(self._moving_s):
                for away, follower in self._followers.items():  # noqa: B007
                    while follower.revision < 0:
                        await follower.confirmed.wait()
        except TimeoutError:
            raise ShardAwayError(away) from None

    async def spread(self, subscription: Subscription) -> None:
        """Done when all shards have a definition that is durable here.

        Raises ShardAwayError: it is in force here, and in the others as soon as they are there."""
        self._put(subscription)
        revision = self._revision
        try:
            async with asyncio.timeout(SPREAD_S):
                for shard, follower in self._followers.items():
                    await self._until_told(shard, follower, revision)
        except TimeoutError:
            for shard, follower in self._followers.items():
                if follower.revision < revision:
                    raise ShardAwayError(shard, is_unknown=True) from None
            # The last of them has confirmed it in the turn in which the time was up.

    async def _until_told(self, shard: int, follower: _Follower, revision: int) -> None:
        while follower.revision < revision:
            if not follower.is_linked and not self._moving_s:
                raise ShardAwayError(shard, is_unknown=True)
            await follower.confirmed.wait()

    def _put(self, subscription: Subscription) -> None:
        self._revision += 1
        for follower in self._followers.values():
            follower.pending[subscription.id] = subscription
            follower.changed.set()

    async def _keep(self, shard: int) -> None:
        """Tell another shard all that it does not know, as long as both are there."""
        follower = self._followers[shard]
        while True:
            await follower.changed.wait()
            follower.changed.clear()
            if not follower.is_linked:
                continue
            revision = self._revision
            told = follower.take(self._calls.registry)
            call = PeerCall("POST", _Paths.DEFINE, body=_encode(told))
            answer = await self._peers.ask(shard, call)
            if answer.status == _DONE.status:
                # This is the revision of the link that carried the question: had that link ended,
                # its answer would have ended, too.
                follower.revision = revision
                follower.tell_waiters()
                self._look()
                continue
            follower.needs_all = True
            if follower.is_linked:
                log.warning("a shard does not take definitions", of=shard, status=answer.status)
                await asyncio.sleep(RETRY_S)
                follower.changed.set()

    # ── in the others ──────────────────────────────────────────────────────────────────────────

    async def answer(self, call: PeerCall) -> PeerAnswer | None:
        """Answer a call of another shard about definitions."""
        match call.path:
            case _Paths.DEFINE:
                told = _decode(call.body)
                said = [decode_subscription(bytes(one)) for one in told.subscriptions]
                await self._calls.subscriptions.take(said, are_all=told.are_all)
                self._has_all = self._has_all or told.are_all
                self._look()
            case _Paths.PAUSE:
                # A node of an older version says the number alone, and means that.
                number, _, reason = call.body.decode().partition(" ")
                subscription = self._calls.registry.by_id(int(number))
                if subscription is not None and not subscription.paused:
                    await self._calls.subscriptions.change(
                        subscription.name, paused=True, pause_reason=reason or GONE
                    )
            case _Paths.FAILING:
                await self._note_failing(*map(int, call.body.split()))
            case _:
                return None
        return _DONE

    # ── failing, as a shard sees it ────────────────────────────────────────────────────────────

    def _on_failing(self, subscription_id: int, since_ms: int) -> None:
        """A subscription has failed here for some time, or another shard's report is wrong."""
        if self._is_home:
            self._start(self._note_failing(subscription_id, since_ms))
            return
        is_being_told = subscription_id in self._failing
        self._failing[subscription_id] = since_ms
        if not is_being_told:
            self._start(self._tell_failing(subscription_id))

    async def _tell_failing(self, subscription_id: int) -> None:
        """Until the home has heard the last that there is to say."""
        while True:
            since_ms = self._failing[subscription_id]
            call = PeerCall("POST", _Paths.FAILING, body=b"%d %d" % (subscription_id, since_ms))
            if (await self._peers.ask(HOME, call)).status != _DONE.status:
                await asyncio.sleep(RETRY_S)
            elif self._failing[subscription_id] == since_ms:
                del self._failing[subscription_id]
                return

    async def _note_failing(self, subscription_id: int, since_ms: int) -> None:
        """Record it, at the home. If that fails now, the next attempt reports it again."""
        with suppress(DelayServerError, StorageError):
            changed = await self._calls.subscriptions.note_failing(subscription_id, since_ms)
            if changed is not None:
                self._put(changed)

    # ── paused by a shard ──────────────────────────────────────────────────────────────────────

    def _on_paused(self, subscription_id: int) -> None:
        """A receiver has told this shard that it is gone, or has failed for long; it is recorded
        here."""
        self._start(self._spread_pause(subscription_id))

    async def _spread_pause(self, subscription_id: int) -> None:
        """Repeat it until the home has recorded it, or says that the subscription is not paused: it
        says so to a shard that is linked again. Then the next delivery asks the receiver again."""
        try:
            await self._calls.all_durable()
        except (DelayServerError, StorageError):
            return  # It is not recorded, so it is tried again.
        while True:
            subscription = self._calls.registry.by_id(subscription_id)
            if subscription is None or not subscription.paused:
                return
            if self._is_home:
                self._put(subscription)
                return
            said = f"{subscription_id} {subscription.pause_reason or GONE}"
            call = PeerCall("POST", _Paths.PAUSE, body=said.encode())
            if (await self._peers.ask(HOME, call)).status == _DONE.status:
                return
            await asyncio.sleep(RETRY_S)
