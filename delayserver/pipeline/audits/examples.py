"""A row with problems, for people and programs: names and texts in place of numbers.

Cost: some µs each. Threads: pure functions.
"""

from typing import Any

import numpy as np

from delayserver.pipeline.audits.row_ids import message_id
from delayserver.pipeline.reports.names import ShardNames
from delayserver.pipeline.states.entry_states import BrokenGuarantee
from delayserver.records.ids import IdCodec
from delayserver.times import format_time


def example_of(
    row: np.void, shard: int, names: ShardNames, codec: IdCodec, problem: str | None = None
) -> dict[str, Any]:
    """A row (SETTLED_DTYPE) as a document; `problem`: in place of the problem in the row."""
    problems = int(row["problems"])
    said = [problem_name(one) for one in BrokenGuarantee if one & problems]
    return {
        "problem": problem or ", ".join(said).replace("_", " "),
        "subject": names.subjects.get(int(row["subject_id"])),
        "subscription": names.subscription(int(row["subscription_id"])),
        "due": _time(int(row["due_ms"])),
        "settled": _time(int(row["settled_ms"])),
        "attempt": int(row["attempt"]),
        "shard": shard,
        "seq": int(row["seq"]),
        "message_seq": int(row["message_seq"]),
        "message_id": message_id(codec, row),
    }


def problem_name(problem: BrokenGuarantee) -> str:
    """The name of a problem in an audit."""
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
