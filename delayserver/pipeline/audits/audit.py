"""An audit: all facts added up, with names, and the verdict.

    accepted = delivered + cancelled + dead + pending (+ outcomes that should not occur)

A row that definitions accuse is accused only if the definitions have not changed meanwhile: a
running server may have made the subscription a moment ago. So the definitions are read again, and
if they differ, the hours in question are judged once more.

Cost: that of the tasks (`judging`), and less than a second for the rest. Threads: the caller's.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, groupby
from typing import Any

import numpy as np

from delayserver.pipeline.audits.examples import example_of, problem_name
from delayserver.pipeline.audits.facts import EXAMPLES_MAX, HourFacts, merged
from delayserver.pipeline.audits.following import follow, outcomes_of
from delayserver.pipeline.audits.groups import (
    GroupLine,
    lateness_of,
    lines_of,
    share_numbers,
)
from delayserver.pipeline.audits.judging import judge_of
from delayserver.pipeline.audits.open_hours import OpenHour, open_hours
from delayserver.pipeline.audits.plan import AuditPlan, HourTask, ShardBasis, look, make_plan
from delayserver.pipeline.audits.verdicts import Verdicts
from delayserver.pipeline.exports.place import shown_url
from delayserver.pipeline.reports.names import ShardNames, SharedNumbers, shard_names_of
from delayserver.pipeline.states.entry_states import BrokenGuarantee, EntryState
from delayserver.records.ids import IdCodec
from storage.frame import Damage, Rows

OUTCOMES = ("delivered", "cancelled", "dead", "pending", "dropped", "deleted", "missing")
"""The outcomes of a message. A healthy server shows only the first four. dropped: its subscription
was deleted, and others had it; deleted: it was moved or retried into an hour that is past its
retention."""
_PLAIN = {
    EntryState.DROPPED: "dropped",
    EntryState.DELIVERED: "delivered",
    EntryState.CANCELLED: "cancelled",
    EntryState.PENDING: "pending",
    EntryState.MISSING: "missing",
}
_ATTEMPTS = 3

Progress = Callable[[str, int, int], None]
Judged = Iterable[tuple[int, HourFacts]]
"""The number of a task in its plan, and its facts."""


@dataclass(slots=True)
class Audit:
    """The result of an audit."""

    data_dir: str
    shards: int
    """How many shards were read."""
    taken_ms: int
    took_s: float
    messages: dict[str, int]
    """accepted, and the count of each outcome; see OUTCOMES."""
    deliveries: dict[str, int]
    """By state: each message counts once for each subscription that it was for."""
    violations: dict[str, int]
    damage: list[dict[str, Any]]
    lateness: list[dict[str, int]]
    """For all deliveries: bucket, upper_ms, count."""
    groups: list[GroupLine]
    """A line for everything (dimension all), each hour, subject and subscription."""
    examples: list[dict[str, Any]]
    """The first EXAMPLES_MAX violations; times are texts."""
    hours_judged: int
    """How many hours were read."""
    hours_kept: int = 0
    """Hours for which a verdict of an earlier audit counts."""
    open_hours: list[OpenHour] = field(default_factory=list)
    """The messages that keep past hours open."""
    bodies: int | None = None
    """How many bodies were verified; None: none was read."""
    since_ms: int | None = None
    hours_left_out: int = 0
    """Hours that were left out, because they were over by `since_ms`."""

    @property
    def is_clean(self) -> bool:
        """Whether nothing is wrong."""
        return not self.damage and not any(self.violations.values())

    def of(self, dimension: str) -> list[GroupLine]:
        """The lines of hours, subjects or subscriptions, or the one of all."""
        return [line for line in self.groups if line["dimension"] == dimension]


def audit_here(
    *data_dirs: str,
    now_ms: int | None = None,
    since_ms: int | None = None,
    with_bodies: bool = False,
    verdicts: Verdicts | None = None,
    progress: Progress = lambda what, done, total: None,
) -> Audit:
    """Audit a data directory, or several, in this process. Raises the errors of `make_plan`, and
    VerdictsError if verdicts cannot be kept."""
    started = time.monotonic()
    progress("looking", 0, 0)
    now_ms = time.time_ns() // 1_000_000 if now_ms is None else now_ms
    plan = make_plan(
        *data_dirs, now_ms=now_ms, since_ms=since_ms, with_bodies=with_bodies, verdicts=verdicts
    )
    found = merge(plan, _judged(plan, progress))
    found.took_s = time.monotonic() - started
    return found


def _judged(plan: AuditPlan, progress: Progress) -> Iterator[tuple[int, HourFacts]]:
    judges = {shard: judge_of(basis) for shard, basis in plan.bases.items()}
    total, done = sum(task.size for task in plan.tasks), 0
    for number, task in enumerate(plan.tasks):
        progress("judging", done, total)
        yield number, judges[task.shard](task)
        done += task.size


def merge(plan: AuditPlan, judged: Judged) -> Audit:
    """The audit that the facts of all tasks add up to."""
    facts: dict[int, list[HourFacts]] = {shard: [] for shard in plan.bases}
    by_number = dict(judged)
    assert len(by_number) == len(plan.tasks), (len(by_number), len(plan.tasks))
    for shard, basis in plan.bases.items():
        numbers = [number for number, task in enumerate(plan.tasks) if task.shard == shard]
        tasks = [plan.tasks[number] for number in numbers]
        confirmed = _confirmed(basis, tasks, [by_number[number] for number in numbers])
        if plan.verdicts is not None:
            _keep(plan.verdicts, basis, tasks, confirmed)
        facts[shard] = [*plan.kept.get(shard, ()), *confirmed]
    of_shards = {shard: merged(some) for shard, some in facts.items()}
    names = {
        shard: shard_names_of(basis.snapshot.subjects, basis.snapshot.subscriptions)
        for shard, basis in plan.bases.items()
    }
    return _Merging(plan, of_shards, names).audit()


def _keep(
    verdicts: Verdicts, basis: ShardBasis, tasks: Sequence[HourTask], facts: Sequence[HourFacts]
) -> None:
    """Keep the facts of each hour, all parts of it together."""
    judged = zip(tasks, facts, strict=True)
    for _, parts in groupby(judged, key=lambda one: one[0].hour):
        (task, first), *others = parts
        verdicts.keep(basis, task, merged([first, *(one for _, one in others)]))
    verdicts.tidy(basis)


def _confirmed(
    basis: ShardBasis, tasks: Sequence[HourTask], facts: list[HourFacts]
) -> list[HourFacts]:
    """The facts, without accusations that rest on definitions from before the read."""
    for _ in range(_ATTEMPTS):
        doubtful = [number for number, one in enumerate(facts) if one.has_doubts]
        if not doubtful:
            break
        newer = look(basis.directory, basis.now_ms)
        if newer.snapshot.subscriptions == basis.snapshot.subscriptions:
            break
        basis = newer
        judge = judge_of(basis)
        for number in doubtful:
            facts[number] = judge(tasks[number])
    return facts


@dataclass(slots=True)
class _Merging:
    """Adds up the facts of all shards to an audit."""

    plan: AuditPlan
    facts: dict[int, HourFacts]
    """The facts of each shard, by its number."""
    names: dict[int, ShardNames]
    examples: list[dict[str, Any]] = field(default_factory=list)

    def audit(self) -> Audit:
        subjects = SharedNumbers({shard: one.subjects for shard, one in self.names.items()})
        subscriptions = SharedNumbers(
            {shard: one.subscriptions for shard, one in self.names.items()}
        )
        counts = share_numbers(
            {shard: one.counts for shard, one in self.facts.items()}, subjects, subscriptions
        )
        groups = list(lines_of(counts, subjects.names, subscriptions.names))
        (everything,) = (line for line in groups if line["dimension"] == "all")
        for shard, one in self.facts.items():
            self._add_examples(shard, one.examples)
        violations = self._violations()
        messages = self._messages()
        lost, odd = self._follow()
        violations["mismatched"] += odd
        messages["missing"] += lost
        messages["deleted"] -= lost
        damage = list(chain(self.plan.damage, *(one.damage for one in self.facts.values())))
        self.examples.sort(key=lambda one: (one["due"] or "", one["shard"], one["seq"]))
        return Audit(
            data_dir=", ".join(map(shown_url, self.plan.roots)),
            shards=len(self.facts),
            taken_ms=self.plan.now_ms,
            took_s=0.0,
            messages={"accepted": sum(messages.values()), **messages},
            deliveries={one.name.lower(): everything[one.name.lower()] for one in EntryState},
            violations={**violations, "lost": lost, "damaged": len(damage)},
            damage=list(map(_place, damage)),
            lateness=lateness_of(counts),
            groups=groups,
            examples=self.examples[:EXAMPLES_MAX],
            hours_judged=len({(task.shard, task.hour) for task in self.plan.tasks}),
            hours_kept=sum(map(len, self.plan.kept.values())),
            open_hours=self._open_hours(),
            bodies=(
                sum(one.bodies for one in self.facts.values()) if self.plan.with_bodies else None
            ),
            since_ms=self.plan.since_ms,
            hours_left_out=self.plan.hours_left_out,
        )

    def _open_hours(self) -> list[OpenHour]:
        found = chain.from_iterable(
            open_hours(self.plan.bases[shard], one, self.names[shard])
            for shard, one in self.facts.items()
        )
        return sorted(found, key=lambda one: (one.hour, one.shard, one.seq))

    def _violations(self) -> dict[str, int]:
        """How many rows have each problem."""
        counts = sum((one.problems for one in self.facts.values()), np.zeros(1, np.int64))
        return dict(zip(map(problem_name, BrokenGuarantee), counts.tolist(), strict=True))

    def _messages(self) -> dict[str, int]:
        """The count of messages for each of OUTCOMES."""
        found: Counter[str] = Counter()
        for one in self.facts.values():
            for state, name in _PLAIN.items():
                found[name] += int(one.plain[state])
            found += outcomes_of(one.history)
        return {name: found[name] for name in OUTCOMES}

    def _follow(self) -> tuple[int, int]:
        """How many rows go on nowhere, and how many as another message."""
        lost_count = odd_count = 0
        for shard, one in self.facts.items():
            lost, odd = follow(one.history, self.plan.bases[shard].directory)
            self._add_examples(shard, lost[:EXAMPLES_MAX], "lost")
            self._add_examples(shard, odd[:EXAMPLES_MAX], "mismatched")
            lost_count, odd_count = lost_count + len(lost), odd_count + len(odd)
        return lost_count, odd_count

    def _add_examples(self, shard: int, rows: Rows, problem: str | None = None) -> None:
        directory, names = self.plan.bases[shard].directory, self.names[shard]
        codec = IdCodec(directory.shard, directory.id_secret)
        self.examples += [example_of(row, shard, names, codec, problem) for row in rows]


def _place(damage: Damage) -> dict[str, Any]:
    return {
        "file": damage.path,
        "offset": damage.offset,
        "end": damage.end,
        "reason": damage.reason,
        "first_seq": damage.first_seq,
        "last_seq": damage.last_seq,
    }
