"""The owner of each shard: the map of the server, kept while a client is in use.

    GET /v1/cluster ──one shard, or 404──▶ that was all: everything goes to the configured address
         ▲          ──several──▶ GET /v1/cluster at the address of each ──it is that shard──▶ asked
         │                                                        directly, with `delay-forward: no`
         └── by long poll; at once, when an owner is not there, or not the owner ◀──┘

Nothing waits for the map: until an owner has said itself that it is one, and whenever it is not
there, its calls go to the configured address, where any shard forwards them. So an address that
only the server knows, behind a proxy or in a container, costs no call anything. Where an owner says
421, the call goes to where `delay-owner` says.

In a cluster the configured address is one node of several, and owners move between them. The map
names all of them: it, and all that goes to the configured address, is asked at another node when
that one is not there (`nodes`). If two maps name owners of a shard, the later epoch is right.

Cost: of a server alone, one request in the background; else two for each shard, one that waits, and
for each key its checksum. Threads: belongs to one event loop.
"""

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from http import HTTPStatus
from typing import Any, Final, TypeGuard

from delayserver.client.cluster_map import CLUSTER_PATH, MAP_S, ShardOwners
from delayserver.client.errors import NotADelayServerError, UnansweredError, UnreachableError
from delayserver.client.nodes import Connect, Nodes
from delayserver.client.retries import ATTEMPT_S_MIN, RetryPolicy, Time
from delayserver.client.transport import (
    NO_HEADERS,
    TIMEOUT_S,
    HttpAnswer,
    Transport,
    decoded,
)
from delayserver.errors import NotFoundError
from delayserver.records.sharding import shard_of, shard_of_heartbeat, shard_of_id

WAIT_S: Final = 20
"""How long a poll waits at the server; proxies end a connection that is silent for 30 s."""
NO_FORWARD: Final = {"delay-forward": "no"}
OWNER_HEADER: Final = "delay-owner"
AGAIN: Final = RetryPolicy(first_s=0.05, most_s=60.0)
"""The waits while the map, or an owner, cannot be asked."""
_MOVED: Final = ("urn:delayserver:problem:stopping", "urn:delayserver:problem:shard-away")
"""503 after which another process may have the shard."""
Named = tuple[str, str | None]
"""Subject and key of a message."""


class _Owner:
    """A shard at its own address."""

    def __init__(self, shard: int, epoch: int, url: str, transport: Transport) -> None:
        self.shard = shard
        self.epoch = epoch
        self.url = url
        self.transport = transport
        self.greeting: asyncio.Task[None] | None = None


def _has_key(one: Named) -> TypeGuard[tuple[str, str]]:
    return one[1] is not None


class Owners:
    """The owners that one producer knows in one event loop, from `begin` to `close`."""

    def __init__(
        self,
        home: Transport,
        url: str,
        connect: Connect,
        allows: Callable[[str], bool] | None,
        time: Time,
    ) -> None:
        """`home`: the configured address, `url`. `connect` makes a transport to another one, of
        those that `allows` takes; None: of none, so that only their number is asked for."""
        self.count = 1
        """The number of shards, as far as the client knows."""
        self.are_apart = False
        """Whether shards have addresses of their own: there are several, or one that moves."""
        self.is_told = asyncio.Event()
        """The map was asked for: it is known, or cannot be had now."""
        self.home = Nodes(home, url, connect)
        """Where all is asked that no owner is asked."""
        self._connect = connect
        self._allows = allows
        self._time = time
        self._owners: dict[int, _Owner] = {}
        self._ready: dict[int, _Owner] = {}
        """Those who have said who they are."""
        self._next = itertools.count().__next__
        self._stale = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self) -> None:
        """Ask for the map, in the background."""
        self._start(self._keep())

    def abort(self) -> None:
        """Ask nothing more."""
        self.is_told.set()
        self._ready.clear()
        for task in tuple(self._tasks):
            task.cancel()

    async def close(self) -> None:
        """Ask nothing more, and disconnect from the owners."""
        self.abort()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for owner in self._owners.values():
            await owner.transport.close()
        self._owners.clear()
        await self.home.close()

    def _start(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # ── whom to ask ────────────────────────────────────────────────────────────────────────────

    def of_key(self, subject: str, key: str) -> int | None:
        """The shard of a key; None: ask the configured address."""
        return self._if_ready(shard_of(subject, key, self.count)) if self._ready else None

    def of_heartbeat(self, key: str) -> int | None:
        """The shard of a heartbeat; likewise."""
        return self._if_ready(shard_of_heartbeat(key, self.count)) if self._ready else None

    def of_id(self, message_id: str) -> int | None:
        """The shard that gave out an id; likewise."""
        if not self._ready:
            return None
        try:
            return self._if_ready(shard_of_id(message_id))
        except NotFoundError:
            return None

    def of_any(self) -> int | None:
        """Where the next message without a key goes: to all by turns."""
        ready = tuple(self._ready)
        return ready[self._next() % len(ready)] if ready else None

    def together(self, messages: Sequence[Named]) -> int | None:
        """Where those of some messages best go that have no key, so that all stay together: the
        shard of most of the others, or any. None: only one shard is known."""
        count = self.count
        if count == 1:
            return None
        known = Counter(shard_of(*one, count) for one in messages if _has_key(one))
        return known.most_common(1)[0][0] if known else self._next() % count

    def parts(self, messages: Sequence[Named]) -> dict[int | None, list[int]]:
        """The indexes of messages by whom to ask; see `together`."""
        free, count = self.together(messages), self.count
        parts: dict[int | None, list[int]] = {}
        for index, one in enumerate(messages):
            shard = shard_of(*one, count) if _has_key(one) else free
            whom = None if shard is None else self._if_ready(shard)
            parts.setdefault(whom, []).append(index)
        return parts

    def _if_ready(self, shard: int) -> int | None:
        return shard if shard in self._ready else None

    # ── asking ─────────────────────────────────────────────────────────────────────────────────

    async def request(
        self,
        shard: int,
        method: str,
        path: str,
        body: bytes | None = None,
        *,
        headers: Mapping[str, str] = NO_HEADERS,
        timeout_s: float = TIMEOUT_S,
    ) -> HttpAnswer:
        """One request, at the owner of a shard if it can be asked, else at the configured address.
        Raises UnreachableError, UnansweredError."""
        owner = self._ready.get(shard)
        if owner is None:
            return await self.home.request(method, path, body, headers=headers, timeout_s=timeout_s)
        now_s = asyncio.get_running_loop().time
        deadline_s = now_s() + timeout_s
        direct = {**headers, **NO_FORWARD}
        try:
            answer = await owner.transport.request(
                method, path, body, headers=direct, timeout_s=timeout_s
            )
            if answer.status != HTTPStatus.MISDIRECTED_REQUEST:
                if _may_have_moved(answer):
                    self._stale.set()
                return answer
        except UnreachableError:
            self._lose(owner)
        except UnansweredError:
            self._lose(owner)
            raise
        else:
            self._stale.set()
            left_s = max(deadline_s - now_s(), ATTEMPT_S_MIN)
            url = answer.headers.get(OWNER_HEADER, "")
            found = await self._follow(url, method, path, body, direct, left_s)
            if found is not None:
                return found
        left_s = max(deadline_s - now_s(), ATTEMPT_S_MIN)
        return await self.home.request(method, path, body, headers=headers, timeout_s=left_s)

    async def _follow(
        self,
        url: str,
        method: str,
        path: str,
        body: bytes | None,
        headers: Mapping[str, str],
        timeout_s: float,
    ) -> HttpAnswer | None:
        """The answer of whom an owner named; None: nothing was done there. The map, which is asked
        anew, will know it, too: until then each call has a connection of its own."""
        if not self._may_ask(url):
            return None
        transport = self._connect(url)
        try:
            answer = await transport.request(
                method, path, body, headers=headers, timeout_s=timeout_s
            )
        except UnreachableError:
            return None
        finally:
            await transport.close()
        return None if answer.status == HTTPStatus.MISDIRECTED_REQUEST else answer

    def _lose(self, owner: _Owner) -> None:
        """Ask an owner nothing more until it has said again who it is."""
        if self._ready.get(owner.shard) is owner:
            del self._ready[owner.shard]
            self._stale.set()
            self._greet(owner)

    # ── the map ────────────────────────────────────────────────────────────────────────────────

    async def _keep(self) -> None:
        """Have the map as it is, until there is nothing to be known."""
        known: ShardOwners | None = None
        failures = 0
        while True:
            if failures:
                await self._time.sleep(AGAIN.wait_s(failures, self._time.random()))
            try:
                answer = await self._poll(known)
            except UnansweredError:
                self.is_told.set()
                failures += 1
                continue
            if answer is None:
                # Told so by many calls at once, one question answers all of them.
                await self._time.sleep(AGAIN.wait_s(1, self._time.random()))
                known, failures = None, 0
                self._stale.clear()
                continue
            if not answer.is_success:
                self.is_told.set()
                if answer.status < 500 and answer.status != HTTPStatus.TOO_MANY_REQUESTS:
                    return  # A server, or something before it, that has no map for us.
                failures += 1
                continue
            try:
                known = decoded(answer.body, ShardOwners)
            except NotADelayServerError:
                self.is_told.set()
                return
            failures = 0
            await self._take(known)
            self.is_told.set()
            if self._allows is None or not (self.are_apart or self.home.has_others):
                return

    async def _poll(self, known: ShardOwners | None) -> HttpAnswer | None:
        """The next map; None: there is reason to ask at once. Raises UnansweredError."""
        path, timeout_s = CLUSTER_PATH, MAP_S
        if known is not None:
            path, timeout_s = f"{path}?after={known.version}&wait={WAIT_S}s", WAIT_S + MAP_S
        asked = self.home.request("GET", path, timeout_s=timeout_s)
        poll = asyncio.ensure_future(asked)
        stale = asyncio.ensure_future(self._stale.wait())
        try:
            await asyncio.wait((poll, stale), return_when=asyncio.FIRST_COMPLETED)
            return poll.result() if poll.done() else None
        finally:
            poll.cancel()
            stale.cancel()
            await asyncio.wait((poll, stale))

    async def _take(self, known: ShardOwners) -> None:
        shards = known.shards
        if len(known.nodes) > 1:  # else it is the one that was asked
            await self.home.take([one.url for one in known.nodes if self._may_ask(one.url)])
        is_whole = [one.shard for one in shards] == list(range(len(shards)))
        self.count = len(shards) if is_whole and shards else 1
        self.are_apart = self.count > 1 or (is_whole and any(one.epoch for one in shards))
        urls = {
            one.shard: one.url
            for one in shards
            if self.are_apart and one.state == "serving" and one.url and self._may_ask(one.url)
        }
        epochs = {one.shard: one.epoch for one in shards}
        for owner in tuple(self._owners.values()):
            epoch = epochs.get(owner.shard, owner.epoch)
            if epoch >= owner.epoch:  # else who was asked has not heard of this owner yet
                owner.epoch = epoch
                if urls.get(owner.shard) != owner.url:
                    await self._part_from(owner)
        for shard, url in urls.items():
            if shard not in self._owners:
                transport = self._connect(url)
                owner = self._owners[shard] = _Owner(shard, epochs[shard], url, transport)
                self._greet(owner)

    def _may_ask(self, url: str) -> bool:
        return self._allows is not None and self._allows(url)

    async def _part_from(self, owner: _Owner) -> None:
        del self._owners[owner.shard]
        if self._ready.get(owner.shard) is owner:
            del self._ready[owner.shard]
        if owner.greeting is not None:
            owner.greeting.cancel()
        await owner.transport.close()

    # ── the owners ─────────────────────────────────────────────────────────────────────────────

    def _greet(self, owner: _Owner) -> None:
        owner.greeting = self._start(self._until_greeted(owner))

    async def _until_greeted(self, owner: _Owner) -> None:
        for attempt in itertools.count(1):
            if await self._is_itself(owner):
                self._ready[owner.shard] = owner
                return
            await self._time.sleep(AGAIN.wait_s(attempt, self._time.random()))

    async def _is_itself(self, owner: _Owner) -> bool:
        """Whether who answers at an address has the shard that the map says: behind a proxy, or in
        another network, something else may listen there."""
        try:
            answer = await owner.transport.request("GET", CLUSTER_PATH)
            told = decoded(answer.body, ShardOwners) if answer.is_success else None
        except (UnansweredError, NotADelayServerError):
            return False
        return told is not None and any(
            (one.shard, one.url, len(told.shards)) == (owner.shard, owner.url, self.count)
            for one in told.shards
        )


def _may_have_moved(answer: HttpAnswer) -> bool:
    """Whether a refusal tells of a process that ends, or does not own the shard any more; one that
    has only too much to do is asked again as it is."""
    if answer.status != HTTPStatus.SERVICE_UNAVAILABLE:
        return False
    problem = answer.problem
    return answer.is_unknown or (problem is not None and problem.type in _MOVED)
