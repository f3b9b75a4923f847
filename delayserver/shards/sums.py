"""Counts of several shards as those of one server.

Cost: a few µs per shard. Threads: pure functions.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, Final

import msgspec

from delayserver.decisions.failing import FAILING_MAX
from delayserver.wire.bulk import BackupDocument, BackupState, BackupStep
from delayserver.wire.operations import (
    FailingDocument,
    ForecastBucketDocument,
    ForecastDocument,
    LatenessDocument,
    StatsDocument,
)

_Numbers = dict[str, msgspec.Raw]
"""A document whose fields stay as they are written."""
BACKUP_STEPS: Final[Sequence[BackupStep]] = ("waiting", "copying", "checking")
WAITING: Final = ("queued", "in_flight")
"""Fields of a subscription that each shard counts."""
FAILING: Final = "failing_since"
"""The field of a subscription that each shard sees for itself."""


def _first(values: Sequence[Any]) -> Any:
    return values[0]


def _earliest(times: Sequence[str | None]) -> str | None:
    """Times as `format_time` writes them are in the order of their text."""
    return min((time for time in times if time is not None), default=None)


def _add_lateness(parts: Sequence[LatenessDocument]) -> LatenessDocument:
    counts = zip(*(one.counts for one in parts), strict=True)
    return LatenessDocument(parts[0].bounds_ms, [sum(some) for some in counts])


def _merge_failing(parts: Sequence[Sequence[FailingDocument]]) -> list[FailingDocument]:
    """A receiver that fails in one shard is worth a look, whatever another has seen."""
    since: dict[str, str] = {}
    for one in chain.from_iterable(parts):
        since[one.subscription] = min(one.since, since.get(one.subscription, one.since))
    longest = sorted((at, name) for name, at in since.items())[:FAILING_MAX]
    return [FailingDocument(name, at) for at, name in longest]


STATS: Final[Mapping[str, Callable[[Sequence[Any]], Any]]] = {
    "version": _first,
    "started_at": max,
    "accepted": sum,
    "cancelled": sum,
    "delivered": sum,
    "retried": sum,
    "dead": sum,
    "dead_letters": sum,
    "lateness": _add_lateness,
    "last_seq": sum,
    "checkpoint_seq": sum,
    "pending_loaded": sum,
    "pending_later": sum,
    "queued": sum,
    "in_flight": sum,
    "oldest_due_at": _earliest,
    "unmatched": sum,
    "subjects": max,
    "subscriptions": max,
    "paused": max,
    "failing": _merge_failing,
    "unfiled_bytes": sum,
    "replay_lag_ms": max,
    "archive_waiting_hours": sum,
    "archive_waiting_bytes": sum,
    "disk_free_bytes": min,
}
"""How the shards' values of each field of StatsDocument are joined."""


def add_stats(documents: Sequence[StatsDocument]) -> StatsDocument:
    """The stats of all shards; the first is that of the shard which answers.

    Counts are added up. `started_at` is when the last one started: from then on everything is
    counted, and it changes whenever counts go back. `last_seq` and `checkpoint_seq` are sums, too:
    seqs are per shard, so the sum is how many records were ever made, and the difference is how
    many would be read again after a crash, as it is of one server. A subscription is in every
    shard, so the largest count of them stands for all; and a subject is in each shard that had a
    message of it, so that the largest count is right once messages are spread. Hours that wait to
    be archived are files, one in each shard. The disk is that of the shard with the least room."""
    return StatsDocument(
        **{name: rule([getattr(one, name) for one in documents]) for name, rule in STATS.items()}
    )


def add_forecasts(documents: Iterable[ForecastDocument]) -> ForecastDocument:
    """The forecast of all shards, which were asked for the same buckets."""
    counts: Counter[str] = Counter()
    bucket = ""
    for document in documents:
        bucket = document.bucket
        for one in document.buckets:
            counts[one.since] += one.count
    buckets = [ForecastBucketDocument(since, count) for since, count in sorted(counts.items())]
    return ForecastDocument(bucket, buckets)


def add_backups(lists: Mapping[int, Sequence[BackupDocument]]) -> list[BackupDocument]:
    """The backups of all shards, by shard; in the order in which they were made, as each list is,
    whatever the clock said."""
    names = {one.name: None for some in lists.values() for one in some}
    by_name = [{one.name: one for one in some} for some in lists.values()]
    found = [
        add_backup({shard: some.get(name) for shard, some in zip(lists, by_name, strict=True)})
        for name in names
    ]
    newer = [{name: len(some) - at for at, name in enumerate(some)} for some in by_name]
    return sorted(found, key=lambda one: -min(some[one.name] for some in newer if one.name in some))


def add_backup(parts: Mapping[int, BackupDocument | None]) -> BackupDocument:
    """A backup of all shards, made of each shard's part; None: that shard has none.

    The backup is complete when all parts are. It holds the state at the moments in `shards`: every
    change that was answered before `started_at`, and none that came after `taken_at`. The log
    behind it reaches as far as the log of each shard."""
    known = [part for part in parts.values() if part is not None]
    missing = [shard for shard, part in parts.items() if part is None]
    states = {part.state for part in known}
    is_running = "running" in states
    errors = [
        f"shard {shard}: {part.error}"
        for shard, part in parts.items()
        if part is not None and part.error is not None
    ]
    state: BackupState = "running" if is_running else "complete"
    if "failed" in states or (missing and not is_running):
        state = "failed"
        if not errors:
            errors = [f"it has no part of shard {', '.join(map(str, missing))}: delete it"]
    steps = [step for step in BACKUP_STEPS if any(part.step == step for part in known)]
    taken = [part.taken_at for part in known if part.taken_at is not None]
    reaches = [part.log_reaches_at for part in known if part.log_reaches_at is not None]
    completed = [part.completed_at for part in known if part.completed_at is not None]
    return BackupDocument(
        name=known[0].name,
        state=state,
        step=steps[0] if steps and is_running else None,
        started_at=min(part.started_at for part in known),
        taken_at=max(taken) if state == "complete" else None,
        completed_at=None if is_running else max(completed, default=None),
        total_bytes=sum(part.total_bytes for part in known),
        done_bytes=sum(part.done_bytes for part in known),
        copied_bytes=sum(part.copied_bytes for part in known),
        verified=state == "complete" and all(part.verified for part in known),
        error="; ".join(errors) or None,
        shards=[one for part in known for one in part.shards],
        log_reaches_at=min(reaches) if len(reaches) == len(parts) else None,
    )


def add_waiting(own: _Numbers, others: Iterable[_Numbers]) -> _Numbers:
    """A subscription as in the first document, with the rows that wait for it in all shards, and
    the earliest time since when it fails in one of them."""
    documents = [own, *others]
    times = (bytes(one.get(FAILING, b"null")) for one in documents)
    since = min((text for text in times if text != b"null"), default=None)
    failing = {} if since is None else {FAILING: msgspec.Raw(since)}
    return (
        own
        | failing
        | {
            name: msgspec.Raw(b"%d" % sum(int(document[name]) for document in documents))
            for name in WAITING
        }
    )


def add_by_name(pages: Iterable[Iterable[Mapping[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Rows that have a name and counts, by their names, with the counts of all shards added."""
    added: dict[str, dict[str, Any]] = {}
    for row in chain.from_iterable(pages):
        known = added.setdefault(row["name"], {**row, **dict.fromkeys(row.keys() - {"name"}, 0)})
        for field in row.keys() - {"name"}:
            known[field] += row[field]
    return added
