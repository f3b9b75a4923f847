"""Message ids of rows, also of rows with values that no server writes.

Cost: some µs each. Threads: functions without state.
"""

import numpy as np

from delayserver.records.ids import IdCodec
from storage.rows import PUBLISHES

_NUMBER_MAX = 1 << 48
"""The limit of the numbers in an id."""


def message_id(codec: IdCodec, row: np.void) -> str | None:
    """The id of the message of a row (SETTLED_DTYPE). None: it was not made by a publish, so only
    its payload tells the id, or no id can be made of it."""
    due_ms, message_seq = int(row["due_ms"]), int(row["message_seq"])
    if int(row["kind"]) not in PUBLISHES:
        return None
    if not (0 <= due_ms < _NUMBER_MAX and message_seq < _NUMBER_MAX):
        return None
    return codec.encode(due_ms, message_seq)
