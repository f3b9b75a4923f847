"""The router: has a call answered by the shard that it is for, or by all of them, as one server.

    /v1/messages/{id}[/…]                            the shard in the id, also for calls of parts
    /v1/subjects/{subject}/keys/{key}                the shard of the key
    calls of a part with a key                       the shard of the key, or a sum over all
    /v1/COLLECTION/{name}… of a part                 the shard of the name
    GET  /v1/COLLECTION of a part                    all, merged by name
    …/dead-letters/{id}                              the shard in the id
    POST /v1/messages/cancel                         each message at its shard, all at once
    GET  /v1/subjects, /v1/dead-letters              all, merged by name and added up
    GET  /v1/subjects/{subject}/messages             all, merged by due time, then shard, then seq
    GET  /v1/stats, /v1/forecast, /metrics           all, added up, or side by side
    POST /v1/events/{key}                            all, added up
    GET  /v1/subscriptions[/{name}]                  the own shard's, with the waiting of all
    PUT, DELETE, pause, resume of a subscription     the home of all definitions
    …/dead-letters, …/dead-letters/redrive           all, merged by seq; those of the ids
    other calls of a part                            as its `shard_routes` say
    /v1/backups[/{name}]                             all, each its part

An error in a call is reported by a shard, in its own words: a call that cannot be read here, or
names something that cannot exist, is left to the own shard. A list over all shards is complete, or
the answer is that of the shard that could not give its part. A call that changes something in all
shards says which of them have done it: it may be repeated.

Publishes, batches and pulls are served elsewhere. A server alone has no shards to ask.

Cost: 10 µs for a call to one shard; for a merged answer see `pages`, `sums` and `exposition`, and
each shard's page comes whole. Threads: belongs to the event loop.
"""

import re
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial

import msgspec

from delayserver.api.documents import encode
from delayserver.api.problems import MEDIA_TYPE, problem_of
from delayserver.config import Settings
from delayserver.errors import DelayServerError
from delayserver.parts.part import KeyedCalls, Parts
from delayserver.records.sharding import shard_of, shard_of_name
from delayserver.shards.all_shards import (
    FORBIDDEN,
    MISSING,
    AllShards,
    json_answer,
    made_answer,
)
from delayserver.shards.exposition import merge_metrics
from delayserver.shards.many_cancels import ManyCancels
from delayserver.shards.merged_backups import MergedBackups
from delayserver.shards.merged_lists import MergedLists
from delayserver.shards.merged_subscriptions import MergedSubscriptions
from delayserver.shards.peers import PeerAnswer, PeerCall, RoutedPeers
from delayserver.shards.sums import add_forecasts, add_stats
from delayserver.wire.operations import ForecastDocument, StatsDocument
from delayserver.wire.reading import UNREADABLE


class _RedriveBody(msgspec.Struct):
    ids: list[str] | None = None


_Serve = Callable[..., int | Awaitable[PeerAnswer]]
"""Takes a call and the values in its path; returns the shard that it is for, or the answer."""

_read_redrive = msgspec.json.Decoder(_RedriveBody | None).decode
_read_stats = msgspec.json.Decoder(StatsDocument).decode
_read_forecast = msgspec.json.Decoder(ForecastDocument).decode


class Router:
    """The calls of one process of several."""

    def __init__(self, peers: RoutedPeers, settings: Settings, parts: Parts) -> None:
        """`settings`: those of all shards."""
        every = self._all = AllShards(peers)
        lists, subscriptions = MergedLists(every, settings), MergedSubscriptions(every)
        backups = MergedBackups(every)
        routes: list[tuple[str, str, _Serve]] = [
            ("GET DELETE PATCH", r"/v1/messages/([^/]+)", self._by_id),
            ("GET POST", r"/v1/messages/([^/]+)/[^/]+", self._by_id),
            ("POST", r"/v1/messages/cancel", ManyCancels(every).cancel_many),
            ("GET DELETE PATCH PUT", r"/v1/subjects/([^/]+)/keys/(.*)", self._by_key),
            ("GET", r"/v1/subjects", lists.subjects),
            ("GET", r"/v1/subjects/[^/]+/messages", lists.pending),
            *(route for part in parts for route in self._named(part.collection, part.verbs, lists)),
            *(self._keyed(calls) for part in parts for calls in part.keyed),
            ("GET", r"/v1/stats", self._stats),
            ("GET", r"/v1/forecast", self._forecast),
            ("GET", r"/metrics", self._metrics),
            ("GET", r"/v1/dead-letters", lists.dead_letter_counts),
            ("GET", r"/v1/subscriptions", subscriptions.page),
            ("GET", r"/v1/subscriptions/[^/]+", subscriptions.one),
            ("PUT DELETE", r"/v1/subscriptions/([^/]+)", subscriptions.define),
            ("POST", r"/v1/subscriptions/([^/]+)/(pause|resume)", subscriptions.define),
            ("GET", r"/v1/subscriptions/[^/]+/dead-letters", lists.dead_letters),
            ("POST", r"/v1/subscriptions/[^/]+/dead-letters/redrive", self._redrive),
            ("DELETE", r"/v1/subscriptions/[^/]+/dead-letters/([^/]+)", self._by_id),
            *(
                route
                for part in parts
                if part.shard_routes is not None
                for route in part.shard_routes(every, lists)
            ),
            ("POST", r"/v1/backups", backups.begin),
            ("GET", r"/v1/backups", backups.page),
            ("GET", r"/v1/backups/[^/]+", backups.one),
            ("DELETE", r"/v1/backups/[^/]+", backups.delete),
        ]
        self._routes = [
            (frozenset(methods.split()), re.compile(pattern, re.DOTALL), serve)
            for methods, pattern, serve in routes
        ]

    def _named(
        self, collection: str, verbs: Sequence[str], lists: MergedLists
    ) -> "list[tuple[str, str, _Serve]]":
        """The routes of definitions under names; none if there is no collection."""
        if not collection:
            return []
        return [
            ("GET", f"/v1/({collection})", lists.named),
            ("PUT GET DELETE", f"/v1/{collection}/([^/]+)", self._by_name),
            ("POST", f"/v1/{collection}/([^/]+)/({'|'.join(verbs)})", self._by_name),
        ]

    def _keyed(self, calls: KeyedCalls) -> "tuple[str, str, _Serve]":
        serve = partial(self._in_all, calls.sums) if calls.sums else self._by_name
        return calls.methods, calls.path.replace("{key}", "(.*)"), serve

    async def answer(self, call: PeerCall) -> PeerAnswer | None:
        """The answer to a call; None: the own shard has it, or nobody. HEAD comes as GET."""
        if self._all.count == 1:
            return None
        found = self._find(call)
        if found is None:
            return None
        serve, values = found
        try:
            to = serve(call, *values)
            if isinstance(to, int):
                return None if to == self._all.own else await self._all.forward(to, call, call)
            return await to
        except DelayServerError as error:
            return _problem(error)

    def _find(self, call: PeerCall) -> tuple[_Serve, tuple[str, ...]] | None:
        for methods, pattern, serve in self._routes:
            if call.method in methods and (found := pattern.fullmatch(call.path)):
                return serve, found.groups()
        return None

    # ── calls for one shard ────────────────────────────────────────────────────────────────────

    def _by_id(self, call: PeerCall, text: str) -> int:
        return self._all.shard_of_id(text)

    def _by_key(self, call: PeerCall, subject: str, key: str) -> int:
        return shard_of(subject, key, self._all.count)

    def _by_name(self, call: PeerCall, name: str, _verb: str = "") -> int:
        return shard_of_name(name, self._all.count)

    # ── sums ───────────────────────────────────────────────────────────────────────────────────

    async def _stats(self, call: PeerCall) -> PeerAnswer:
        answers = await self._all.ask_all(call)
        return self._all.refusal(answers) or json_answer(
            encode(add_stats([_read_stats(one.body) for one in answers.values()]))
        )

    async def _forecast(self, call: PeerCall) -> PeerAnswer:
        answers = await self._all.ask_all(call)
        return self._all.refusal(answers) or json_answer(
            encode(add_forecasts(_read_forecast(one.body) for one in answers.values()))
        )

    async def _metrics(self, call: PeerCall) -> PeerAnswer:
        """Shards that are away are named, and the rest is given: an alert has to tell the loss of
        one shard from the loss of all."""
        answers = await self._all.ask_all(call)
        own = answers[self._all.own]
        if own.status != 200:
            return own
        texts = {
            shard: one.body.decode() if one.status == 200 else None
            for shard, one in sorted(answers.items())
        }
        content_type = dict(own.headers)[b"content-type"]
        return made_answer(200, merge_metrics(texts).encode(), content_type)

    # ── changes in all shards ──────────────────────────────────────────────────────────────────

    async def _in_all(self, sums: tuple[str, ...], call: PeerCall, _key: str) -> PeerAnswer:
        return self._all.added_up(await self._all.ask_all(call), sums)

    def _redrive(self, call: PeerCall) -> "int | Awaitable[PeerAnswer]":
        """A call that cannot be read goes to all: each shard reports the error."""
        try:
            wanted = _read_redrive(call.body)
        except UNREADABLE:
            wanted = None
        if wanted is None or wanted.ids is None:
            return self._redrive_in(call, range(self._all.count))
        # Not cut into parts: a shard passes over ids that are not its own.
        shards = {self._all.shard_of_id(text) for text in wanted.ids}
        if len(shards) <= 1:
            return next(iter(shards), self._all.own)
        return self._redrive_in(call, shards)

    async def _redrive_in(self, call: PeerCall, shards: Iterable[int]) -> PeerAnswer:
        answers = await self._all.ask(dict.fromkeys(shards, call))
        return self._all.added_up(answers, ("redriven",), (FORBIDDEN, MISSING))


def _problem(error: DelayServerError) -> PeerAnswer:
    problem = problem_of(error)
    more = [(name.encode(), value.encode()) for name, value in problem.headers.items()]
    return made_answer(problem.status, problem.encode(), MEDIA_TYPE.encode(), more)
