"""A heartbeat as it is stored, and the check of its table.

Cost: 1 µs to decode. Threads: immutable values, pure functions.
"""

import msgspec

from delayserver.records.message import decode_payload
from delayserver.records.tables import must, must_be_understood, whole
from delayserver.records.understanding import Understanding
from storage.directory import CATALOG_DIRECTORY


class Heartbeat(msgspec.Struct, array_like=True, frozen=True):
    """A value of the table HEARTBEATS, and the payload of a record HEARTBEAT (MessagePack)."""

    key: str
    timeout_ms: int = 0
    subject_id: int = 0
    """0: it has ended."""
    payload: bytes = b""
    """The sealed payload of the message."""


def _check_use(heartbeat: Heartbeat) -> None:
    """Raises where a heartbeat could not publish its message."""
    if heartbeat.subject_id:
        decode_payload(heartbeat.payload, CATALOG_DIRECTORY, 0, 0)


HEARTBEATS = Understanding(Heartbeat, {"key": ""}, _check_use)
"""How values of the table HEARTBEATS are read."""


def heartbeat_key(key: str) -> bytes:
    """A key of the table HEARTBEATS."""
    return key.encode()


def unpack_heartbeat(value: bytes) -> Heartbeat:
    """A value of the table HEARTBEATS. Raises msgspec.DecodeError."""
    return msgspec.msgpack.decode(value, type=Heartbeat)


def check_heartbeat(key: bytes, value: bytes) -> None:
    """Check an entry of the table HEARTBEATS. Raises one of UNREADABLE."""
    heartbeat, problem = whole(HEARTBEATS, value)
    must(heartbeat_key(heartbeat.key) == key, "a heartbeat of another key")
    must(heartbeat.timeout_ms > 0 and heartbeat.subject_id > 0, "a heartbeat that has ended")
    decode_payload(heartbeat.payload, CATALOG_DIRECTORY, 0, 0)
    must_be_understood(problem)
