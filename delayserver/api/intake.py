"""Intake: messages of a client, from bytes to checked messages with an absolute due time.

One decoder for three forms (JSON, NDJSON, MessagePack, which is made into JSON before); the body is
not decoded at all: it goes out byte for byte as it came in, once it is known to be JSON in UTF-8. A
fourth, Arrow, comes as columns and becomes columns. If a batch contains an error, it is checked
item by item, so that every bad item can be named. A batch that arrived as columns is reported as
the equivalent JSON. These checks, and a long batch, are done in slices (`delayserver.slices`).

Cost: 2 µs for a message, 0.8 µs for one of a batch, also in columns. Threads: pure but for the
clock and the jitter that is drawn, which are arguments.
"""

import base64
from collections.abc import Callable, Container, Iterator, Mapping, Sequence, Sized
from contextlib import suppress
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, cast

import msgspec
import numpy as np

from delayserver.api.json_pieces import PIECE_BYTES, decode_pieces
from delayserver.api.packed import json_items
from delayserver.config import Settings
from delayserver.decisions.new_messages import NewMessage, PublishBatch
from delayserver.errors import InputError, InputErrors, TooLargeError
from delayserver.records.direct import WEBHOOK_TIMEOUT_MS, Destination
from delayserver.records.message import (
    Content,
    DebounceState,
    MessageOptions,
    OutcomeSubjects,
    Payload,
    Watch,
    check_group,
    check_headers,
    check_key,
    check_keys,
)
from delayserver.records.nesting import NESTED_MIN_BYTES, check_nesting
from delayserver.records.subjects import is_subject
from delayserver.records.tables import OnEvent
from delayserver.records.tracecontext import Trace
from delayserver.security.signing import WebhookSecret
from delayserver.security.targets import TargetPolicy
from delayserver.slices import Work, at_once
from delayserver.times import (
    SECONDS_MAX,
    SECONDS_REASON,
    are_seconds,
    format_duration,
    parse_duration_ms,
    parse_time_ms,
)
from delayserver.wire.fields import SUBJECT_PATTERN
from delayserver.wire.messages import (
    WATCHES_MAX,
    DebounceModel,
    HeartbeatModel,
    OutcomeMessageModel,
    PlainMessage,
    PublishModel,
    PublishUnderKeyModel,
    ToModel,
)
from delayserver.wire.reading import (
    POINTED_ERRORS_MAX,
    UNREADABLE,
    decoder_of,
    in_one,
    input_error,
    readable_fields,
)
from delayserver.wire.subscriptions import RetryModel
from storage.rows import PRIORITY_MAX

if TYPE_CHECKING:
    from delayserver.api.arrow import ArrowColumns, Numbers

_UNSET = msgspec.UNSET
_Unset = msgspec.UnsetType


_decode_json_plain: Callable[[bytes], PlainMessage] = decoder_of(PlainMessage)
_decode_json_with_options: Callable[[bytes], PublishModel] = decoder_of(PublishModel)
_decode_json_under_key = decoder_of(PublishUnderKeyModel)
_decode_json_heartbeat: Callable[[bytes], HeartbeatModel] = decoder_of(HeartbeatModel)
_decode_json_list_plain: Callable[[bytes], list[PlainMessage]] = decoder_of(list[PlainMessage])
_decode_json_list_with_options: Callable[[bytes], list[PublishModel]] = decoder_of(
    list[PublishModel]
)
_decode_json_raw_list = msgspec.json.Decoder(list[msgspec.Raw]).decode
_decode_json_raw = msgspec.json.Decoder(msgspec.Raw).decode
_encode_json = msgspec.json.Encoder().encode

ENVELOPE_BYTES = 64 * 1024
"""A request may be longer than its body by this much."""
COLUMN_ROWS = 1_000
"""Messages of a batch that become columns at a time."""
BAD_ITEMS = 10
"""The cost of looking at a bad message, as `slices` counts."""

L = TypeVar("L", bound=Sized)
_Items = Sequence[PlainMessage] | Sequence[PublishModel]


def _decode_json(data: bytes) -> PlainMessage:
    try:
        return _decode_json_plain(data)
    except msgspec.ValidationError:
        return _decode_json_with_options(data)


def _decode_json_each(datas: Sequence[bytes]) -> _Items:
    """All with options, or all without."""
    try:
        return list(map(_decode_json_plain, datas))
    except msgspec.ValidationError:
        return list(map(_decode_json_with_options, datas))


def _decode_piece(data: bytes) -> list[_Items]:
    """A piece of a batch: all with options, or all without."""
    check_utf8(data)
    try:
        return [_decode_json_list_plain(data)]
    except msgspec.ValidationError:
        return [_decode_json_list_with_options(data)]


def _raw_piece(data: bytes) -> list[list[bytes]]:
    """The items of a piece, as they came."""
    return [list(map(bytes, _decode_json_raw_list(data)))]


class Intake:
    """Turns requests into messages. `known_subjects` were checked before."""

    def __init__(
        self, settings: Settings, known_subjects: Container[str], random: Callable[[], float]
    ) -> None:
        """`random`: from 0 to 1, without 1; a jitter is drawn with it."""
        self._settings = settings
        self._random = random
        self._targets = TargetPolicy(settings.webhook_targets)
        self._known_subjects = known_subjects
        self.reads_arrow = False
        """Whether the reader of Arrow is imported, which takes 0.1 s of a processor."""

    def one(self, data: bytes, now_ms: int) -> NewMessage:
        """A single message as JSON. Raises InputError, TooLargeError."""
        try:
            check_utf8(data)
            return self._message(_decode_json(data), now_ms)
        except (*UNREADABLE, InputError) as error:
            raise in_one(self._errors(data, PublishModel, now_ms)) from error

    def many(self, bodies: Sequence[bytes], now_ms: int) -> PublishBatch:
        """Single messages of several requests. Raises for the first that `one` would refuse."""
        try:
            if not all(map(bytes.isascii, bodies)):
                for data in bodies:
                    check_utf8(data)
            items = _decode_json_each(bodies)
        except UNREADABLE as error:
            raise input_error(error) from error
        return self._batch(items, now_ms)

    def under_key(self, data: bytes, subject: str, key: str, now_ms: int) -> NewMessage:
        """A message whose subject and key stand in the path. Raises as `one`."""
        data = data or b"{}"
        try:
            check_utf8(data)
            found = _decode_json_under_key(data)
            fields = msgspec.structs.asdict(found)
            debounce = self._debounce(fields.pop("debounce"), fields, now_ms)
            message = self._message(PublishModel(subject, key=key, **fields), now_ms)
            if debounce is not None:
                options = message.payload.options or MessageOptions()
                options = msgspec.structs.replace(options, debounce=debounce)
                message.payload = msgspec.structs.replace(message.payload, options=options)
                message.due_ms = debounce.due_ms(now_ms)
            return message
        except (*UNREADABLE, InputError) as error:
            errors = self._errors(data, PublishUnderKeyModel, now_ms, subject=subject, key=key)
            raise in_one(errors) from error

    def _debounce(
        self, wanted: DebounceModel | None, fields: Mapping[str, Any], now_ms: int
    ) -> DebounceState | None:
        if wanted is None:
            return None
        for name in ("delay", "deliver_at", "jitter"):
            if fields.get(name) is not None:
                raise InputError(f"give either debounce or {name}, not both", "/debounce")
        quiet_ms = self._wait_ms(wanted.quiet, "/debounce/quiet")
        at_most_ms = 0
        if wanted.at_most is not None:
            at_most_ms = self._wait_ms(wanted.at_most, "/debounce/at_most")
            if at_most_ms < quiet_ms:
                raise InputError("at_most is at least as long as quiet", "/debounce/at_most")
        return DebounceState(quiet_ms, at_most_ms, wanted.keep == "first", now_ms)

    def _wait_ms(self, duration: int | str | None, pointer: str) -> int:
        """A length of time that is not nothing."""
        wait_ms = 0 if duration is None else _duration_ms(duration, pointer)
        if wait_ms < 1:
            raise InputError("a length of time is at least 1 ms", pointer)
        self.check_wait(wait_ms, pointer)
        return wait_ms

    def heartbeat(self, data: bytes, now_ms: int) -> tuple[int, NewMessage]:
        """The timeout of a heartbeat in ms, and its message. Raises as `one`."""
        try:
            check_utf8(data)
            found = _decode_json_heartbeat(data)
            self.check_wait(found.timeout, "/timeout")
            publish = PlainMessage(
                found.subject, found.body, found.body_base64, headers=found.headers
            )
            return int(found.timeout), self._message(publish, now_ms)
        except (*UNREADABLE, InputError) as error:
            raise in_one(self._errors(data, HeartbeatModel, now_ms)) from error

    def payload(
        self,
        subject: str,
        body: msgspec.Raw | _Unset,
        body_base64: str | None,
        headers: dict[str, str] | None,
    ) -> Payload:
        """The message to publish under a subject, without a time. Raises the first InputError."""
        return self._message(PlainMessage(subject, body, body_base64, headers=headers), 0).payload

    def unpacked(self, data: bytes, now_ms: int) -> Work[bytes]:
        """A batch in MessagePack as JSON, in slices. Raises as `batch`."""
        settings = self._settings
        items = yield from json_items(
            data,
            count_max=settings.batch_max_messages,
            item_max_bytes=settings.body_max_bytes + ENVELOPE_BYTES,
            total_max_bytes=settings.batch_max_bytes * 4 // 3,  # base64 makes a third more
        )
        if any(isinstance(item, InputError) for item in items):
            yield from self._refuse(items, now_ms)
        return b"[%b]" % b",".join(cast(list[bytes], items))

    def batch(self, data: bytes, content_type: str, now_ms: int) -> PublishBatch:
        """A batch as JSON or NDJSON. Raises InputErrors that name every bad item by its index,
        TooLargeError."""
        return at_once(self.reading(data, content_type, now_ms))

    def reading(self, data: bytes, content_type: str, now_ms: int) -> Work[PublishBatch]:
        """As `batch`, in slices: a long one, and one that is to be refused."""
        is_ndjson = "ndjson" in content_type or "jsonl" in content_type
        try:
            pieces: list[_Items] = []
            if is_ndjson:
                count = 0
                for piece in _line_pieces(data):
                    check_utf8(piece)
                    lines = _lines(piece)
                    count += len(lines)
                    self._check_count(count)
                    pieces.append(_decode_json_each(lines))
                    yield len(lines) // 10 + 1
            elif len(data) <= PIECE_BYTES:  # Nearly all.
                pieces = _decode_piece(data)
                self._check_count(len(pieces[0]))
            else:
                pieces = yield from decode_pieces(data, self._counting(_decode_piece))
            batches: list[PublishBatch] = []
            for items in pieces or [[]]:
                for start in range(0, len(items) or 1, COLUMN_ROWS):
                    some = items[start : start + COLUMN_ROWS]
                    if batches:
                        yield len(some) // 10 + 1
                    batches.append(self._batch(some, now_ms))
            return _joined(batches)
        except (*UNREADABLE, InputError) as error:
            if isinstance(error, TooLargeError) and not error.pointer:
                raise
        try:
            raws: list[bytes] = []
            if is_ndjson:
                for piece in _line_pieces(data):
                    raws += _lines(piece)
                    self._check_count(len(raws))
                    yield 1
            else:
                for found in (yield from decode_pieces(data, self._counting(_raw_piece))):
                    raws += found
        except UNREADABLE as error:
            raise input_error(error) from error
        return (yield from self._refuse(raws, now_ms))

    def import_arrow(self) -> None:
        """Import the reader of Arrow: in a thread, before `arrow` is called for the first time.
        Raises MediaTypeError where it is not installed."""
        import delayserver.api.arrow  # noqa: F401

        self.reads_arrow = True

    def arrow(self, data: bytes, now_ms: int) -> PublishBatch:
        """A batch as a stream of Arrow. Raises as `batch`, and as `import_arrow`."""
        return at_once(self.reading_arrow(data, now_ms))

    def reading_arrow(self, data: bytes, now_ms: int) -> Work[PublishBatch]:
        """As `arrow`; one that is to be refused in slices."""
        from delayserver.api.arrow import read_columns

        columns = read_columns(data, count_max=self._settings.batch_max_messages)
        try:
            return self._batch_of_columns(columns, now_ms)
        except (*UNREADABLE, InputError):
            raws, errors = yield from _as_json(columns)
            return (yield from self._refuse(raws, now_ms, errors))

    def _batch_of_columns(self, columns: "ArrowColumns", now_ms: int) -> PublishBatch:
        """As `_batch`, of columns that came as such."""
        count = len(columns.subjects)
        if None in columns.subjects:
            raise InputError("a message has no subject", "/subject")
        subjects = cast(list[str], columns.subjects)
        headers = cast(list[dict[str, str] | None], [one or None for one in columns.headers])
        if any(None in one.values() for one in headers if one is not None):
            raise InputError("a header has no value", "/headers")
        self._check_names(subjects, columns.keys, headers)
        bodies, content = columns.bodies, Content.BINARY if columns.is_binary else Content.JSON
        contents = [content] * count
        if None in bodies:
            contents = [Content.JSON if one is None else content for one in bodies]
            bodies = [b"null" if one is None else one for one in bodies]
        found = cast(list[bytes], bodies)
        if not columns.is_binary:
            for _ in map(_decode_json_raw, found):  # each is one value of JSON
                pass
            found = list(map(bytes.strip, found))  # as it would stand between commas
        self._check_bodies(found, content)
        nothing: list[Any] = [None] * count
        options = self._options_of_columns(columns)
        return PublishBatch(
            subjects,
            self._dues_of_columns(columns, now_ms),
            found,
            contents,
            columns.keys,
            headers,
            nothing,
            nothing.copy(),
            options,
        )

    def _options_of_columns(self, columns: "ArrowColumns") -> list[MessageOptions | None]:
        """As `_options` of each; empty where no message has any."""
        ttls, priorities = columns.ttls_ms, columns.priorities
        if ttls is None and priorities is None:
            return []
        nothing = [None] * len(columns.subjects)
        found = zip(
            nothing if ttls is None else ttls.or_none(),
            nothing if priorities is None else priorities.or_none(),
            strict=True,
        )
        options: list[MessageOptions | None] = []
        for ttl, given in found:
            ttl_ms, priority = self._ttl_ms(ttl), _priority(given)
            options.append(
                MessageOptions(ttl_ms, priority=priority) if ttl_ms or priority else None
            )
        return options if any(options) else []

    def _dues_of_columns(self, columns: "ArrowColumns", now_ms: int) -> list[int]:
        """As `_dues_ms`: all are fine if the first and the last are, and none is seconds."""
        delays, times = columns.delays_ms, columns.dues_ms
        waits_ms = np.zeros(len(columns.subjects), np.int64)
        if delays is not None:
            for delay in _ends(delays):
                self.due_ms(delay, None, now_ms)
            waits_ms += delays.or_zero(delays.values)
        if times is not None:
            if delays is not None and (delays.mask() & times.mask()).any():
                raise InputError("give either delay or deliver_at, not both", "/deliver_at")
            ends_ms = _ends(times)
            for moment in ends_ms:
                self.due_ms(None, moment, now_ms)
            is_ancient = bool(ends_ms) and ends_ms[0] <= SECONDS_MAX
            if is_ancient and (times.mask() & are_seconds(times.values)).any():
                raise InputError(SECONDS_REASON, "/deliver_at")
            waits_ms += times.or_zero(np.maximum(times.values, now_ms) - now_ms)
        dues_ms: list[int] = (waits_ms + now_ms).tolist()
        if columns.jitters_ms is not None:
            jitters_ms = enumerate(columns.jitters_ms.or_none())
            for index, jitter in jitters_ms:
                if jitter is not None:
                    jitter_ms = self._jitter_ms(jitter, dues_ms[index] - now_ms)
                    dues_ms[index] += self._drawn_ms(jitter_ms)
        return dues_ms

    def _batch(self, items: _Items, now_ms: int) -> PublishBatch:
        """The columns of checked messages. Raises the first error that it comes upon."""
        count = len(items)
        subjects, keys = [one.subject for one in items], [one.key for one in items]
        headers = [one.headers or None for one in items]
        self._check_names(subjects, keys, headers)
        watch_keys, on_events = [one.watch for one in items], [one.on_event for one in items]
        watches: list[Watch | None] = [None] * count
        if watch_keys.count(None) < count or on_events.count(None) < count:
            watches = list(map(_watch, watch_keys, on_events))
        bodies, contents = self._bodies(
            [one.body for one in items], [one.body_base64 for one in items]
        )
        dues_ms = self._dues_ms(
            [one.delay for one in items], [one.deliver_at for one in items], now_ms
        )
        traces: list[Trace | None] = [None] * count
        options: list[MessageOptions | None] = []
        if items and isinstance(items[0], PublishModel):
            forms = [one for one in items if isinstance(one, PublishModel)]  # all are
            options = list(map(self._options, forms))
            options = options if any(options) else []
            pairs = zip(forms, dues_ms, strict=True)
            dues_ms = [self._spread(one, due_ms, now_ms) for one, due_ms in pairs]
        return PublishBatch(
            subjects, dues_ms, bodies, contents, keys, headers, watches, traces, options
        )

    def _options(self, publish: PublishModel) -> MessageOptions | None:
        """The options of a message; None: it has none."""
        ttl_ms, priority = self._ttl_ms(publish.ttl), _priority(publish.priority)
        group = publish.group
        if group is not None:
            check_group(group)
        to = None if publish.to is None else self._destination(publish.to, publish.subject)
        outcomes = None
        if publish.on_delivered is not None or publish.on_dead is not None:
            outcomes = OutcomeSubjects(
                self._outcome_subject(publish.on_delivered, "/on_delivered"),
                self._outcome_subject(publish.on_dead, "/on_dead"),
            )
        if group is None and not (ttl_ms or priority or to or outcomes):
            return None
        return MessageOptions(ttl_ms, priority=priority, group=group, to=to, outcomes=outcomes)

    def _outcome_subject(self, wanted: OutcomeMessageModel | None, pointer: str) -> str | None:
        if wanted is None:
            return None
        self._check_subject(wanted.subject, f"{pointer}/subject")
        return wanted.subject

    def _destination(self, to: ToModel, subject: str) -> Destination:
        try:
            self._targets.check_url(to.url)
            if to.secret is not None:
                WebhookSecret.parse(to.secret, "/secret")
        except InputError as error:
            raise error.below("/to") from error
        retry, timeout_ms = to.retry or RetryModel(), int(to.timeout or WEBHOOK_TIMEOUT_MS)
        backoff_ms = tuple(map(int, retry.backoff))
        return Destination(
            to.url, subject, to.secret or "", timeout_ms, retry.max_attempts, backoff_ms
        )

    def _spread(self, publish: PublishModel, due_ms: int, now_ms: int) -> int:
        """The due time with the jitter that is drawn for the message."""
        if publish.jitter is None:
            return due_ms
        return due_ms + self._drawn_ms(self._jitter_ms(publish.jitter, due_ms - now_ms))

    def _drawn_ms(self, jitter_ms: int) -> int:
        return int(self._random() * (jitter_ms + 1))

    def _jitter_ms(self, jitter: int | str, wait_ms: int) -> int:
        """`wait_ms`: how long it is until the message is due, without the jitter."""
        jitter_ms = _duration_ms(jitter, "/jitter")
        self.check_wait(wait_ms + jitter_ms, "/jitter")
        return jitter_ms

    def _ttl_ms(self, ttl: int | str | None) -> int:
        """0: for ever."""
        if ttl is None:
            return 0
        ttl_ms = _duration_ms(ttl, "/ttl")
        if ttl_ms < 1:
            raise InputError("a time to live is at least 1 ms", "/ttl")
        self.check_wait(ttl_ms, "/ttl")
        return ttl_ms

    def _check_names(
        self,
        subjects: Sequence[str],
        keys: Sequence[str | None],
        headers: Sequence[dict[str, str] | None],
    ) -> None:
        for subject in set(subjects):
            self._check_subject(subject)
        count = len(subjects)
        if keys.count(None) < count:
            check_keys([one for one in keys if one is not None])
        if headers.count(None) < count:
            for found in headers:
                if found is not None:
                    check_headers(found)

    def _bodies(
        self, raws: Sequence[msgspec.Raw | _Unset], base64s: Sequence[str | None]
    ) -> tuple[list[bytes], list[Content]]:
        """The bodies and their kinds: `_body` of each, in columns where it can be."""
        if base64s.count(None) < len(base64s) or _Unset in set(map(type, raws)):
            pairs = list(map(self._body, raws, base64s))
            return [body for body, _ in pairs], [content for _, content in pairs]
        bodies = list(map(bytes, cast(Sequence[msgspec.Raw], raws)))
        self._check_bodies(bodies, Content.JSON)
        return bodies, [Content.JSON] * len(bodies)

    def _check_bodies(self, bodies: Sequence[bytes], content: Content) -> None:
        if bodies:
            longest = max(bodies, key=len)
            self._check_length(longest)
            if content == Content.JSON and len(longest) > NESTED_MIN_BYTES:
                check_nesting(bodies)

    def _dues_ms(
        self, delays: Sequence[int | str | None], times: Sequence[int | str | None], now_ms: int
    ) -> list[int]:
        """The due time of each: `due_ms` of each, but equal fields are read once."""
        count = len(delays)
        if times.count(None) == count:
            # Most are the same few.
            waits = {delay: self.due_ms(delay, None, now_ms) for delay in set(delays)}
            return [*waits.values()] * count if len(waits) == 1 else [waits[one] for one in delays]
        if delays.count(None) == count and set(map(type, times)) == {int}:
            # Nearly all differ, and are fine if the first and the last of them are. Only where the
            # first is before 1973 one in between can be seconds.
            moments = cast(Sequence[int], times)
            first_ms, last_ms = min(moments), max(moments)
            self.due_ms(None, first_ms, now_ms)
            self.due_ms(None, last_ms, now_ms)
            if first_ms >= now_ms:
                return list(moments)
            if first_ms <= SECONDS_MAX:
                for moment in moments:
                    self.due_ms(None, moment, now_ms)
            return [one if one > now_ms else now_ms for one in moments]
        pairs = list(zip(delays, times, strict=True))
        dues_ms = {pair: self.due_ms(*pair, now_ms) for pair in set(pairs)}
        return [dues_ms[pair] for pair in pairs]

    def _refuse(
        self,
        raws: Sequence[bytes | InputError],
        now_ms: int,
        known: Sequence[InputError] = (),
    ) -> Work[NoReturn]:
        """Go through a bad batch again, item by item, and raise all of its errors, `known` ones
        besides; behind POINTED_ERRORS_MAX errors, only the number of bad items is told."""
        errors = list(known)
        bad = set(map(_index, known))
        for index, raw in enumerate(raws):
            if isinstance(raw, InputError):
                errors.append(raw)
                bad.add(index)
                continue
            try:
                check_utf8(raw)
                self._message(_decode_json(raw), now_ms)
                yield 1
                continue
            except (*UNREADABLE, InputError):
                bad.add(index)
            if len(errors) < POINTED_ERRORS_MAX:
                found = self._errors(raw, PublishModel, now_ms)
                errors += [error.below(f"/{index}") for error in found]
                yield BAD_ITEMS
            else:
                yield 2
        assert errors, "a batch was refused for no reason"
        errors.sort(key=_index)
        raise InputErrors(f"{len(bad)} of {len(raws)} messages are invalid", errors)

    def _errors(
        self, data: bytes, form: type[msgspec.Struct], now_ms: int, **given: str
    ) -> list[InputError]:
        """All errors of a message that was refused; `given`: the fields that its path has."""
        found, errors = readable_fields(data, form)
        values: dict[str, Any] = {**found, **given}
        get = values.get
        checks: list[Callable[[], object]] = [
            lambda: self._body(get("body", _UNSET), get("body_base64")),
            lambda: self.due_ms(get("delay"), get("deliver_at"), now_ms),
            lambda: _watch(get("watch"), get("on_event")),
            lambda: self._ttl_ms(get("ttl")),
            lambda: _priority(get("priority")),
            lambda: self._outcome_subject(get("on_delivered"), "/on_delivered"),
            lambda: self._outcome_subject(get("on_dead"), "/on_dead"),
        ]
        if get("to") is not None:
            checks.append(lambda: self._destination(values["to"], ""))
        if "timeout" in values:
            checks.append(lambda: self.check_wait(values["timeout"], "/timeout"))
        if "subject" in values:
            checks.append(lambda: self._check_subject(values["subject"]))
        if get("jitter") is not None:
            checks.append(lambda: self._check_jitter(values, now_ms))
        if get("key") is not None:
            checks.append(lambda: check_key(values["key"]))
        checks.append(lambda: self._debounce(get("debounce"), values, now_ms))
        if get("group") is not None:
            checks.append(lambda: check_group(values["group"]))
        if get("headers") is not None:
            checks.append(lambda: check_headers(values["headers"]))
        for check in checks:
            try:
                check()
            except InputError as error:
                errors.append(error)
        assert errors, "a message was refused for no reason"
        return errors

    def _check_jitter(self, values: Mapping[str, Any], now_ms: int) -> None:
        """Check the jitter alone: the errors of the due time are already known."""
        due_ms = now_ms
        with suppress(InputError):
            due_ms = self.due_ms(values.get("delay"), values.get("deliver_at"), now_ms)
        self._jitter_ms(values["jitter"], due_ms - now_ms)

    def _counting(self, decode: Callable[[bytes], list[L]]) -> Callable[[bytes], list[L]]:
        """A decoder of the pieces of one batch, which gives up at the first message too many: they
        may be millions. Raises TooLargeError."""
        count = 0

        def decode_and_count(data: bytes) -> list[L]:
            nonlocal count
            found = decode(data)
            count += sum(map(len, found))
            self._check_count(count)
            return found

        return decode_and_count

    def _check_count(self, count: int) -> None:
        """`count`: messages of a batch that were found so far."""
        if count > self._settings.batch_max_messages:
            raise TooLargeError(
                f"a batch has at most {self._settings.batch_max_messages} messages "
                f"(batch_max_messages); this one has {count} or more"
            )

    def _message(self, publish: PlainMessage, now_ms: int) -> NewMessage:
        subject = publish.subject
        self._check_subject(subject)
        key = publish.key
        if key is not None:
            check_key(key)
        headers = publish.headers
        if headers is not None:
            check_headers(headers)
        body, content = self._body(publish.body, publish.body_base64)
        due_ms = self.due_ms(publish.delay, publish.deliver_at, now_ms)
        watch, options = None, None
        if isinstance(publish, PublishModel):
            due_ms = self._spread(publish, due_ms, now_ms)
            options = self._options(publish)
        if publish.watch is not None or publish.on_event is not None:
            watch = _watch(publish.watch, publish.on_event)
        payload = Payload(body, content, key, headers or None, watch=watch, options=options)
        return NewMessage(subject, due_ms, payload)

    def _check_subject(self, subject: str, pointer: str = "/subject") -> None:
        if subject not in self._known_subjects and not is_subject(subject):
            raise InputError(f"a subject looks like {SUBJECT_PATTERN}", pointer)

    def _body(self, raw: msgspec.Raw | _Unset, encoded: str | None) -> tuple[bytes, Content]:
        """`encoded`: the body as base64."""
        body, content = b"null", Content.JSON
        if not isinstance(raw, _Unset):
            if encoded is not None:
                raise InputError("give either body or body_base64, not both", "/body_base64")
            body = bytes(raw)
        elif encoded is not None:
            try:
                body = base64.b64decode(encoded, validate=True)
            except ValueError as error:
                raise InputError(f"not base64: {error}", "/body_base64") from error
            content = Content.BINARY
        self._check_length(body)
        if content == Content.JSON:
            check_nesting((body,))
        return body, content

    def _check_length(self, body: bytes) -> None:
        if len(body) > self._settings.body_max_bytes:
            raise TooLargeError(
                f"the body has {len(body)} bytes; at most {self._settings.body_max_bytes} "
                "(body_max_bytes)",
                "/body",
            )

    def due_ms(self, delay: int | str | None, deliver_at: int | str | None, now_ms: int) -> int:
        """The absolute due time; a time in the past means now. Raises InputError."""
        if delay is not None:
            if deliver_at is not None:
                raise InputError("give either delay or deliver_at, not both", "/deliver_at")
            pointer = "/delay"
            wait_ms = _duration_ms(delay, pointer)
        elif deliver_at is not None:
            pointer = "/deliver_at"
            wait_ms = parse_time_ms(deliver_at, pointer) - now_ms
        else:
            return now_ms
        self.check_wait(wait_ms, pointer)
        return now_ms + max(0, wait_ms)

    def check_wait(self, wait_ms: int, pointer: str) -> None:
        """Raises InputError when that is too far away."""
        if wait_ms > self._settings.delay_max_ms:
            raise InputError(
                f"further away than {format_duration(self._settings.delay_max_ms)} (delay_max_ms)",
                pointer,
            )


@lru_cache(maxsize=4096)
def _duration_ms(duration: int | str, pointer: str) -> int:
    """Clients send the same few durations again and again."""
    return parse_duration_ms(duration, pointer)


def _ends(numbers: "Numbers") -> tuple[int, ...]:
    """The lowest and the highest, if there are any."""
    values = numbers.values if numbers.there is None else numbers.values[numbers.there]
    return (int(values.min()), int(values.max())) if len(values) else ()


def _index(error: InputError) -> int:
    """The index of the item in a batch that an error points to."""
    return int(error.pointer.split("/")[1])


def _as_json(columns: "ArrowColumns") -> Work[tuple[list[bytes], list[InputError]]]:
    """Each message of a table as JSON, and the errors of bodies that cannot be put into it."""
    raws: list[bytes] = []
    errors: list[InputError] = []
    for index, message in enumerate(columns.as_fields()):
        body = message.get("body")
        if isinstance(body, bytes):
            try:
                message["body"] = _decode_json_raw(body)
            except UNREADABLE as error:
                del message["body"]
                errors.append(input_error(error, f"/{index}/body"))
        raws.append(_encode_json(message))
        yield 1
    return raws, errors


def _joined(batches: list[PublishBatch]) -> PublishBatch:
    """The columns of some parts of a batch, one behind the other."""
    if len(batches) == 1:
        return batches[0]
    whole = PublishBatch([], [], [], [], [], [], [], [])
    has_options = any(one.options for one in batches)
    for one in batches:
        whole.extend(one)
        if has_options:
            whole.options += one.options or [None] * len(one)
    return whole


def _watch(keys: tuple[str, ...] | None, on_event: str | None) -> Watch | None:
    if not keys:
        if on_event is not None:
            raise InputError(
                "on_event says what an event of a watch key does: give watch", "/watch"
            )
        return None
    if len(keys) > WATCHES_MAX:
        raise InputError(f"a message watches at most {WATCHES_MAX} keys", "/watch")
    for index, key in enumerate(keys):
        check_key(key, f"/watch/{index}")
    if len(set(keys)) != len(keys):
        raise InputError("a key stands there twice", "/watch")
    return Watch(keys, OnEvent[(on_event or "cancel").upper()])


def _priority(priority: int | None) -> int:
    if priority is None:
        return 0
    if not 0 <= priority <= PRIORITY_MAX:
        raise InputError(f"a priority is 0 to {PRIORITY_MAX}", "/priority")
    return priority


def check_utf8(data: bytes) -> None:
    """Raises UnicodeDecodeError. The decoder does not check text that it passes on as it is."""
    if not data.isascii():
        data.decode()


def _line_pieces(data: bytes) -> Iterator[bytes]:
    """A text, some whole lines at a time."""
    start = 0
    while start < len(data):
        end = data.find(b"\n", start + PIECE_BYTES) + 1 or len(data)
        yield data[start:end]
        start = end


def _lines(piece: bytes) -> list[bytes]:
    """Those that are not empty."""
    return [line for line in piece.splitlines() if line.strip()]
