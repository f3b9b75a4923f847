"""Answers that hold messages, of which one that cannot be decoded costs only itself.

A decoder goes one level of the stack deeper for each level of the JSON, and gives up a thousand
levels deep: with the whole answer, for a body of which it only has to find the end. Where that
happens, the answer is cut here, without recursion: every message gets its body as it stands, and a
caller that looks at that one gets the error.

Cost: that of the decoder, plus for an answer that it refuses some 50 ns per bracket, comma, colon
and text. Threads: pure.
"""

import logging
import re
from functools import cache
from typing import Any, TypeVar, cast

import msgspec

from delayserver.client.errors import NotADelayServerError
from delayserver.client.transport import decoded
from delayserver.client.values import Body

log = logging.getLogger("delayserver.client")

P = TypeVar("P", bound=msgspec.Struct)
B = TypeVar("B", bound=Body)
T = TypeVar("T", bound=msgspec.Struct)

_TOKEN = re.compile(rb'"(?:[^"\\]++|\\.)*+(?:"|\\?\Z)|[][{},:]', re.DOTALL)
"""A string without an end is one token, too: a search that failed there would begin again at every
quote that is escaped."""


def decoded_page(body: bytes, page_type: type[P], member: str, message_type: type[B]) -> P:
    """An answer with a list of messages in `member`. Raises NotADelayServerError."""
    try:
        return decoded(body, page_type)
    except NotADelayServerError:
        parts = _members(body)
        messages = _cut(parts.pop(member, b""))
        if not messages:
            raise
    page = decoded(_joined({**parts, member: b"[]"}), page_type)
    found = []
    for message in messages:
        try:
            found.append(_cut_message(message, message_type))
        except NotADelayServerError as error:
            # A consumer's comes again after its lease, until it is a dead letter.
            log.error("a message is left out: %s", error)
    setattr(page, member, found)
    return page


@cache
def _page_type(member: str, kind: type[msgspec.Struct]) -> Any:
    item_list: Any = list
    fields: list[Any] = [(member, item_list[kind]), ("cursor", str | None, None)]
    return msgspec.defstruct("Page", fields)


def decoded_list(body: bytes, member: str, kind: type[T]) -> tuple[list[T], str | None]:
    """A page of a list in `member`, and the cursor of the next one. Raises NotADelayServerError."""
    page_type, item_type = _page_type(member, kind), cast("type[Any]", kind)
    if issubclass(kind, Body):
        page = decoded_page(body, page_type, member, item_type)
    else:
        page = decoded(body, page_type)
    return getattr(page, member), page.cursor


def decoded_message(body: bytes, message_type: type[B]) -> B:
    """An answer that is a message. Raises NotADelayServerError."""
    try:
        return decoded(body, message_type)
    except NotADelayServerError:
        return _cut_message(body, message_type)


def _cut_message(data: bytes, message_type: type[B]) -> B:
    parts = _members(data)
    body = parts.pop("body", b"null")
    return msgspec.structs.replace(
        decoded(_joined(parts), message_type), body_json=msgspec.Raw(body)
    )


def _members(document: bytes) -> dict[str, bytes]:
    parts = _cut(document)
    return {decoded(name, str): value for name, value in zip(parts[::2], parts[1::2], strict=False)}


def _joined(members: dict[str, bytes]) -> bytes:
    pairs = (b"%b:%b" % (msgspec.json.encode(name), value) for name, value in members.items())
    return b"{%b}" % b",".join(pairs)


def _cut(document: bytes) -> list[bytes]:
    """The parts between the outermost brackets: items, or names and values by turns."""
    parts, depth, begin = [], 0, 0
    for token in _TOKEN.finditer(document):
        mark = token[0]
        if mark in (b"[", b"{"):
            depth += 1
            if depth == 1:
                begin = token.end()
            continue
        if mark in (b"]", b"}"):
            depth -= 1
            is_end = depth == 0
        else:
            is_end = depth == 1 and mark in (b",", b":")
        if is_end:
            if part := document[begin : token.start()].strip():
                parts.append(part)
            begin = token.end()
    return parts
