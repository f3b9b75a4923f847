"""Lists of all shards as one list, a page at a time: by place, by name, or by name and added up.

Cost: see `pages`; each shard's page comes whole. Threads: belongs to the event loop.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final
from urllib.parse import urlencode

import msgspec

from delayserver.api.documents import NAMED_PAGE_MAX, PLACES_HEADER, encode
from delayserver.config import Settings
from delayserver.errors import InputError
from delayserver.shards.all_shards import (
    FORBIDDEN,
    MISSING,
    AllShards,
    Row,
    json_answer,
    query,
    read_row,
)
from delayserver.shards.pages import PagedList, Place, merge_pages, write_cursor
from delayserver.shards.peers import PeerAnswer, PeerCall
from delayserver.shards.sums import add_by_name
from delayserver.wire.operations import ShardPageDocument

_SEQ_MAX: Final = 2**64 - 1
_DUE_MS_MAX: Final = 10**15 - 1
"""As many digits as a cursor may have."""


def _numbers(pattern: str) -> Callable[[str], Place | None]:
    """Reads a cursor of numbers with dashes between them."""
    form = re.compile(pattern)
    return lambda text: tuple(map(int, text.split("-"))) if form.fullmatch(text) else None


_PENDING: Final = PagedList(
    "messages",
    (_DUE_MS_MAX, _SEQ_MAX),
    lambda place: f"{place[0]}-{place[1]}",
    _numbers("[0-9]{1,15}-[0-9]{1,20}"),
)
_DEAD_LETTERS: Final = PagedList(
    "dead_letters", (_SEQ_MAX,), lambda place: str(place[0]), _numbers("[0-9]{1,20}")
)
_NOT_A_CURSOR: Final = "."
"""Refused by every list."""

_read_page = msgspec.json.Decoder(ShardPageDocument).decode


class MergedLists:
    """See the top of this module."""

    def __init__(self, all_shards: AllShards, settings: Settings) -> None:
        self._all = all_shards
        self.settings = settings

    async def pending(self, call: PeerCall) -> PeerAnswer:
        """The messages of a subject that wait."""
        return await self.page(call, _PENDING)

    async def dead_letters(self, call: PeerCall) -> PeerAnswer:
        """The dead letters of a subscription."""
        # A subscription that was deleted is known in each shard where it left some dead letters;
        # and a token may be forbidden to read those of one namesake and allowed those of another.
        return await self.page(call, _DEAD_LETTERS, passed_over=(FORBIDDEN, MISSING))

    async def page(
        self,
        call: PeerCall,
        paged: PagedList,
        passed_over: Sequence[int] = (),
        *,
        first: Mapping[str, object] = MappingProxyType({}),
        shows_shard: bool = False,
    ) -> PeerAnswer:
        """A page of a list of all shards; see `pages`. `first`: fields before the list;
        `shows_shard`: each item says its shard."""
        count, asked = self._all.count, query(call)
        cursor = asked.pop("cursor", None)
        headers = (*call.headers, (PLACES_HEADER.encode(), b"1"))
        calls = {shard: call._replace(headers=headers) for shard in range(count)}
        if cursor is not None:
            try:
                spot = paged.spot(cursor, count)
            except InputError:
                asked["cursor"] = _NOT_A_CURSOR
                refused = call._replace(query=urlencode(asked).encode())
                return await self._all.ask_one(self._all.own, refused)
            for shard, one in calls.items():
                asked["cursor"] = paged.cursor_of(spot, shard)
                calls[shard] = one._replace(query=urlencode(asked).encode())
        answers = await self._all.ask(calls)
        refused_by = self._all.refusal(answers, passed_over)
        if refused_by is not None:
            return refused_by
        pages = [
            _read_page(one.body) if one.status == 200 else ShardPageDocument([], [], None, 0)
            for _, one in sorted(answers.items())
        ]
        limit = max(page.limit for page in pages)
        if shows_shard:
            for shard, page in enumerate(pages):
                page.items = [_with_shard(item, shard) for item in page.items]
        items, following = merge_pages(pages, limit, self.settings.answer_max_bytes)
        document: dict[str, Any] = {
            **first,
            paged.name: items,
            "cursor": following and write_cursor(following, count),
        }
        return json_answer(encode(document))

    async def named(self, call: PeerCall, field: str) -> PeerAnswer:
        """Each name is in one shard alone, so a name is a place in the list of each and of all."""
        answers = await self._all.ask_all(call)
        refused_by = self._all.refusal(answers)
        if refused_by is not None:
            return refused_by
        pages = [read_row(one.body) for one in answers.values()]
        cursors = [msgspec.json.decode(page["cursor"], type=str | None) for page in pages]
        # Behind the first end of a page there may be more than the pages show.
        end = min((one for one in cursors if one is not None), default=None)
        rows = {
            msgspec.json.decode(row["name"], type=str): row
            for page in pages
            for row in msgspec.json.decode(page[field], type=list[Row])
        }
        names = sorted(name for name in rows if end is None or name <= end)
        shown = names[: _limit(call)]
        total_bytes = 0
        for number, name in enumerate(shown):
            total_bytes += sum(map(len, rows[name].values()))
            if number and total_bytes > self.settings.answer_max_bytes:
                shown = shown[:number]
                break
        cursor = shown[-1] if len(shown) < len(names) else end
        return json_answer(encode({field: [rows[name] for name in shown], "cursor": cursor}))

    async def _counted(self, call: PeerCall, field: str) -> PeerAnswer:
        """A name may be in many shards, with counts of its own in each."""
        answers = await self._all.ask_all(call)
        refused_by = self._all.refusal(answers)
        if refused_by is not None:
            return refused_by
        pages = [msgspec.json.decode(one.body) for one in answers.values()]
        # Behind the first end of a page there may be more than the pages show.
        end = min((page["cursor"] for page in pages if page["cursor"] is not None), default=None)
        added = add_by_name(page[field] for page in pages)
        names = sorted(name for name in added if end is None or name <= end)
        shown = names[: _limit(call)]
        cursor = shown[-1] if len(shown) < len(names) else end
        return json_answer(encode({field: [added[name] for name in shown], "cursor": cursor}))

    async def subjects(self, call: PeerCall) -> PeerAnswer:
        """All subjects."""
        return await self._counted(call, "subjects")

    async def dead_letter_counts(self, call: PeerCall) -> PeerAnswer:
        """How many dead letters each subscription has."""
        return await self._counted(call, "subscriptions")


def _limit(call: PeerCall) -> int:
    """The most rows of a page, after all shards have accepted the call. FastAPI reads `5.0` as a
    whole number, so this does, too."""
    text = query(call).get("limit", str(NAMED_PAGE_MAX))
    try:
        return int(text)
    except ValueError:
        return int(float(text))


def _with_shard(item: msgspec.Raw, shard: int) -> msgspec.Raw:
    return msgspec.Raw(encode(read_row(item) | {"shard": msgspec.Raw(b"%d" % shard)}))
