"""Hours that are over and not settled: what keeps each of them open, and since nobody takes what.

An hour stays open until everything in it is settled, however little that is: its files stay, it is
not archived, and an audit cannot prove of it that nothing was taken out. Often that is one message
of a subject that no subscription matches. It is named here, with its id.

Cost: a look at the counts of the hours that are open. Threads: functions without state.
"""

from dataclasses import dataclass

import numpy as np

from delayserver.pipeline.audits.facts import HourFacts
from delayserver.pipeline.audits.plan import ShardBasis
from delayserver.pipeline.audits.row_ids import message_id
from delayserver.pipeline.reports.names import ShardNames
from delayserver.pipeline.states.settlement import EntryState
from delayserver.records.direct import DIRECT_FIRST_ID
from delayserver.records.ids import IdCodec
from storage.buckets import hour_name
from storage.rows import HOUR_MS, select


@dataclass(frozen=True, slots=True)
class OpenHour:
    """What of an hour waits for one subscription, or of one subject for none."""

    hour: str
    """As files call it: `2026-11-20T15`."""
    shard: int
    subject: str | None
    subscription: str | None
    """None: no subscription matches."""
    count: int
    """How many wait."""
    seq: int
    """The schedule row of the first."""
    message_id: str | None
    """Of the first; None: it was moved or tried again, and only its payload tells."""

    @property
    def is_unmatched(self) -> bool:
        """Whether it waits for nobody in particular."""
        return self.subscription is None


def open_hours(basis: ShardBasis, facts: HourFacts, names: ShardNames) -> list[OpenHour]:
    """The hours of a shard that are over and open, in order, and what waits in each."""
    waiting = facts.waiting
    if not len(waiting):
        return []
    codec = IdCodec(basis.directory.shard, basis.directory.id_secret)
    counts = facts.counts[facts.counts["state"] == EntryState.PENDING]
    found = []
    for row in select(waiting, np.lexsort([waiting["seq"], waiting["due_ms"] // HOUR_MS])):
        hour, number = int(row["due_ms"]) // HOUR_MS, int(row["subscription_id"])
        here = counts["hour"] == hour
        here &= counts["subject_id"] == row["subject_id"]
        here &= counts["subscription_id"] == min(number, DIRECT_FIRST_ID)
        count = int(counts["count"][here].sum())
        if not count:
            continue  # It is not due in the hour of its file, and is named for that.
        found.append(
            OpenHour(
                hour_name(hour),
                basis.directory.shard,
                names.subjects.get(int(row["subject_id"])),
                names.subscription(number) if number else None,
                count,
                int(row["seq"]),
                message_id(codec, row),
            )
        )
    return found
