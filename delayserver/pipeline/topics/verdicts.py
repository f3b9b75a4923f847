"""The verdict on an hour of a cluster: its rows of all shards, judged as an audit judges them.

    rows of a shard's hour ─▶ settle ─▶ facts ─┐
                       … of another shard ─────┴─▶ one verdict: the outcomes, and broken guarantees

Messages that came before the topics were read are not judged: the ending of such a message is only
counted. A row that stands twice in NAME.settled, byte for byte, is one; two that differ are two
deliveries.

Cost: 1.3 µs for a message and its delivery; memory 300 bytes for each of the hour. Threads: pure
functions.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from delayserver.pipeline.audits.examples import example_of, problem_name
from delayserver.pipeline.audits.facts import EXAMPLES_MAX, HourFacts
from delayserver.pipeline.audits.groups import GroupLine, lines_of, share_numbers
from delayserver.pipeline.audits.plan import SKEW_MS
from delayserver.pipeline.reports.names import SharedNumbers, shard_names_of
from delayserver.pipeline.states.entry_states import BrokenGuarantee
from delayserver.pipeline.states.settlement import HourRows, Judgement, KnownSubscriptions, settle
from delayserver.records.ids import IdCodec
from delayserver.records.subscriptions import Subscription
from delayserver.times import format_time
from storage.frame import Rows
from storage.rows import FLAG_REMOVAL, HOUR_MS, as_bytes, select

STATES: Final = ("delivered", "cancelled", "moved", "retried", "dead", "dropped", "pending")
UNDOUBTED: Final = (
    "bodies, keys and headers",
    "messages that were accepted before the stream began, and what ended them",
    "whether what waits waits rightly: the topics do not say that an hour is done",
    "a row of what is settled that was there and is not any more: its message waits",
)
"""Questions that a verdict does not answer."""


@dataclass(frozen=True, slots=True)
class ShardHour:
    """The rows of a shard that are due in an hour, and the tables to judge them by."""

    schedule: Rows
    dispatch: Rows
    subjects: Mapping[int, str]
    subscriptions: Mapping[int, Subscription]
    first_seq: int
    """The first known seq; records before it are not known."""
    through_seq: int
    now_ms: int
    """The time of the log's own clock."""
    id_secret: bytes


@dataclass(slots=True)
class HourVerdict:
    """The outcomes of an hour."""

    hour: int
    """Since 1970."""
    line: GroupLine
    """Numbers by state, and percentiles of lateness."""
    violations: dict[str, int]
    examples: list[dict[str, Any]] = field(default_factory=list)
    unjudged: int = 0
    """Rows that ended messages from before the stream began."""

    @property
    def waiting(self) -> int:
        """Deliveries that have not ended."""
        return int(self.line["pending"])

    @property
    def is_clean(self) -> bool:
        """Whether nothing is wrong in it."""
        return not any(self.violations.values())

    def said(self) -> str:
        """The verdict in short: another one that is equal is not reported again."""
        wrong = [f"{count} {name}" for name, count in self.violations.items() if count]
        return ", ".join(["waits" if self.waiting else "closed", *wrong])

    def document(self) -> dict[str, Any]:
        """For programs."""
        times = {name: value for name, value in self.line.items() if name.endswith("_ms")}
        return {
            "hour": format_time(self.hour * HOUR_MS),
            "closed": not self.waiting,
            "clean": self.is_clean,
            "entries": self.line["entries"],
            **{name: self.line[name] for name in STATES},
            **times,
            "violations": {name: count for name, count in self.violations.items() if count},
            "unjudged": self.unjudged,
            "examples": self.examples,
        }


def judge_hour(hour: int, shards: Mapping[int, ShardHour]) -> HourVerdict:
    """The verdict on an hour that is over."""
    facts, unjudged = {}, 0
    for shard, one in shards.items():
        rows, left_out = _known(one)
        unjudged += left_out
        facts[shard] = _judged(hour, one, rows)
    names = {
        shard: shard_names_of(one.subjects, one.subscriptions) for shard, one in shards.items()
    }
    subjects = SharedNumbers({shard: one.subjects for shard, one in names.items()})
    subscriptions = SharedNumbers({shard: one.subscriptions for shard, one in names.items()})
    counts = share_numbers(
        {shard: one.counts for shard, one in facts.items()}, subjects, subscriptions
    )
    line = next(lines_of(counts, subjects.names, subscriptions.names))
    problems = sum((one.problems for one in facts.values()), np.zeros(1, np.int64))
    examples = [
        example_of(row, shard, names[shard], IdCodec(shard, shards[shard].id_secret))
        for shard, one in facts.items()
        for row in one.examples
    ]
    violations = dict(zip(map(problem_name, BrokenGuarantee), problems.tolist(), strict=True))
    return HourVerdict(hour, line, violations, examples[:EXAMPLES_MAX], unjudged)


def _judged(hour: int, one: ShardHour, rows: HourRows) -> HourFacts:
    judgement = Judgement(
        through_seq=one.through_seq,
        retired_through_seq=0,
        now_ms=one.now_ms,
        definitions=KnownSubscriptions(one.subjects, one.subscriptions),
        settled_until_ms=one.now_ms + SKEW_MS,
    )
    facts = HourFacts()
    for settled in settle(rows, judgement):
        facts.add(settled, hour, is_over=True)
    return facts


def _known(one: ShardHour) -> tuple[HourRows, int]:
    """The rows of known messages, each once; and how many other rows there are."""
    is_removal = (one.schedule["flags"] & FLAG_REMOVAL) != 0
    entry_seqs = np.where(is_removal, one.schedule["message_seq"], one.schedule["seq"])
    is_known = entry_seqs >= one.first_seq
    dispatch = _once(one.dispatch)
    is_ours = dispatch["seq"] >= one.first_seq
    left_out = np.count_nonzero(~is_known) + np.count_nonzero(~is_ours)
    return HourRows(select(one.schedule, is_known), select(dispatch, is_ours)), int(left_out)


def _once(rows: Rows) -> Rows:
    """The rows in their order, without those that repeat an earlier one byte for byte."""
    _, firsts = np.unique(as_bytes(rows), return_index=True)
    return select(rows, np.sort(firsts))
