"""The hot path: publish a message or a batch, renew a heartbeat, cancel. From request to answer.

    body ──▶ Intake ──▶ Calls.publish_… ──▶ answer, made at once ──▶ told when its group is durable

There are two ways in, with the same answers: `HotPath`, plain ASGI in front of FastAPI, for any
ASGI server, and `delayserver.api.hot.protocol`, which never enters ASGI. The calls stand in the
OpenAPI document like all others.

Publishes of several connections that come while a group is being synced are decided together, as
the columns of a batch: all are accepted, or else each is asked for alone, in their order, so that
none can be refused for another's sake. A batch is not made of their text, which would let one
request be read as part of another.

Cost: 3 µs for a publish that is decided together with others, 8 µs for one alone; 1.5 µs for a
message of a batch. Threads: belongs to the event loop.
"""

from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from itertools import accumulate
from typing import cast

import msgspec

from delayserver.api.conditions import entity_tag
from delayserver.api.exit import Exit
from delayserver.api.hot.answers import (
    JSON,
    Always,
    Answer,
    ForwardedClient,
    Responder,
    problem_answer,
    wire_of,
)
from delayserver.api.hot.belonging import Shards, shard_of_publish
from delayserver.api.hot.bodies import Bodies
from delayserver.api.hot.cancel import HotCancel
from delayserver.api.hot.consume import Consuming, Grants
from delayserver.api.hot.paths import (
    ALIVE_PATH,
    BATCH_PATH,
    CANCEL_PATH,
    HEARTBEATS_PATH,
    MESSAGES_PATH,
    REST_MAX_BYTES,
    ConsumerCall,
    is_arrow,
    is_packed,
)
from delayserver.api.intake import ENVELOPE_BYTES, Intake
from delayserver.decisions.new_messages import PublishBatch
from delayserver.decisions.publishing import Accepted
from delayserver.errors import DelayServerError, NotFoundError, OverloadedError
from delayserver.records.ids import COLUMNS_MIN, IdCodec
from delayserver.records.message_id import ID_DIGITS
from delayserver.records.tracecontext import Trace
from delayserver.security.tokens import Action, Caller
from delayserver.server.calls import Calls
from delayserver.slices import Work, at_once
from delayserver.times import format_time
from delayserver.wire.messages import BatchDocument, PublishedDocument
from delayserver.wire.operations import HealthDocument
from storage.errors import StorageError

_PUBLISH = (Action.PUBLISH,)
_JSON_FORM = JSON.decode()
RECORD_BYTES = 128
"""A message takes at most so many bytes in a group besides its own."""
_encode = msgspec.json.Encoder().encode

_EndSpan = Callable[[Mapping[str, str | int], str | None], None]
"""Ends the span of a publish: its attributes, and why it was in vain (None: it was not)."""
_Gathered = tuple[Responder, bytes, Caller | None]
"""A publish that waits to be decided together with others: who asked, and the request."""


class Hot:
    """The calls, apart from how they came in."""

    def __init__(
        self,
        calls: Calls,
        intake: Intake,
        exit_: Exit,
        shards: Shards,
        grants: Grants,
        check_whole: Callable[[], None],
    ) -> None:
        """`exit_`: answers leave through it. `shards`: calls may belong to others. `grants`: where
        consumers get messages. `check_whole` raises the error that keeps the shard from being
        ready though it is there."""
        self.consuming = Consuming(calls, intake, grants)
        self.exit = exit_
        self._check_whole = check_whole
        self._calls = calls
        self._shards = shards
        self.intake = intake
        self.bodies = Bodies(calls.slices, calls.settings.receiving_max_bytes)
        self.turns = calls.turns
        self.cancels = HotCancel(calls, shards)
        self._puts = {
            path: make(calls, intake) for part in calls.parts for path, make in part.hot.items()
        }
        """Answers of parts, by the path before a key."""
        self._gathered: list[_Gathered] = []
        self.gathered_bytes = 0
        """The bytes of publishes that wait to be decided together with others."""
        self._gathered_max_bytes = calls.settings.receiving_max_bytes
        self._group_max_bytes = calls.settings.group_max_bytes
        self.routes = shards.count > 1
        """Whether some calls belong to other shards: those that nobody gathers are routed first,
        behind ASGI."""
        self.gather = self._gather_routed if self.routes else self.gather_own
        """Publishes a message where it belongs, as `gather_own` does it here."""
        self.gathers = calls.telemetry is None
        """Whether publishes may be decided together: a span is for one of them."""
        # Base64 makes a third more of a body.
        self.one_max_bytes = calls.settings.body_max_bytes * 4 // 3 + ENVELOPE_BYTES
        self.batch_max_bytes = calls.settings.batch_max_bytes

    def answer(
        self,
        path: str,
        data: bytes,
        content_type: bytes,
        caller: Caller | None,
        trace: Trace | None,
    ) -> Answer:
        """Accept the messages in `data`, or refuse them. Without a `caller`, all is allowed."""
        if path.startswith(HEARTBEATS_PATH):
            key = path.removeprefix(HEARTBEATS_PATH)
            return self._answer_put(HEARTBEATS_PATH, key, data, caller)
        if path == BATCH_PATH:
            return at_once(self.answering(data, content_type, caller, trace))
        if self._calls.telemetry is not None:
            return at_once(self._in_span(path, trace, partial(self._publishing, data, caller)))
        try:
            return self._publish(data, caller, trace)
        except Exception as error:
            return problem_answer(error)

    def _publishing(self, data: bytes, caller: Caller | None, trace: Trace | None) -> Work[Answer]:
        yield from ()
        return self._publish(data, caller, trace)

    def answering(
        self, data: bytes, content_type: bytes, caller: Caller | None, trace: Trace | None
    ) -> Work[Answer]:
        """As `answer`, of a batch: in slices where it is long, or wrong."""

        def publish(trace: Trace | None) -> Work[Answer]:
            nonlocal data
            batch = yield from self.reading_batch(data, content_type, caller)
            data = b""  # Its messages are kept elsewhere from now on.
            return (yield from self._publishing_batch(batch, trace))

        return self._in_span(BATCH_PATH, trace, publish)

    def answering_batch(self, batch: PublishBatch, trace: Trace | None) -> Work[Answer]:
        """Accept a batch that was read, or tell why not."""
        return self._in_span(BATCH_PATH, trace, lambda trace: self._publishing_batch(batch, trace))

    def _in_span(
        self, path: str, trace: Trace | None, publish: Callable[[Trace | None], Work[Answer]]
    ) -> Work[Answer]:
        telemetry = self._calls.telemetry
        span = None if telemetry is None else telemetry.publish(trace)
        if span is not None:
            trace = span.trace
        try:
            answer = yield from publish(trace)
        except Exception as error:
            answer = problem_answer(error)
        if span is not None:
            _end_with(span.end, path, answer)
        return answer

    def authorize(self, path: str, call: ConsumerCall | None, caller: Caller) -> None:
        """Check a call before its body is there. Raises AccessError. If a caller with limited
        rights names a subscription that does not exist, it raises NotFoundError."""
        if caller.is_admin:
            return
        if call is not None:
            self.consuming.subscription(call, caller)
        elif path in (MESSAGES_PATH, BATCH_PATH) or path.startswith(HEARTBEATS_PATH):
            caller.require_some(Action.PUBLISH)

    def health(self, path: str) -> Answer:
        """GET /healthz: the process is alive. GET /readyz: it has recovered, and accepts."""
        if path == ALIVE_PATH:
            return Answer(200, _encode(HealthDocument("ok")))
        try:
            self.check_ready()
        except DelayServerError as error:
            return problem_answer(error)
        return Answer(200, _encode(HealthDocument("ready")))

    def check_ready(self) -> None:
        """Raises the error that keeps the server from accepting."""
        self._calls.admit(0)
        self._check_whole()

    def max_bytes(self, path: str) -> int:
        """The longest request that the path takes."""
        if path == CANCEL_PATH:
            return REST_MAX_BYTES
        return self.batch_max_bytes if path == BATCH_PATH else self.one_max_bytes

    def about_limit(self, path: str) -> str:
        """The setting that `max_bytes` follows from, for whoever sent more."""
        settings = self._calls.settings
        if path == CANCEL_PATH:
            return f"at most {REST_MAX_BYTES} bytes"
        if path == BATCH_PATH:
            return f"a batch has at most {settings.batch_max_bytes} bytes (batch_max_bytes)"
        return f"a body has at most {settings.body_max_bytes} bytes (body_max_bytes)"

    # ── publishes that come in together ────────────────────────────────────────────────────────

    def _gather_routed(self, responder: Responder, data: bytes, caller: Caller | None) -> None:
        shard = shard_of_publish(data, self._shards)
        if shard == self._shards.own:
            self.gather_own(responder, data, caller)
            return
        client = cast(ForwardedClient, responder)
        client.go_elsewhere()
        self._shards.publish(shard, data, caller, client.come_back)

    def gather_own(self, responder: Responder, data: bytes, caller: Caller | None) -> None:
        """Publish the message in `data`, together with others that come while the committer works.

        `responder` is given the result of `answer`, once it may be sent."""
        if not self._gathered:
            self._calls.decide_when_free(self.decide)
        self.gathered_bytes += len(data)
        if self.gathered_bytes > self._gathered_max_bytes:
            self.gathered_bytes -= len(data)
            error = OverloadedError(
                f"publishes that wait to be decided have {self._gathered_max_bytes} bytes together "
                "(receiving_max_bytes)"
            )
            responder.respond(wire_of(problem_answer(error)), None)
            return
        self._gathered.append((responder, data, caller))

    def decide(self) -> bool:
        """Answer the gathered publishes, as many as fit into one group; returns whether there are
        more."""
        gathered, self._gathered = self._gathered, []
        if self.gathered_bytes + RECORD_BYTES * len(gathered) > self._group_max_bytes:
            lengths = accumulate(len(data) + RECORD_BYTES for _, data, _ in gathered)
            count = max(1, sum(total <= self._group_max_bytes for total in lengths))
            gathered, self._gathered = gathered[:count], gathered[count:]
            if self._gathered:
                self._calls.decide_when_free(self.decide)
        self.gathered_bytes -= sum(len(data) for _, data, _ in gathered)
        if len(gathered) < COLUMNS_MIN or not self._decide_together(gathered):
            for responder, data, caller in gathered:
                answer = self.answer(MESSAGES_PATH, data, JSON, caller, None)
                responder.respond(wire_of(answer), answer.group)
        return bool(self._gathered)

    def _decide_together(self, gathered: list[_Gathered]) -> bool:
        """Column by column; False: there is something about one of them, and nothing was done."""
        calls = self._calls
        now_ms = calls.clock()
        responders, bodies, callers = zip(*gathered, strict=True)
        try:
            batch = self.intake.many(bodies, now_ms)
            if callers.count(None) < len(callers):
                for index, caller in enumerate(callers):
                    if caller is not None:
                        caller.require(_PUBLISH, batch.subjects[index])
                        caller.require_target(batch.to(index))
                        for subject in batch.outcome_subjects(index):
                            caller.require(_PUBLISH, subject)
            done = calls.publish_new(batch)
        except (DelayServerError, StorageError):
            return False
        except Exception as error:
            refusal = wire_of(problem_answer(error))
            for responder in responders:
                responder.respond(refusal, None)
            return True
        if done is None:
            return False
        group = done.group
        assert group is not None
        digits, seq = done.ids.hex().encode(), done.last_seq - len(batch)
        always = Always.fields
        answers: list[tuple[Responder, bytes]] = []
        at = 0
        for responder, subject, key, due_ms in zip(
            responders, batch.subjects, batch.keys, batch.dues_ms, strict=True
        ):
            message_id = digits[at : at + ID_DIGITS]
            at += ID_DIGITS
            seq += 1
            key_json = b"null" if key is None else _encode(key)
            form, length = _created(subject, due_ms)
            wire = form % (always, length + len(key_json), message_id, seq, message_id, key_json)
            responder.last_group = group
            answers.append((responder, wire))
        group.when_durable(partial(_tell_all, answers))
        return True

    def _publish(self, data: bytes, caller: Caller | None, trace: Trace | None) -> Answer:
        """POST /v1/messages"""
        calls = self._calls
        now_ms = calls.clock()
        message = self.intake.one(data, now_ms)
        if caller is not None:
            for subject in (message.subject, *message.outcome_subjects()):
                caller.require(_PUBLISH, subject)
            caller.require_target(message.payload.to)
        message.trace = trace
        published = calls.publish_one(message, now_ms)
        document = PublishedDocument(
            published.message_id,
            message.subject,
            message.payload.key,
            format_time(published.due_ms),
            self._state(published) if published.duplicate else "scheduled",
            published.duplicate,
        )
        if published.duplicate:
            status, version = 200, calls.version(published.seq)
        else:
            status, version = 201, str(published.seq)
        location = f"/v1/messages/{published.message_id}"
        fields = f"location: {location}\r\netag: {entity_tag(version)}\r\n".encode()
        group, seq = published.group, published.seq
        return Answer(status, _encode(document), fields, group=group, seq=seq)

    def _state(self, published: Accepted) -> str:
        """The first message with that key may have been delivered meanwhile."""
        found = self._calls.message_id(published.message_id)
        return self._calls.locate(found.seq, found.due_ms).state

    def reading_batch(
        self, data: bytes, content_type: bytes, caller: Caller | None
    ) -> Work[PublishBatch]:
        """The messages of a batch that the caller may publish; they are counted. Raises as the
        intake does, AccessError."""
        now_ms = self._calls.clock()
        if content_type in (JSON, b""):
            batch = yield from self.intake.reading(data, _JSON_FORM, now_ms)
        elif is_packed(content_type):
            data = yield from self.intake.unpacked(data, now_ms)
            batch = yield from self.intake.reading(data, _JSON_FORM, now_ms)
        elif is_arrow(content_type):
            batch = yield from self.intake.reading_arrow(data, now_ms)
        else:
            form = content_type.decode("latin-1").lower()
            batch = yield from self.intake.reading(data, form, now_ms)
        if caller is not None:
            for subject in {*batch.subjects, *batch.outcome_subjects()}:
                caller.require(_PUBLISH, subject)
            for options in batch.options:
                caller.require_target(None if options is None else options.to)
            caller.count(len(batch))
        return batch

    def _publishing_batch(self, batch: PublishBatch, trace: Trace | None) -> Work[Answer]:
        """POST /v1/messages/batch"""
        if trace is not None:
            batch.traces = [trace] * len(batch)
        done = yield from self._calls.publishing_batch(batch, self._calls.clock())
        document = BatchDocument(len(batch), len(done.duplicates), IdCodec.texts(done.ids))
        return Answer(200, _encode(document), group=done.group, seq=done.last_seq)

    def _answer_put(self, path: str, key: str, data: bytes, caller: Caller | None) -> Answer:
        """A PUT that a part answers: `path` stands before the key."""
        try:
            put = self._puts.get(path)
            if put is None:
                raise NotFoundError(f"this server has no {path}")
            return put(key, data, caller)
        except Exception as error:
            return problem_answer(error)


@lru_cache(maxsize=256)
def _created(subject: str, due_ms: int) -> tuple[bytes, int]:
    """The answer of `_publish` to a new message, ready to be filled with the fields of all answers,
    length, id, seq, id and key, and the length without the key. (Many messages come for one moment;
    a test compares the two.)

    Made by hand: with a document and a head for each, 64 publishes that are decided together take
    1.3 times as long, from request to answer, and 256 take 1.4 times."""
    body = f',"deliver_at":"{format_time(due_ms)}","state":"scheduled","duplicate":false}}'
    form = (
        "HTTP/1.1 201 Created\r\n%bcontent-type: application/json\r\ncontent-length: %d\r\n"
        'location: /v1/messages/%b\r\netag: "%d"\r\n\r\n'
        f'{{"id":"%b","subject":"{subject}","key":%b{body}'
    )
    return form.encode(), len(f'{{"id":"","subject":"{subject}","key":{body}') + ID_DIGITS


def _tell_all(answers: list[tuple[Responder, bytes]], error: Exception | None) -> None:
    for responder, wire in answers:
        responder.tell(wire, error)


def _end_with(end_span: _EndSpan, path: str, answer: Answer) -> None:
    """End the span of a publish when its answer may be given."""
    attributes: dict[str, str | int] = {"http.response.status_code": answer.status}
    if answer.status < 400:
        document = msgspec.json.decode(answer.body)
        if path == BATCH_PATH:
            attributes["messaging.batch.message_count"] = document["count"]
        else:
            attributes["messaging.message.id"] = document["id"]
            attributes["messaging.destination.name"] = document["subject"]

    def end(error: Exception | None) -> None:
        end_span(attributes, None if error is None else str(error))

    if answer.group is not None:
        answer.group.when_durable(end)
    else:
        end_span(attributes, None if answer.status < 400 else answer.body.decode())
