"""All shards of a server, asked at the same time; and their answers put together.

An answer that is read from all shards is whole; if a shard cannot give its part, the answer is the
error of that shard. A change in all of them names the shards that have done it: it may be asked
again.

Cost: a call to each shard. Threads: belongs to the event loop.
"""

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from urllib.parse import parse_qsl

import msgspec

from delayserver.api.documents import encode
from delayserver.api.hot.answers import JSON
from delayserver.api.problems import MEDIA_TYPE
from delayserver.errors import NotFoundError
from delayserver.records.sharding import shard_of_id
from delayserver.shards.peers import Fields, PeerAnswer, PeerCall, RoutedPeers

Row = dict[str, msgspec.Raw]
"""A document whose fields stay as they are written."""
MISSING = 404
FORBIDDEN = 403

read_row = msgspec.json.Decoder(Row).decode


class AllShards:
    """The own shard and the others."""

    def __init__(self, peers: RoutedPeers) -> None:
        self._peers = peers
        self.own = peers.own
        self.count = peers.count
        self.ask_one = peers.ask

    async def forward(self, to: int, call: PeerCall, as_asked: PeerCall) -> PeerAnswer:
        """The answer of another shard to all of a client's call, or its name."""
        return self._peers.misdirected(to, as_asked) or await self._peers.ask(to, call)

    def others(self) -> Iterator[int]:
        """All but the own one."""
        return (shard for shard in range(self.count) if shard != self.own)

    async def ask_all(self, call: PeerCall) -> dict[int, PeerAnswer]:
        """Have all shards answer the same call, the own one first."""
        return await self.ask(dict.fromkeys((self.own, *self.others()), call))

    async def ask(self, calls: Mapping[int, PeerCall]) -> dict[int, PeerAnswer]:
        """Have shards answer, all at the same time."""
        asked = (self._peers.ask(shard, call) for shard, call in calls.items())
        return dict(zip(calls, await asyncio.gather(*asked), strict=True))

    def refusal(
        self,
        answers: Mapping[int, PeerAnswer],
        passed_over: Sequence[int] = (),
        *,
        may_be_none: bool = False,
    ) -> PeerAnswer | None:
        """Why there is no answer of all: one that is not 200, the own one before others.

        With statuses `passed_over`, in the order in which they count, such a shard has nothing to
        do with it, unless none has (`may_be_none`: not even then)."""
        own = self.own
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

    def added_up(
        self,
        answers: Mapping[int, PeerAnswer],
        names: Sequence[str],
        passed_over: Sequence[int] = (),
    ) -> PeerAnswer:
        """The counts of all; or the answer of one that did not do it, and who did."""
        done = sorted(shard for shard, one in answers.items() if one.status == 200)
        documents = [read_row(answers[shard].body) for shard in done]
        counts = {name: sum(int(one[name]) for one in documents) for name in names}
        refused_by = self.refusal(answers, passed_over)
        if refused_by is None:
            return json_answer(encode(counts))
        may_be_done = any(map(is_unknown, answers.values()))
        if not done and may_be_done == is_unknown(refused_by):
            return refused_by
        shards = ", ".join(map(str, done))
        what = ", ".join(f"{name}: {count}" for name, count in counts.items())
        problem = msgspec.json.decode(refused_by.body)
        if done:
            problem["detail"] += f"; it is done in shard {shards} ({what}), and may be asked again"
        if may_be_done:
            problem["outcome"] = "unknown"
        return made_answer(
            refused_by.status,
            encode(problem),
            MEDIA_TYPE.encode(),
            [
                header
                for header in refused_by.headers
                if header[0] not in (b"content-type", b"content-length")
            ],
        )

    def shard_of_id(self, text: str) -> int:
        """The own shard if `text` is no id, or names no shard: that answers that it is missing."""
        try:
            shard = shard_of_id(text)
        except NotFoundError:
            return self.own
        return shard if shard < self.count else self.own


def query(call: PeerCall) -> dict[str, str]:
    """The query as FastAPI reads it: the last of several with the same name counts."""
    return dict(parse_qsl(call.query.decode("latin-1"), keep_blank_values=True))


def with_body(call: PeerCall, body: bytes) -> PeerCall:
    """The call with another body."""
    headers = tuple(one for one in call.headers if one[0] != b"content-length")
    return call._replace(headers=headers, body=body)


def detail(answer: PeerAnswer) -> str:
    """The fields of a problem document."""
    return str(msgspec.json.decode(answer.body)["detail"])


def is_unknown(answer: PeerAnswer) -> bool:
    """Whether the outcome of the call is unknown."""
    return answer.status >= 400 and msgspec.json.decode(answer.body).get("outcome") == "unknown"


def json_answer(body: bytes) -> PeerAnswer:
    """Status 200."""
    return made_answer(200, body, JSON)


def made_answer(
    status: int, body: bytes, content_type: bytes, more: Iterable[tuple[bytes, bytes]] = ()
) -> PeerAnswer:
    """An answer with these headers, and `more`."""
    headers: Fields = (
        (b"content-length", b"%d" % len(body)),
        (b"content-type", content_type),
        *more,
    )
    return PeerAnswer(status, headers, body)
