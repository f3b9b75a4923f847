"""A row with problems, for people and programs: names and texts in place of numbers.

Cost: some µs each. Threads: pure functions.
"""

from typing import Any

import numpy as np

from delayserver.pipeline.reports.names import ShardNames
from delayserver.pipeline.states.settlement import BrokenGuarantee
from delayserver.records.ids import IdCodec
from delayserver.times import format_time
from storage.rows import PUBLISHES

_ID_MAX = 1 << 48
"""An id has no room for more."""


def example_of(
    row: np.void, shard: int, names: ShardNames, codec: IdCodec, problem: str | None = None
) -> dict[str, Any]:
    """A row (SETTLED_DTYPE) as a document; `problem`: in place of what the row says of itself."""
    problems = int(row["problems"])
    said = [problem_name(one) for one in BrokenGuarantee if one & problems]
    due_ms, message_seq = int(row["due_ms"]), int(row["message_seq"])
    # Only of a row that a publish made the id is known.
    is_publish = int(row["kind"]) in PUBLISHES
    has_id = is_publish and 0 <= due_ms < _ID_MAX and message_seq < _ID_MAX
    return {
        "problem": problem or ", ".join(said).replace("_", " "),
        "subject": names.subjects.get(int(row["subject_id"])),
        "subscription": names.subscription(int(row["subscription_id"])),
        "due": _time(due_ms),
        "settled": _time(int(row["settled_ms"])),
        "attempt": int(row["attempt"]),
        "shard": shard,
        "seq": int(row["seq"]),
        "message_seq": message_seq,
        "message_id": codec.encode(due_ms, message_seq) if has_id else None,
    }


def problem_name(problem: BrokenGuarantee) -> str:
    """How an audit calls it."""
    assert problem.name is not None
    return problem.name.lower()


def _time(time_ms: int) -> str | None:
    """A time as text, also one that no calendar has."""
    if time_ms <= 0:
        return None
    try:
        return format_time(time_ms)
    except (OverflowError, ValueError):
        return f"{time_ms} ms"
