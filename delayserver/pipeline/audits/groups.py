"""From counts to lines: everything, each hour, each subject and each subscription.

A line has the number of deliveries in each state, and percentiles of their lateness, which are read
from counts in buckets.

Cost: a sort of the counts for each of the four, and some µs for each line. Threads: pure functions.
"""

import math
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

import numpy as np

from delayserver.pipeline.audits.facts import COUNT_DTYPE
from delayserver.pipeline.reports.lateness import upper_ms
from delayserver.pipeline.reports.names import SharedNumbers
from delayserver.pipeline.states.entry_states import EntryState
from storage.frame import Rows
from storage.rows import HOUR_MS, concatenate

PERCENTILES = {"p50_ms": 0.5, "p90_ms": 0.9, "p99_ms": 0.99, "p999_ms": 0.999}
DIMENSIONS = ("all", "hour", "subject", "subscription")
_KEYS = {"hour": "hour", "subject": "subject_id", "subscription": "subscription_id"}

GroupLine = dict[str, Any]
"""dimension, key, name, entries, a number for each state, max_ms, p50_ms, …; times are None if
nothing was delivered."""


def share_numbers(
    of_shards: Mapping[int, Rows], subjects: SharedNumbers, subscriptions: SharedNumbers
) -> Rows:
    """The counts of all shards, with the numbers that all of them share."""
    parts = []
    for shard, counts in of_shards.items():
        shared = counts.copy()
        shared["subject_id"] = subjects.of_shard(shard, counts["subject_id"])
        shared["subscription_id"] = subscriptions.of_shard(shard, counts["subscription_id"])
        parts.append(shared)
    return concatenate(parts, COUNT_DTYPE)


def lines_of(
    counts: Rows, subjects: Mapping[int, str], subscriptions: Mapping[int, str]
) -> Iterator[GroupLine]:
    """All lines, in the order of their dimensions and keys; those without a name are left out."""
    for dimension in DIMENSIONS:
        keys = counts[_KEYS[dimension]] if dimension in _KEYS else np.zeros(len(counts), np.int64)
        order = np.lexsort([counts["bucket"], keys])
        sorted_keys, in_order = keys[order], counts[order]
        cuts = np.flatnonzero(sorted_keys[1:] != sorted_keys[:-1]) + 1
        for some in np.split(np.arange(len(order)), cuts) if len(order) else [order]:
            key = int(sorted_keys[some[0]]) if len(some) else 0
            match dimension:
                case "subject":
                    name = subjects.get(key)
                case "subscription":
                    name = subscriptions.get(key)
                case "hour":
                    moment = datetime.fromtimestamp(key * HOUR_MS // 1000, UTC)
                    name = str(moment) if len(some) else None
                case _:
                    name = "all"
            if name is not None:
                yield {"dimension": dimension, "key": key, "name": name, **_line(in_order[some])}


def _line(counts: Rows) -> GroupLine:
    by_state = np.bincount(counts["state"], counts["count"], minlength=len(EntryState) + 1)
    line: GroupLine = {"entries": int(counts["entries"].sum())}
    line |= {one.name.lower(): int(by_state[one]) for one in EntryState}
    late = counts[counts["bucket"] >= 0]
    max_ms = int(late["max_ms"].max()) if len(late) else None
    line["max_ms"] = max_ms
    through = np.cumsum(late["count"])
    for name, part in PERCENTILES.items():
        line[name] = None
        if max_ms is not None:
            at = np.searchsorted(through, math.ceil(int(through[-1]) * part))
            # The upper end of a bucket may be a little above the latest.
            line[name] = min(int(upper_ms(late["bucket"][[at]])[0]), max_ms)
    return line


def lateness_of(counts: Rows) -> list[dict[str, int]]:
    """bucket, upper_ms and count of all deliveries, in order."""
    late = counts[counts["bucket"] >= 0]
    buckets, places = np.unique(late["bucket"], return_inverse=True)
    numbers = np.bincount(places, late["count"]) if len(late) else np.empty(0)
    columns = (buckets.tolist(), upper_ms(buckets).tolist(), map(int, numbers.tolist()))
    names = ("bucket", "upper_ms", "count")
    return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]
