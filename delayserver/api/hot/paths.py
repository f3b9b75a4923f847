"""The paths that the hot path serves, and the names in them.

Cost: below a microsecond. Threads: pure functions.
"""

import re
from typing import NamedTuple

from delayserver.wire.fields import SUBJECT_PATTERN

MESSAGES_PATH = "/v1/messages"
BATCH_PATH = "/v1/messages/batch"
HEARTBEATS_PATH = "/v1/heartbeats/"
"""Before the key."""
ALIVE_PATH = "/healthz"
READY_PATH = "/readyz"
CLUSTER_PATH = "/v1/cluster"
REST_MAX_BYTES = 8 * 1024 * 1024
"""Longest request of the other calls, such as 10,000 keys to cancel."""
NO_FORWARD = (b"delay-forward", b"no")
"""The header of a client that wants to be told whose a call is, where it is another shard's."""
CANCEL_PATH = "/v1/messages/cancel"
MESSAGE_PATH = "/v1/messages/"
"""Before the id."""
_BY_ID = re.compile(r"/v1/messages/([^/]+)")
_BY_KEY = re.compile(r"/v1/subjects/([^/]+)/keys/(.*)", re.DOTALL)
_OF_CONSUMER = re.compile(rf"/v1/subscriptions/({SUBJECT_PATTERN})/(pull|ack|nack|extend)")


def is_hot(method: str, path: str) -> bool:
    """Whether `Hot` serves the call; the path without its escapes."""
    if method == "POST" and (path in (MESSAGES_PATH, BATCH_PATH) or parse_call(method, path)):
        return True
    return (method == "PUT" and path.startswith(HEARTBEATS_PATH)) or is_cancel(method, path)


def is_packed(content_type: bytes) -> bool:
    """Whether a batch comes as MessagePack."""
    return b"msgpack" in content_type.lower()


def is_arrow(content_type: bytes) -> bool:
    """Whether a batch comes as a stream of Arrow."""
    return b"vnd.apache.arrow.stream" in content_type.lower()


def is_health(method: str, path: str) -> bool:
    """Whether the call asks how the server is."""
    return method == "GET" and path in (ALIVE_PATH, READY_PATH)


def is_cancel(method: str, path: str) -> bool:
    """Whether the call is one of these; the path without its escapes."""
    if method == "POST":
        return path == CANCEL_PATH
    return method == "DELETE" and bool(_BY_ID.fullmatch(path) or _BY_KEY.fullmatch(path))


def is_long(method: str, path: str) -> bool:
    """Whether the call is for many messages, so that its answer may take more than a turn."""
    return method == "POST" and path in (BATCH_PATH, CANCEL_PATH)


def asks_disk(path: str) -> bool:
    """Whether the disk must be read before a caller with limited rights may make the call."""
    return path.startswith(MESSAGE_PATH)


def one_of(path: str) -> tuple[str | None, str]:
    """Which message a cancel of one is for: subject and key, or None and the id."""
    by_key = _BY_KEY.fullmatch(path)
    return (by_key[1], by_key[2]) if by_key else (None, path.removeprefix(MESSAGE_PATH))


class ConsumerCall(NamedTuple):
    """The call that a path names."""

    subscription: str
    action: str


def parse_call(method: str, path: str) -> ConsumerCall | None:
    """The call of a consumer; None: it is another one."""
    found = _OF_CONSUMER.fullmatch(path) if method == "POST" else None
    return None if found is None else ConsumerCall(found[1], found[2])
