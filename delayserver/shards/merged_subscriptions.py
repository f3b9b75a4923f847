"""Subscriptions of a server of several shards: the own shard's, with the counts of all of them.

Their home defines them. Cost: a call to each shard. Threads: belongs to the event loop.
"""

import msgspec

from delayserver.api.documents import encode
from delayserver.api.hot.answers import JSON
from delayserver.shards.all_shards import (
    FORBIDDEN,
    MISSING,
    AllShards,
    Row,
    json_answer,
    made_answer,
    read_row,
)
from delayserver.shards.definitions import HOME
from delayserver.shards.peers import PeerAnswer, PeerCall
from delayserver.shards.sums import add_waiting


class _Subscriptions(msgspec.Struct):
    subscriptions: list[Row]
    cursor: str | None = None


_read_subscriptions = msgspec.json.Decoder(_Subscriptions).decode


class MergedSubscriptions:
    """See the top of this module."""

    def __init__(self, all_shards: AllShards) -> None:
        self._all = all_shards

    async def page(self, call: PeerCall) -> PeerAnswer:
        """All of them are in every shard, but for the moment in which one is made."""
        answers = await self._all.ask_all(call)
        refused_by = self._all.refusal(answers)
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
        return json_answer(encode(document))

    async def one(self, call: PeerCall) -> PeerAnswer:
        """One of them."""
        answers = await self._all.ask_all(call)
        own = answers.pop(self._all.own)
        if own.status != 200:
            return own
        refused_by = self._all.refusal(answers, (FORBIDDEN, MISSING), may_be_none=True)
        if refused_by is not None:
            return refused_by
        others = [read_row(one.body) for one in answers.values() if one.status == 200]
        return json_answer(encode(add_waiting(read_row(own.body), others)))

    async def define(self, call: PeerCall, name: str, _verb: str = "") -> PeerAnswer:
        """The home decides; messages that wait for the subscription are counted in all shards."""
        answer = await self._all.ask_one(HOME, call)
        if answer.status not in (200, 201):
            return answer
        asked = PeerCall("GET", f"/v1/subscriptions/{name}", caller=call.caller)
        others = (shard for shard in range(self._all.count) if shard != HOME)
        answers = await self._all.ask(dict.fromkeys(others, asked))
        documents = [read_row(one.body) for one in answers.values() if one.status == 200]
        body = encode(add_waiting(read_row(answer.body), documents))
        return made_answer(answer.status, body, JSON)
