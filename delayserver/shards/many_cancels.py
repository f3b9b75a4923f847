"""A cancel of many messages: each is cancelled at its shard, all at once.

Results come in the order of the call. Cost: a call to each shard that has some. Threads: belongs to
the event loop.
"""

from collections.abc import Awaitable, Mapping
from typing import Any, NamedTuple

import msgspec

from delayserver.api.documents import encode
from delayserver.records.sharding import shard_of
from delayserver.shards.all_shards import AllShards, detail, is_unknown, json_answer, with_body
from delayserver.shards.peers import PeerAnswer, PeerCall
from delayserver.wire.messages import CancelBody, CancelResultDocument
from delayserver.wire.reading import UNREADABLE


class _Results(msgspec.Struct):
    results: list[msgspec.Raw]


_read_cancel = msgspec.json.Decoder(CancelBody).decode
_read_results = msgspec.json.Decoder(_Results).decode


class _Part(NamedTuple):
    """The part for one shard of a call that names many messages."""

    indexes: list[int]
    """Which they are, in the order of the call."""
    ids: list[str]
    keys: list[Any]


class ManyCancels:
    """See the top of this module."""

    def __init__(self, all_shards: AllShards) -> None:
        self._all = all_shards

    def cancel_many(self, call: PeerCall) -> "int | Awaitable[PeerAnswer]":
        """The answer, or the one shard that has all of them."""
        try:
            request = _read_cancel(call.body)
        except UNREADABLE:
            return self._all.own
        parts = self._parts_of(request)
        if len(parts) <= 1:
            return next(iter(parts), self._all.own)
        return self._cancel_parts(call, request, parts)

    def _parts_of(self, request: CancelBody) -> dict[int, _Part]:
        parts: dict[int, _Part] = {}
        for index, text in enumerate(request.ids):
            part = parts.setdefault(self._all.shard_of_id(text), _Part([], [], []))
            part.ids.append(text)
            part.indexes.append(index)
        count = self._all.count
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
            shard: with_body(call, encode(CancelBody(part.ids, part.keys)))
            for shard, part in parts.items()
        }
        answers = await self._all.ask(calls)
        refusals = [one for one in answers.values() if one.status != 200]
        if len(refusals) == len(answers) and len({one.status for one in refusals}) == 1:
            return max(refusals, key=is_unknown)
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
                why = detail(answer)
                for index in indexes:
                    results[index].error = why
        return json_answer(encode({"results": results}))
