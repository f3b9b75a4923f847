"""Batches over several shards: all or none in each, answered as one.

    body ──▶ Intake ──▶ columns ──▶ of one shard? ──▶ published there, or 421 where that is wanted
                                ──▶ else ──▶ a part for each, at the same time ──▶ one answer

A batch is read and checked once, where it came in: an error in one of its messages refuses them
all. The parts go on as columns, and each is accepted whole or refused whole by its shard. (A commit
in two phases over several logs is not worth it: a message with a key is published once, however
often its batch is repeated. A client that needs more can send `atomic=true`: a batch that needs
more than one shard is then refused before anything is done.) Messages without a key or a group go
to the shard that most of the others go to.

A client may ask not to be forwarded. It is then told which shard a batch belongs to, if the whole
batch belongs to one other shard; a batch that has to be cut is cut for every client.

Cost: 0.6 µs a message more than a server alone for those that stay, 3 µs for those that go.
Threads: belongs to the event loop.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable

import msgspec

from delayserver.api.hot.answers import JSON, Answer, header
from delayserver.api.hot.asgi import Ack, acknowledged, parse_ack, ready_to_read
from delayserver.api.hot.paths import BATCH_PATH
from delayserver.api.hot.publish import Hot
from delayserver.api.problems import FieldError, ProblemDocument
from delayserver.decisions.new_messages import PublishBatch
from delayserver.errors import DelayServerError, InputError, OverloadedError
from delayserver.records.sharding import shard_of_message
from delayserver.records.tracecontext import trace_of
from delayserver.server.calls import Calls
from delayserver.shards.link import answer_of, failed
from delayserver.shards.peers import PeerAnswer, PeerCall, RoutedPeers
from delayserver.wire.messages import BatchDocument
from storage.errors import StorageError

PART_PATH = "/internal/batch"
OPTIONS_PART_PATH = "/internal/batch/options"
"""For a part whose messages have options: a node that would not see them must not take it."""
_TRY_AGAIN = frozenset({429, 503, 504, 507})
"""Statuses that a repetition may mend."""
_NOT_FOUND = 404
_UPDATE_MS = 60_000
"""After which a node of an older version may be a newer one."""
_NOT_IN_TIME = 504
"""Accepted: it may become durable."""
_JSON_FIELDS = ((b"content-type", JSON),)

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(PublishBatch).decode
_read_document = msgspec.json.Decoder(BatchDocument).decode
_read_problem = msgspec.json.Decoder(ProblemDocument).decode


class Batches:
    """The batches that come to one shard of several."""

    def __init__(self, calls: Calls, hot: Hot, peers: RoutedPeers) -> None:
        self._calls = calls
        self._hot = hot
        self._peers = peers

    async def answer(self, call: PeerCall) -> PeerAnswer | None:
        """POST /v1/messages/batch"""
        if call.method != "POST" or call.path != BATCH_PATH:
            return None
        try:
            with self._hot.bodies.holding(len(call.body)):
                return await self._publish_all(call)
        except (DelayServerError, StorageError) as error:
            return failed(error)

    async def answer_part(self, call: PeerCall) -> PeerAnswer | None:
        """The part of a batch that another shard has read."""
        if call.path not in (PART_PATH, OPTIONS_PART_PATH):
            return None
        try:
            with self._hot.bodies.holding(len(call.body)):
                return await self._publish(_decode(call.body), call._replace(body=b""))
        except (DelayServerError, StorageError) as error:
            return failed(error)

    async def _publish_all(self, call: PeerCall) -> PeerAnswer:
        ack = _ack_of(call)  # An error in it is reported before anything is done.
        if call.caller is not None:
            self._hot.authorize(BATCH_PATH, None, call.caller)
        content_type, length = header(call.headers, b"content-type"), len(call.body)
        await ready_to_read(self._hot.intake, content_type)
        reading = self._hot.reading_batch(call.body, content_type, call.caller)
        call = call._replace(body=b"")
        batch = await self._hot.bodies.run(length, reading)
        parts = _parts(batch, self._peers.count, self._peers.own)
        if len(parts) == 1 and self._peers.own in parts:
            return await self._publish(batch, call)
        if ack is not None and ack.is_atomic and len(parts) > 1:
            raise InputError(
                f"the messages belong to {len(parts)} shards, and a batch is all or none in each: "
                "leave `atomic` out, or send a batch for each shard",
                "/query/atomic",
            )
        if len(parts) == 1:
            (shard,) = parts
            told = self._peers.misdirected(shard, call)
            return told or await self._ask(shard, batch, call)
        asked = [self._ask(shard, batch.select(which), call) for shard, which in parts.items()]
        answers = await asyncio.gather(*asked)
        return _joined(len(batch), parts, answers)

    def _ask(self, shard: int, batch: PublishBatch, call: PeerCall) -> Awaitable[PeerAnswer]:
        if shard == self._peers.own:
            return self._publish_own(batch, call)
        if batch.options:
            return self._ask_with_options(shard, batch, call)
        part = call._replace(path=PART_PATH, body=_encode(batch), caller=None)
        return self._peers.ask(shard, part)

    async def _ask_with_options(
        self, shard: int, batch: PublishBatch, call: PeerCall
    ) -> PeerAnswer:
        part = call._replace(path=OPTIONS_PART_PATH, body=_encode(batch), caller=None)
        answer = await self._peers.ask(shard, part)
        if answer.status == _NOT_FOUND:
            return failed(
                OverloadedError(
                    f"the process of shard {shard} is of an older version, which does not know the "
                    "options of messages (ttl, group, to): update all nodes, then try again",
                    _UPDATE_MS,
                )
            )
        return answer

    async def _publish_own(self, batch: PublishBatch, call: PeerCall) -> PeerAnswer:
        try:
            return await self._publish(batch, call)
        except (DelayServerError, StorageError) as error:
            return failed(error)

    async def _publish(self, batch: PublishBatch, call: PeerCall) -> PeerAnswer:
        work = self._hot.answering_batch(batch, trace_of(call.headers))
        answer: Answer = await self._calls.slices.run(work)
        ack = _ack_of(call)
        if ack is not None and answer.status < 400:
            answer = await acknowledged(self._calls, answer, ack)
        elif answer.group is not None:
            await self._calls.durable(answer.group)
        return answer_of(answer)


def _ack_of(call: PeerCall) -> Ack | None:
    return parse_ack(call.query) if call.query else None


def _parts(batch: PublishBatch, count: int, own: int) -> dict[int, list[int]]:
    """The indexes of the messages of each shard that has some."""
    groups = [None if one is None else one.group for one in batch.options] or [None] * len(batch)
    shards = [
        shard_of_message(subject, key, group, count)
        for subject, key, group in zip(batch.subjects, batch.keys, groups, strict=True)
    ]
    known = Counter(shard for shard in shards if shard is not None)
    # The own shard is there for sure; else those that go anyway take them along.
    free = own if own in known or not known else known.most_common(1)[0][0]
    parts: dict[int, list[int]] = {}
    for index, shard in enumerate(shards):
        parts.setdefault(free if shard is None else shard, []).append(index)
    return parts or {own: []}


def _joined(count: int, parts: dict[int, list[int]], answers: list[PeerAnswer]) -> PeerAnswer:
    """The answers to all parts as one: a batch, or the worst problem and the durable ids."""
    indexes = list(parts.values())
    ids: list[str | None] = [None] * count
    duplicates, status = dict[int, int](), 200
    refusals: list[PeerAnswer] = []
    for (shard, which), answer in zip(parts.items(), answers, strict=True):
        if answer.status >= 400:
            refusals.append(answer)
            continue
        document = _read_document(answer.body)
        duplicates[shard] = document.duplicates
        status = max(status, answer.status)
        for index, message_id in zip(which, document.ids, strict=True):
            ids[index] = message_id
    if not refusals:
        known = [one for one in ids if one is not None]
        document = BatchDocument(count, sum(duplicates.values()), known, duplicates)
        return PeerAnswer(status, _JSON_FIELDS, msgspec.json.encode(document))
    # A refusal that no repetition mends is named first.
    worst = min(refusals, key=lambda one: one.status in _TRY_AGAIN)
    problem = _read_problem(worst.body)
    problem.errors = _errors(indexes, answers) or None
    accepted = sum(one is not None for one in ids)
    if not accepted:
        problem.ids = _accepted(count, indexes, answers) if worst.status == _NOT_IN_TIME else None
    else:
        problem.ids = ids
        problem.detail += (
            f" ({accepted} of {len(ids)} messages are durable nevertheless, `ids` names them: a "
            "batch is all or none in each shard, and may be repeated as a whole under its keys)"
        )
    if any(_is_unknown(one) for one in refusals):
        problem.outcome = "unknown"
    return worst._replace(body=msgspec.json.encode(problem))


def _is_unknown(refusal: PeerAnswer) -> bool:
    return refusal.status == _NOT_IN_TIME or bool(_read_problem(refusal.body).outcome)


def _accepted(count: int, parts: list[list[int]], answers: list[PeerAnswer]) -> list[str | None]:
    """The ids of the messages that may become durable, by their indexes in the whole batch."""
    ids: list[str | None] = [None] * count
    for which, answer in zip(parts, answers, strict=True):
        if answer.status == _NOT_IN_TIME:
            for index, message_id in zip(which, _read_problem(answer.body).ids or (), strict=True):
                ids[index] = message_id
    return ids


def _errors(parts: list[list[int]], answers: list[PeerAnswer]) -> list[FieldError]:
    """The errors of single messages, by their indexes in the whole batch."""
    errors: list[FieldError] = []
    for which, answer in zip(parts, answers, strict=True):
        if answer.status < 400:
            continue
        for error in _read_problem(answer.body).errors or ():
            _, index, *rest = error.pointer.split("/") if error.pointer else ("", "")
            if index.isdigit():
                pointer = "/".join(("", str(which[int(index)]), *rest))
                errors.append(FieldError(pointer, error.detail))
            else:
                errors.append(error)
    return errors
