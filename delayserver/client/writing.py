"""Messages as they are sent, in JSON; and what JSON would change without a word is refused.

Bodies are anything that msgspec writes (plain values, dataclasses, Structs, datetimes, …), models
of pydantic, or bytes. NaN and infinity would become null. A set would become an array in any order,
so that a retry might conflict with its own message. Both are refused.

Cost: 1 µs for a small message. It is looked through only where there is an array or a null in the
JSON, since a set or a NaN always leaves one. Threads: pure.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import msgspec

from delayserver.client.values import (
    Delay,
    DeliverAt,
    Draft,
    OnEvent,
    OutcomeMessage,
    To,
    duration,
    time,
)


class MessageToSend(msgspec.Struct, omit_defaults=True, gc=False):
    """A message to be published, with the names of the API."""

    subject: str
    body: Any = None
    body_base64: bytes | None = None
    delay: int | str | None = None
    deliver_at: int | str | None = None
    key: str | None = None
    headers: Mapping[str, str] | None = None
    watch: Sequence[str] | None = None
    on_event: OnEvent | None = None
    ttl: int | str | None = None
    jitter: int | str | None = None
    priority: int | None = None
    to: Mapping[str, Any] | None = None
    on_delivered: OutcomeMessage | None = None
    on_dead: OutcomeMessage | None = None
    group: str | None = None


def to_send(draft: Draft) -> MessageToSend:
    """The same message. Raises ValueError."""
    return new_message(**msgspec.structs.asdict(draft))


def new_message(
    subject: str,
    body: Any,
    delay: Delay | None = None,
    deliver_at: DeliverAt | None = None,
    key: str | None = None,
    headers: Mapping[str, str] | None = None,
    watch: Sequence[str] | None = None,
    on_event: OnEvent | None = None,
    ttl: Delay | None = None,
    jitter: Delay | None = None,
    priority: int | None = None,
    to: To | str | None = None,
    on_delivered: str | None = None,
    on_dead: str | None = None,
    group: str | None = None,
) -> MessageToSend:
    """A message of what a caller gave. Raises ValueError."""
    if isinstance(delay, timedelta):
        delay = duration(delay)
    if deliver_at is not None:
        deliver_at = time(deliver_at)
    if isinstance(ttl, timedelta):
        ttl = duration(ttl)
    if isinstance(jitter, timedelta):
        jitter = duration(jitter)
    if isinstance(body, bytes):
        body, body_base64 = None, body
    else:
        body_base64 = None
    return MessageToSend(
        subject,
        body,
        body_base64,
        delay,
        deliver_at,
        key,
        headers,
        watch,
        on_event,
        ttl,
        jitter,
        priority,
        None if to is None else _destination(to),
        None if on_delivered is None else OutcomeMessage(on_delivered),
        None if on_dead is None else OutcomeMessage(on_dead),
        group,
    )


def _destination(to: To | str) -> dict[str, Any]:
    if isinstance(to, str):
        return {"url": to}
    retry = retry_of(to.max_attempts, to.backoff)
    timeout = duration_or_none(to.timeout)
    return given({"url": to.url, "secret": to.secret, "timeout": timeout, "retry": retry})


def retry_of(max_attempts: int | None, backoff: Sequence[Delay] | None) -> dict[str, Any] | None:
    """How often, and the waits in between, as a part of a document."""
    waits = None if backoff is None else [duration(wait) for wait in backoff]
    return given({"max_attempts": max_attempts, "backoff": waits}) or None


def fields(message: MessageToSend) -> dict[str, Any]:
    """What a call has whose path names the subject."""
    return given(msgspec.structs.asdict(message) | {"subject": None})


def given(document: Mapping[str, Any]) -> dict[str, Any]:
    """What is there of a document, where None stands for what is not."""
    return {name: value for name, value in document.items() if value is not None}


def due(delay: Delay | None, deliver_at: DeliverAt | None) -> dict[str, Any]:
    """The due time of a message, as a part of a document. Raises ValueError."""
    return given({"delay": duration_or_none(delay), "deliver_at": time_or_none(deliver_at)})


def duration_or_none(value: Delay | None) -> int | str | None:
    """A duration as the API takes it, where there is one."""
    return None if value is None else duration(value)


def time_or_none(value: DeliverAt | None) -> int | str | None:
    """A time as the API takes it, where there is one. Raises ValueError."""
    return None if value is None else time(value)


# ── JSON ───────────────────────────────────────────────────────────────────────────────────────


def encode(document: object) -> bytes:
    """A document as JSON. Raises TypeError, ValueError."""
    data = _encode(document)
    if b"[" in data or b"null" in data:
        _refuse_what_json_changes(document)
    return data


def _other(value: Any) -> Any:
    """What msgspec does not know."""
    dump = getattr(value, "model_dump", None)
    if dump is None:
        raise TypeError(
            f"a {type(value).__name__} cannot be written as JSON; a body is made of plain values, "
            "dataclasses, msgspec Structs, pydantic models, or is bytes"
        )
    return dump(mode="json")


_encode = msgspec.json.Encoder(enc_hook=_other).encode
_PLAIN = frozenset((str, int, bool, type(None)))


def _refuse_what_json_changes(document: object) -> None:
    waiting: list[Any] = [document]
    while waiting:
        value = waiting.pop()
        if type(value) in _PLAIN:
            continue
        if isinstance(value, float):
            if not math.isfinite(value):
                raise ValueError(f"JSON has no {value}: send null or text instead")
        elif isinstance(value, set | frozenset):
            raise TypeError("JSON has no sets, which have no order: send sorted(...) instead")
        elif isinstance(value, Mapping):
            waiting += value.values()
        elif isinstance(value, list | tuple):
            waiting += value
        else:
            waiting += [getattr(value, name, None) for name in _members(type(value))]


def _members(kind: type) -> Iterable[str]:
    """Names of what an object holds that is written as a JSON object."""
    for names in ("__struct_fields__", "__dataclass_fields__", "__pydantic_fields__"):
        if found := getattr(kind, names, None):
            return list[str](found)
    attributes: Sequence[Any] = getattr(kind, "__attrs_attrs__", ())
    return [attribute.name for attribute in attributes]
