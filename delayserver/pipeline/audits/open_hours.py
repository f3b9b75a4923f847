"""Past hours that are not settled, and the messages that keep each of them open.

An hour stays open until everything in it is settled, however little that is. Its files stay, it is
not archived, and an audit cannot prove that nothing was taken out of it. Often one message keeps it
open, of a subject that no subscription matches. It is named here, with its id.

Cost: a look at the counts of the hours that are open. Threads: functions without state.
"""

from dataclasses import dataclass

import numpy as np

from delayserver.pipeline.audits.facts import HourFacts
from delayserver.pipeline.audits.plan import ShardBasis
from delayserver.pipeline.audits.row_ids import message_id
from delayserver.pipeline.reports.names import ShardNames
from delayserver.pipeline.states.entry_states import EntryState
from delayserver.records.direct import DIRECT_FIRST_ID
from delayserver.records.ids import IdCodec
from storage.buckets import hour_name
from storage.rows import HOUR_MS, select


@dataclass(frozen=True, slots=True)
class OpenHour:
    """Messages of an hour that wait for one subscription, or those of a subject without any."""

    hour: str
    """The hour as in the names of files: `2026-11-20T15`."""
    shard: int
    subject: str | None
    subscription: str | None
    """The subscription; None: no subscription matches."""
    count: int
    """How many messages wait."""
    seq: int
    """The schedule row of the first."""
    message_id: str | None
    """The id of the first; None: it was moved or tried again, and only its payload tells."""

    @property
    def is_unmatched(self) -> bool:
        """Whether its messages wait for no subscription in particular."""
        return self.subscription is None


def open_hours(basis: ShardBasis, facts: HourFacts, names: ShardNames) -> list[OpenHour]:
    """The past hours of a shard that are still open, in order, and the waiting messages."""
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
            continue  # It is not due in the hour of its file, and is reported for that.
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
