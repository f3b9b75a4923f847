"""Message ids: opaque to clients, and enough for the server to find the message without an index.

    shard u16 │ due_ms u48 │ seq u48 │ check digits u32      18 bytes, 36 hexadecimal digits

`due_ms` is the due time at publish; a message that was moved keeps its id, and the catalog knows
where it went. `delayserver.records.ids` makes them and looks at the check digits.

Cost: 0.5 µs to read one. Threads: pure.
"""

from typing import NamedTuple

from delayserver.errors import NotFoundError

ID_BYTES = 18
ID_DIGITS = 2 * ID_BYTES


class MessageId(NamedTuple):
    """The fields of an id."""

    shard: int
    due_ms: int
    seq: int


def read_id(text: str) -> MessageId:
    """Read the fields of an id from any server. The check digits are not looked at, since only the
    server knows the secret. Raises NotFoundError for a text that is no id at all."""
    try:
        data = bytes.fromhex(text) if len(text) == ID_DIGITS else b""
    except ValueError:
        data = b""
    if len(data) != ID_DIGITS // 2:
        raise NotFoundError(f"there is no message {text[:64]!r}")
    return MessageId(
        int.from_bytes(data[:2], "big"),
        int.from_bytes(data[2:8], "big"),
        int.from_bytes(data[8:14], "big"),
    )
