"""The router: has a call answered by the shard that it is for, or by all of them, as one server.

    /v1/messages/{id}[/attempts, /replay]            the shard in the id
    /v1/subjects/{subject}/keys/{key}                the shard of the key
    /v1/heartbeats/{key}                             the shard of the heartbeat
    /v1/schedules/{name}…                            the shard of the schedule
    /v1/sources/{name}…                              the shard of the source
    GET  /v1/schedules, /v1/sources                  all, merged by name
    …/dead-letters/{id}                              the shard in the id
    POST /v1/messages/cancel                         each message at its shard, all at once
    GET  /v1/subjects, /v1/dead-letters              all, merged by name and added up
    GET  /v1/subjects/{subject}/messages             all, merged by due time, then shard, then seq
    GET  /v1/stats, /v1/forecast, /metrics           all, added up, or side by side
    POST /v1/events/{key}                            all, added up
    GET  /v1/subscriptions[/{name}]                  the own shard's, with what waits in all
    PUT, DELETE, pause, resume of a subscription     the home of all definitions
    …/dead-letters, …/dead-letters/redrive           all, merged by seq; those of the ids
    /v1/imports…, PUT /v1/archives/{hour}            the shard that `shard=` or the manifest says
    GET  /v1/imports/{id}                            that, or the one that has it
    GET  /v1/archives                                that, or all, merged by hour
    /v1/backups[/{name}]                             all, each its part

What is wrong with a call is told by a shard, in its own words: one that cannot be read here, or
names nothing that can be, is left to the own shard. What is read of all shards is there whole, or
the answer is what the shard said that could not give its part. What changes something in all of
them says who has done it: it may be asked again.

Publishes, batches and pulls are served elsewhere. A server alone has no shards to ask.

Cost: 10 µs for a call to one shard; of what is merged, see `pages`, `sums` and `exposition`, and
each shard's page comes whole. Threads: belongs to the event loop.
"""

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import PurePosixPath
from typing import Any, Final, NamedTuple
from urllib.parse import parse_qsl, urlencode

import msgspec

from delayserver.api.documents import (
    NAMED_PAGE_MAX,
    PLACES_HEADER,
    BackupDocument,
    BackupListDocument,
    CancelResultDocument,
    ForecastDocument,
    ShardPageDocument,
    StatsDocument,
    encode,
)
from delayserver.api.hot.answers import JSON
from delayserver.api.hot.cancel import CancelBody
from delayserver.api.problems import MEDIA_TYPE, UNREADABLE, problem_of
from delayserver.config import Settings
from delayserver.errors import DelayServerError, InputError, NotFoundError
from delayserver.records.sharding import (
    shard_of,
    shard_of_heartbeat,
    shard_of_id,
    shard_of_name,
)
from delayserver.security.tokens import Action
from delayserver.shards.definitions import HOME
from delayserver.shards.exposition import merge_metrics
from delayserver.shards.pages import PagedList, Place, merge_pages, write_cursor
from delayserver.shards.peers import Fields, PeerAnswer, PeerCall, RoutedPeers
from delayserver.shards.sums import (
    add_backup,
    add_backups,
    add_by_name,
    add_forecasts,
    add_stats,
    add_waiting,
)
from storage.buckets import hour_name, parse_hour
from storage.shards import shard_directory

_SEQ_MAX: Final = 2**64 - 1
_DUE_MS_MAX: Final = 10**15 - 1
"""As many digits as a cursor may have."""
_HOUR_MAX: Final = int(datetime(9999, 12, 31, 23, tzinfo=UTC).timestamp()) // 3600
"""The last one that has a name."""


def _numbers(pattern: str) -> Callable[[str], Place | None]:
    """Reads a cursor of numbers with dashes between them."""
    form = re.compile(pattern)
    return lambda text: tuple(map(int, text.split("-"))) if form.fullmatch(text) else None


def _hour(text: str) -> Place | None:
    hour = parse_hour(text)
    return None if hour is None else (hour,)


_PENDING: Final = PagedList(
    "messages",
    (_DUE_MS_MAX, _SEQ_MAX),
    lambda place: f"{place[0]}-{place[1]}",
    _numbers("[0-9]{1,15}-[0-9]{1,20}"),
)
_DEAD_LETTERS: Final = PagedList(
    "dead_letters", (_SEQ_MAX,), lambda place: str(place[0]), _numbers("[0-9]{1,20}")
)
_ARCHIVES: Final = PagedList("hours", (_HOUR_MAX,), lambda place: hour_name(place[0]), _hour)
_NOT_A_CURSOR: Final = "."
"""Refused by every list."""
_ACCEPTED: Final = 202
_DELETED: Final = 204
_MISSING: Final = 404
_FORBIDDEN: Final = 403

_Row = dict[str, msgspec.Raw]
"""A document whose fields stay as they are written."""


class _RedriveBody(msgspec.Struct):
    ids: list[str] | None = None


class _WantedBackup(msgspec.Struct):
    verify: bool = True


class _Results(msgspec.Struct):
    results: list[msgspec.Raw]


class _Subscriptions(msgspec.Struct):
    subscriptions: list[_Row]
    cursor: str | None = None


_read_backup = msgspec.json.Decoder(BackupDocument).decode
_read_backups = msgspec.json.Decoder(BackupListDocument).decode
_read_wanted = msgspec.json.Decoder(_WantedBackup).decode
_read_cancel = msgspec.json.Decoder(CancelBody).decode
_read_redrive = msgspec.json.Decoder(_RedriveBody | None).decode
_read_results = msgspec.json.Decoder(_Results).decode
_read_page = msgspec.json.Decoder(ShardPageDocument).decode
_read_row = msgspec.json.Decoder(_Row).decode
_read_subscriptions = msgspec.json.Decoder(_Subscriptions).decode
_read_stats = msgspec.json.Decoder(StatsDocument).decode
_read_forecast = msgspec.json.Decoder(ForecastDocument).decode


class _Part(NamedTuple):
    """What of a call that names many messages is for one shard."""

    indexes: list[int]
    """Which they are, in the order of the call."""
    ids: list[str]
    keys: list[Any]


class Router:
    """The calls of one process of several."""

    def __init__(self, peers: RoutedPeers, settings: Settings) -> None:
        """`settings`: those of all shards."""
        self._peers = peers
        self._settings = settings

    async def answer(self, call: PeerCall) -> PeerAnswer | None:
        """The answer to a call; None: the own shard has it, or nobody. HEAD comes as GET."""
        if self._peers.count == 1:
            return None
        found = _find(call)
        if found is None:
            return None
        serve, values = found
        try:
            to = serve(self, call, *values)
            if isinstance(to, int):
                return None if to == self._peers.own else await self._forward(to, call, call)
            return await to
        except DelayServerError as error:
            return _problem(error)

    async def _forward(self, to: int, call: PeerCall, as_asked: PeerCall) -> PeerAnswer:
        """What another shard says to all of a client's call, or who it is."""
        return self._peers.misdirected(to, as_asked) or await self._peers.ask(to, call)

    # ── calls for one shard ────────────────────────────────────────────────────────────────────

    def _by_id(self, call: PeerCall, text: str) -> int:
        return self._shard_of_id(text)

    def _by_key(self, call: PeerCall, subject: str, key: str) -> int:
        return shard_of(subject, key, self._peers.count)

    def _heartbeat(self, call: PeerCall, key: str) -> int:
        return shard_of_heartbeat(key, self._peers.count)

    def _by_name(self, call: PeerCall, name: str, _verb: str = "") -> int:
        return shard_of_name(name, self._peers.count)

    def _of_shard(self, call: PeerCall) -> int:
        """Imports and archives, which every shard has of its own."""
        shard = self._named_shard(call)
        if shard is None:
            raise self._which_shard()
        return shard

    def _import(self, call: PeerCall) -> "int | Awaitable[PeerAnswer]":
        shard = self._named_shard(call)
        return self._import_of_any(call) if shard is None else shard

    async def _import_of_any(self, call: PeerCall) -> PeerAnswer:
        """The one that has it. Each shard gives its imports their ids."""
        answers = await self._ask_all(call)
        found = [one for one in answers.values() if one.status == 200]
        if len(found) > 1:
            raise self._which_shard()
        refused_by = self._refusal(answers, (_MISSING,))
        return found[0] if refused_by is None else refused_by

    def _shard_of_id(self, text: str) -> int:
        """The own one says of what is no id, or of no shard, that there is no such message."""
        try:
            shard = shard_of_id(text)
        except NotFoundError:
            return self._peers.own
        return shard if shard < self._peers.count else self._peers.own

    def _named_shard(self, call: PeerCall) -> int | None:
        """What `shard=` says. Raises InputError; AccessError before that."""
        if call.caller is not None:
            call.caller.require((Action.ADMIN,))
        text = _query(call).get("shard")
        if text is None:
            return None
        shard = int(text) if text.isascii() and text.isdigit() and len(text) < 6 else -1
        if not 0 <= shard < self._peers.count:
            raise self._which_shard()
        return shard

    def _which_shard(self) -> InputError:
        last = self._peers.count - 1
        return InputError(f"say which shard it is for: shard=0 to shard={last}", "/query/shard")

    def _adopt_import(self, call: PeerCall) -> "int | Awaitable[PeerAnswer]":
        """`shard=`, or the shard whose directory the manifest is in, from the root or from the
        directory of all shards on."""
        shard = self._named_shard(call)
        try:
            body = _read_row(call.body)
            manifest = msgspec.json.decode(body["manifest"], type=str)
        except (*UNREADABLE, KeyError):
            return self._peers.own
        parts = PurePosixPath(manifest).parts
        # DIR/shard-0001/imports/name.manifest
        directories = {shard_directory(n): n for n in range(self._peers.count)}
        within = directories.get(parts[-3]) if len(parts) > 2 else None
        if within is None and shard is None:
            raise InputError(
                "the manifest is in no shard's directory; say which one it is for, with shard=",
                "/manifest",
            )
        if within is not None and shard not in (within, None):
            raise InputError(f"the manifest is not one of shard {shard}", "/manifest")
        to = shard if within is None else within
        assert to is not None
        if within is None or len(parts) > 3:
            return to
        body["manifest"] = msgspec.Raw(encode("/".join(parts[1:])))
        return self._forward(to, _with_body(call, encode(body)), call)

    # ── calls for many messages ────────────────────────────────────────────────────────────────

    def _cancel_many(self, call: PeerCall) -> "int | Awaitable[PeerAnswer]":
        try:
            request = _read_cancel(call.body)
        except UNREADABLE:
            return self._peers.own
        parts = self._parts_of(request)
        if len(parts) <= 1:
            return next(iter(parts), self._peers.own)
        return self._cancel_parts(call, request, parts)

    def _parts_of(self, request: CancelBody) -> dict[int, _Part]:
        parts: dict[int, _Part] = {}
        for index, text in enumerate(request.ids):
            part = parts.setdefault(self._shard_of_id(text), _Part([], [], []))
            part.ids.append(text)
            part.indexes.append(index)
        count = self._peers.count
        for index, one in enumerate(request.keys, len(request.ids)):
            part = parts.setdefault(shard_of(one.subject, one.key, count), _Part([], [], []))
            part.keys.append(one)
            part.indexes.append(index)
        return parts

    async def _cancel_parts(
        self, call: PeerCall, request: CancelBody, parts: Mapping[int, _Part]
    ) -> PeerAnswer:
        """A part that is refused as a whole is so for each message of it."""
        calls = {
            shard: _with_body(call, encode(CancelBody(part.ids, part.keys)))
            for shard, part in parts.items()
        }
        answers = await self._ask(calls)
        refusals = [one for one in answers.values() if one.status != 200]
        if len(refusals) == len(answers) and len({one.status for one in refusals}) == 1:
            return max(refusals, key=_is_unknown)
        results: list[Any] = [
            *(CancelResultDocument(id=text) for text in request.ids),
            *(CancelResultDocument(subject=one.subject, key=one.key) for one in request.keys),
        ]
        for shard, answer in answers.items():
            indexes = parts[shard].indexes
            if answer.status == 200:
                found = _read_results(answer.body).results
                for index, result in zip(indexes, found, strict=True):
                    results[index] = result
            else:
                why = _detail(answer)
                for index in indexes:
                    results[index].error = why
        return _json(encode({"results": results}))

    # ── lists ──────────────────────────────────────────────────────────────────────────────────

    async def _pending(self, call: PeerCall) -> PeerAnswer:
        return await self._page(call, _PENDING)

    async def _dead_letters(self, call: PeerCall) -> PeerAnswer:
        # One that was deleted is known where it left some; and a token may not read what is left
        # of every namesake.
        return await self._page(call, _DEAD_LETTERS, passed_over=(_FORBIDDEN, _MISSING))

    def _archives(self, call: PeerCall) -> "int | Awaitable[PeerAnswer]":
        shard = self._named_shard(call)
        return self._page(call, _ARCHIVES) if shard is None else shard

    async def _page(
        self, call: PeerCall, paged: PagedList, passed_over: Sequence[int] = ()
    ) -> PeerAnswer:
        """A page of a list of all shards; see `pages`."""
        count, query = self._peers.count, _query(call)
        cursor = query.pop("cursor", None)
        headers = (*call.headers, (PLACES_HEADER.encode(), b"1"))
        calls = {shard: call._replace(headers=headers) for shard in range(count)}
        if cursor is not None:
            try:
                spot = paged.spot(cursor, count)
            except InputError:
                query["cursor"] = _NOT_A_CURSOR
                refused = call._replace(query=urlencode(query).encode())
                return await self._peers.ask(self._peers.own, refused)
            for shard, one in calls.items():
                query["cursor"] = paged.cursor_of(spot, shard)
                calls[shard] = one._replace(query=urlencode(query).encode())
        answers = await self._ask(calls)
        refused_by = self._refusal(answers, passed_over)
        if refused_by is not None:
            return refused_by
        pages = [
            _read_page(one.body) if one.status == 200 else ShardPageDocument([], [], None, 0)
            for _, one in sorted(answers.items())
        ]
        limit = max(page.limit for page in pages)
        if paged is _ARCHIVES:
            for shard, page in enumerate(pages):
                page.items = [_with_shard(item, shard) for item in page.items]
        items, following = merge_pages(pages, limit, self._settings.answer_max_bytes)
        document: dict[str, Any] = {
            paged.name: items,
            "cursor": following and write_cursor(following, count),
        }
        if paged is _ARCHIVES:
            document = {"archive": self._settings.archive, **document}
        return _json(encode(document))

    async def _named(self, call: PeerCall, field: str) -> PeerAnswer:
        """Each name is in one shard alone, so a name is a place in the list of each and of all."""
        answers = await self._ask_all(call)
        refused_by = self._refusal(answers)
        if refused_by is not None:
            return refused_by
        pages = [_read_row(one.body) for one in answers.values()]
        cursors = [msgspec.json.decode(page["cursor"], type=str | None) for page in pages]
        # Behind the first end of a page there may be more than the pages show.
        end = min((one for one in cursors if one is not None), default=None)
        rows = {
            msgspec.json.decode(row["name"], type=str): row
            for page in pages
            for row in msgspec.json.decode(page[field], type=list[_Row])
        }
        names = sorted(name for name in rows if end is None or name <= end)
        shown = names[: _limit(call)]
        total_bytes = 0
        for number, name in enumerate(shown):
            total_bytes += sum(map(len, rows[name].values()))
            if number and total_bytes > self._settings.answer_max_bytes:
                shown = shown[:number]
                break
        cursor = shown[-1] if len(shown) < len(names) else end
        return _json(encode({field: [rows[name] for name in shown], "cursor": cursor}))

    async def _counted(self, call: PeerCall, field: str) -> PeerAnswer:
        """A name may be in many shards, with counts of its own in each."""
        answers = await self._ask_all(call)
        refused_by = self._refusal(answers)
        if refused_by is not None:
            return refused_by
        pages = [msgspec.json.decode(one.body) for one in answers.values()]
        # Behind the first end of a page there may be more than the pages show.
        end = min((page["cursor"] for page in pages if page["cursor"] is not None), default=None)
        added = add_by_name(page[field] for page in pages)
        names = sorted(name for name in added if end is None or name <= end)
        shown = names[: _limit(call)]
        cursor = shown[-1] if len(shown) < len(names) else end
        return _json(encode({field: [added[name] for name in shown], "cursor": cursor}))

    async def _subjects(self, call: PeerCall) -> PeerAnswer:
        return await self._counted(call, "subjects")

    async def _dead_letter_counts(self, call: PeerCall) -> PeerAnswer:
        return await self._counted(call, "subscriptions")

    # ── sums ───────────────────────────────────────────────────────────────────────────────────

    async def _stats(self, call: PeerCall) -> PeerAnswer:
        answers = await self._ask_all(call)
        return self._refusal(answers) or _json(
            encode(add_stats([_read_stats(one.body) for one in answers.values()]))
        )

    async def _forecast(self, call: PeerCall) -> PeerAnswer:
        answers = await self._ask_all(call)
        return self._refusal(answers) or _json(
            encode(add_forecasts(_read_forecast(one.body) for one in answers.values()))
        )

    async def _metrics(self, call: PeerCall) -> PeerAnswer:
        """What is away is said, and the rest is given: alerts have to tell one shard from all."""
        answers = await self._ask_all(call)
        own = answers[self._peers.own]
        if own.status != 200:
            return own
        texts = {
            shard: one.body.decode() if one.status == 200 else None
            for shard, one in sorted(answers.items())
        }
        content_type = dict(own.headers)[b"content-type"]
        return _answer(200, merge_metrics(texts).encode(), content_type)

    async def _subscriptions(self, call: PeerCall) -> PeerAnswer:
        """All of them are in every shard, but for the moment in which one is made."""
        answers = await self._ask_all(call)
        refused_by = self._refusal(answers)
        if refused_by is not None:
            return refused_by
        own, *others = (_read_subscriptions(one.body) for one in answers.values())
        by_name = [{bytes(one["name"]): one for one in some.subscriptions} for some in others]
        document = _Subscriptions(
            [
                add_waiting(one, [some[name] for some in by_name if name in some])
                for one in own.subscriptions
                for name in [bytes(one["name"])]
            ],
            own.cursor,
        )
        return _json(encode(document))

    async def _subscription(self, call: PeerCall) -> PeerAnswer:
        answers = await self._ask_all(call)
        own = answers.pop(self._peers.own)
        if own.status != 200:
            return own
        refused_by = self._refusal(answers, (_FORBIDDEN, _MISSING), may_be_none=True)
        if refused_by is not None:
            return refused_by
        others = [_read_row(one.body) for one in answers.values() if one.status == 200]
        return _json(encode(add_waiting(_read_row(own.body), others)))

    async def _define(self, call: PeerCall, name: str, _verb: str = "") -> PeerAnswer:
        """The home decides; what waits for the subscription is counted in all shards."""
        answer = await self._peers.ask(HOME, call)
        if answer.status not in (200, 201):
            return answer
        asked = PeerCall("GET", f"/v1/subscriptions/{name}", caller=call.caller)
        others = (shard for shard in range(self._peers.count) if shard != HOME)
        answers = await self._ask(dict.fromkeys(others, asked))
        documents = [_read_row(one.body) for one in answers.values() if one.status == 200]
        body = encode(add_waiting(_read_row(answer.body), documents))
        return _answer(answer.status, body, JSON)

    # ── changes in all shards ──────────────────────────────────────────────────────────────────

    async def _event(self, call: PeerCall) -> PeerAnswer:
        return self._added_up(await self._ask_all(call), ("cancelled", "fired"))

    def _redrive(self, call: PeerCall) -> "int | Awaitable[PeerAnswer]":
        """What cannot be read goes to all: each shard says what is wrong with it, if it is."""
        try:
            wanted = _read_redrive(call.body)
        except UNREADABLE:
            wanted = None
        if wanted is None or wanted.ids is None:
            return self._redrive_in(call, range(self._peers.count))
        # Not cut into parts: a shard passes over ids that are not its own.
        shards = {self._shard_of_id(text) for text in wanted.ids}
        if len(shards) <= 1:
            return next(iter(shards), self._peers.own)
        return self._redrive_in(call, shards)

    async def _redrive_in(self, call: PeerCall, shards: Iterable[int]) -> PeerAnswer:
        answers = await self._ask(dict.fromkeys(shards, call))
        return self._added_up(answers, ("redriven",), (_FORBIDDEN, _MISSING))

    def _added_up(
        self,
        answers: Mapping[int, PeerAnswer],
        names: Sequence[str],
        passed_over: Sequence[int] = (),
    ) -> PeerAnswer:
        """The counts of all; or the answer of one that did not do it, and who did."""
        done = sorted(shard for shard, one in answers.items() if one.status == 200)
        documents = [_read_row(answers[shard].body) for shard in done]
        counts = {name: sum(int(one[name]) for one in documents) for name in names}
        refused_by = self._refusal(answers, passed_over)
        if refused_by is None:
            return _json(encode(counts))
        is_unknown = any(map(_is_unknown, answers.values()))
        if not done and is_unknown == _is_unknown(refused_by):
            return refused_by
        shards = ", ".join(map(str, done))
        what = ", ".join(f"{name}: {count}" for name, count in counts.items())
        problem = msgspec.json.decode(refused_by.body)
        if done:
            problem["detail"] += f"; it is done in shard {shards} ({what}), and may be asked again"
        if is_unknown:
            problem["outcome"] = "unknown"
        return _answer(
            refused_by.status,
            encode(problem),
            MEDIA_TYPE.encode(),
            [
                header
                for header in refused_by.headers
                if header[0] not in (b"content-type", b"content-length")
            ],
        )

    # ── backups ────────────────────────────────────────────────────────────────────────────────

    async def _begin_backup(self, call: PeerCall) -> PeerAnswer:
        """The own shard gives the name; if another refuses, nothing is left of it."""
        own = await self._peers.ask(self._peers.own, call)
        if own.status != _ACCEPTED:
            return own
        begun = _read_backup(own.body)
        verify = _read_wanted(call.body).verify if call.body else True
        body = encode({"name": begun.name, "verify": verify})
        wanted = call._replace(headers=((b"content-type", JSON),), body=body)
        answers = await self._ask(dict.fromkeys(self._others(), wanted))
        taken = [shard for shard, one in answers.items() if one.status == _ACCEPTED]
        if len(taken) < len(answers):
            # What another has under that name already stays.
            given_up = PeerCall("DELETE", f"/v1/backups/{begun.name}", caller=call.caller)
            await self._ask(dict.fromkeys((self._peers.own, *taken), given_up))
            return next(one for one in answers.values() if one.status != _ACCEPTED)
        parts = {self._peers.own: begun}
        parts |= {shard: _read_backup(one.body) for shard, one in answers.items()}
        location = [one for one in own.headers if one[0] == b"location"]
        return _answer(_ACCEPTED, encode(add_backup(dict(sorted(parts.items())))), JSON, location)

    async def _backups(self, call: PeerCall) -> PeerAnswer:
        answers = await self._ask_all(call)
        refused_by = self._refusal(answers)
        if refused_by is not None:
            return refused_by
        lists = {shard: _read_backups(one.body).backups for shard, one in sorted(answers.items())}
        return _json(encode(BackupListDocument(add_backups(lists))))

    async def _backup(self, call: PeerCall) -> PeerAnswer:
        answers = await self._ask_all(call)
        refused_by = self._refusal(answers, (_MISSING,))
        if refused_by is not None:
            return refused_by
        parts = {
            shard: _read_backup(one.body) if one.status == 200 else None
            for shard, one in sorted(answers.items())
        }
        return _json(encode(add_backup(parts)))

    async def _delete_backup(self, call: PeerCall) -> PeerAnswer:
        answers = await self._ask_all(call)
        refusals = [one for one in answers.values() if one.status not in (_DELETED, _MISSING)]
        if refusals:
            return refusals[0]
        return min(answers.values(), key=lambda one: one.status)

    # ── asking ─────────────────────────────────────────────────────────────────────────────────

    def _others(self) -> Iterator[int]:
        return (shard for shard in range(self._peers.count) if shard != self._peers.own)

    async def _ask_all(self, call: PeerCall) -> dict[int, PeerAnswer]:
        return await self._ask(dict.fromkeys((self._peers.own, *self._others()), call))

    async def _ask(self, calls: Mapping[int, PeerCall]) -> dict[int, PeerAnswer]:
        """Have shards answer, all at the same time."""
        asked = (self._peers.ask(shard, call) for shard, call in calls.items())
        return dict(zip(calls, await asyncio.gather(*asked), strict=True))

    def _refusal(
        self,
        answers: Mapping[int, PeerAnswer],
        passed_over: Sequence[int] = (),
        *,
        may_be_none: bool = False,
    ) -> PeerAnswer | None:
        """Why there is no answer of all: one that is not 200, the own one before others.

        With statuses `passed_over`, in the order in which they count, such a shard has nothing to
        do with it, unless none has (`may_be_none`: not even then)."""
        own = self._peers.own
        refusals = [
            answers[shard]
            for shard in sorted(answers, key=lambda shard: (shard != own, shard))
            if answers[shard].status != 200
        ]
        for one in refusals:
            if one.status not in passed_over:
                return one
        if may_be_none or len(refusals) < len(answers):
            return None
        return min(refusals, key=lambda one: passed_over.index(one.status))


_Serve = Callable[..., int | Awaitable[PeerAnswer]]
"""Of a router, a call and the values in its path: which shard it is for, or the answer."""
_ROUTES: Final[Sequence[tuple[str, str, _Serve]]] = (
    ("GET DELETE PATCH", r"/v1/messages/([^/]+)", Router._by_id),
    ("GET", r"/v1/messages/([^/]+)/attempts", Router._by_id),
    ("POST", r"/v1/messages/([^/]+)/replay", Router._by_id),
    ("POST", r"/v1/messages/cancel", Router._cancel_many),
    ("GET DELETE PATCH PUT", r"/v1/subjects/([^/]+)/keys/(.*)", Router._by_key),
    ("GET", r"/v1/subjects", Router._subjects),
    ("GET", r"/v1/subjects/[^/]+/messages", Router._pending),
    ("PUT GET DELETE", r"/v1/heartbeats/(.*)", Router._heartbeat),
    ("GET", r"/v1/(schedules|sources)", Router._named),
    ("PUT GET DELETE", r"/v1/(?:schedules|sources)/([^/]+)", Router._by_name),
    ("POST", r"/v1/schedules/([^/]+)/(pause|resume|trigger)", Router._by_name),
    ("POST", r"/v1/sources/([^/]+)/(pause|resume)", Router._by_name),
    ("POST", r"/v1/events/.*", Router._event),
    ("GET", r"/v1/stats", Router._stats),
    ("GET", r"/v1/forecast", Router._forecast),
    ("GET", r"/metrics", Router._metrics),
    ("GET", r"/v1/dead-letters", Router._dead_letter_counts),
    ("GET", r"/v1/subscriptions", Router._subscriptions),
    ("GET", r"/v1/subscriptions/[^/]+", Router._subscription),
    ("PUT DELETE", r"/v1/subscriptions/([^/]+)", Router._define),
    ("POST", r"/v1/subscriptions/([^/]+)/(pause|resume)", Router._define),
    ("GET", r"/v1/subscriptions/[^/]+/dead-letters", Router._dead_letters),
    ("POST", r"/v1/subscriptions/[^/]+/dead-letters/redrive", Router._redrive),
    ("DELETE", r"/v1/subscriptions/[^/]+/dead-letters/([^/]+)", Router._by_id),
    ("POST", r"/v1/imports", Router._adopt_import),
    ("PUT", r"/v1/imports/[^/]+", Router._of_shard),
    ("GET", r"/v1/imports/[^/]+(?:/duplicates)?", Router._import),
    ("GET", r"/v1/archives", Router._archives),
    ("PUT", r"/v1/archives/[^/]+", Router._of_shard),
    ("POST", r"/v1/backups", Router._begin_backup),
    ("GET", r"/v1/backups", Router._backups),
    ("GET", r"/v1/backups/[^/]+", Router._backup),
    ("DELETE", r"/v1/backups/[^/]+", Router._delete_backup),
)
_COMPILED: Final = [
    (frozenset(methods.split()), re.compile(pattern, re.DOTALL), serve)
    for methods, pattern, serve in _ROUTES
]


def _find(call: PeerCall) -> tuple[_Serve, tuple[str, ...]] | None:
    for methods, pattern, serve in _COMPILED:
        if call.method in methods and (found := pattern.fullmatch(call.path)):
            return serve, found.groups()
    return None


def _query(call: PeerCall) -> dict[str, str]:
    """The query as FastAPI reads it: the last of several with the same name counts."""
    return dict(parse_qsl(call.query.decode("latin-1"), keep_blank_values=True))


def _limit(call: PeerCall) -> int:
    """How many rows a page has at most, where all shards have accepted what the call says: FastAPI
    reads `5.0` as a whole number."""
    text = _query(call).get("limit", str(NAMED_PAGE_MAX))
    try:
        return int(text)
    except ValueError:
        return int(float(text))


def _with_body(call: PeerCall, body: bytes) -> PeerCall:
    headers = tuple(one for one in call.headers if one[0] != b"content-length")
    return call._replace(headers=headers, body=body)


def _with_shard(item: msgspec.Raw, shard: int) -> msgspec.Raw:
    return msgspec.Raw(encode(_read_row(item) | {"shard": msgspec.Raw(b"%d" % shard)}))


def _detail(answer: PeerAnswer) -> str:
    """What a problem document says."""
    return str(msgspec.json.decode(answer.body)["detail"])


def _is_unknown(answer: PeerAnswer) -> bool:
    """Whether nobody knows what became of the call."""
    return answer.status >= 400 and msgspec.json.decode(answer.body).get("outcome") == "unknown"


def _json(body: bytes) -> PeerAnswer:
    return _answer(200, body, JSON)


def _problem(error: DelayServerError) -> PeerAnswer:
    problem = problem_of(error)
    more = [(name.encode(), value.encode()) for name, value in problem.headers.items()]
    return _answer(problem.status, problem.encode(), MEDIA_TYPE.encode(), more)


def _answer(
    status: int, body: bytes, content_type: bytes, more: Iterable[tuple[bytes, bytes]] = ()
) -> PeerAnswer:
    headers: Fields = (
        (b"content-length", b"%d" % len(body)),
        (b"content-type", content_type),
        *more,
    )
    return PeerAnswer(status, headers, body)
