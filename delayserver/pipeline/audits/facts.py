"""The facts of an hour once it is judged: counts, and the few rows that need a second look.

An hour of a million messages becomes some hundred rows: one for each subject, subscription, state
and bucket of lateness that occurs. Single rows are kept of messages that went through several
schedule rows, since they are followed across hours. Broken rows are kept too, but no more examples
than a person reads.

Facts of parts of an hour, and of hours, add up. They travel as bytes from a task to the driver, and
stay in a file.

Cost: about 0.1 µs per row to add it; 66 bytes for each row with a history. Threads: a value that
belongs to its maker.
"""

from collections.abc import Iterable
from dataclasses import astuple, dataclass, field

import msgspec
import numpy as np

from delayserver.pipeline.reports.lateness import bucket_of
from delayserver.pipeline.states.entry_states import SETTLED_DTYPE, BrokenGuarantee, EntryState
from delayserver.records.direct import DIRECT_FIRST_ID
from storage.frame import Damage, Rows
from storage.rows import concatenate, select

EXAMPLES_MAX = 200
"""Violations that are shown one by one; all of them are counted."""
STATES = max(EntryState) + 1
COUNT_DTYPE = np.dtype(
    [
        ("hour", "<i8"),
        ("subject_id", "<i8"),
        ("subscription_id", "<i8"),
        ("state", "<i8"),
        ("bucket", "<i8"),
        ("count", "<i8"),
        ("entries", "<i8"),
        ("max_ms", "<i8"),
    ]
)
"""How often each combination occurs.

subscription_id  DIRECT_FIRST_ID: any direct one
bucket           of the lateness of a delivery; -1: not delivered
entries          how many of these rows are the first of their entry
max_ms           the greatest lateness; -1: nothing was delivered
"""
_BINS_MAX = 1 << 22
_TABLE_MAX = 1 << 20
_BITS = [int(one) for one in BrokenGuarantee]


def _none(dtype: np.dtype[np.void]) -> Rows:
    return np.empty(0, dtype)


@dataclass(slots=True)
class HourFacts:
    """The facts of an hour, of a part of one, or of many."""

    counts: Rows = field(default_factory=lambda: _none(COUNT_DTYPE))
    plain: np.ndarray = field(default_factory=lambda: np.zeros(STATES, np.int64))
    """How many entries without a history have each entry state."""
    problems: np.ndarray = field(default_factory=lambda: np.zeros(len(_BITS), np.int64))
    """How many rows have each problem, in the order of BrokenGuarantee."""
    history: Rows = field(default_factory=lambda: _none(SETTLED_DTYPE))
    """All rows of entries with a history."""
    examples: Rows = field(default_factory=lambda: _none(SETTLED_DTYPE))
    """The first rows with problems."""
    waiting: Rows = field(default_factory=lambda: _none(SETTLED_DTYPE))
    """The first waiting row of each subject and subscription that has one; only for past hours."""
    damage: list[Damage] = field(default_factory=list)
    bodies: int = 0
    """Payloads that were read and match their checksums."""

    def add(self, rows: Rows, hour: int, *, is_over: bool) -> None:
        """Count rows of an hour (SETTLED_DTYPE, the first of an entry before its others)."""
        problems = rows["problems"]
        if problems.any():
            bad = select(rows, problems != 0)
            self._add_problems(bad)
        known = rows if rows["state"].all() else select(rows, rows["state"] != 0)
        if not len(known):
            return
        self.counts = concatenate([self.counts, _counted(known, hour)], COUNT_DTYPE)
        is_plain = known["is_first"] & ~known["has_history"]
        self.plain += np.bincount(known["entry_state"][is_plain], minlength=STATES)
        if known["has_history"].any():
            history = select(known, known["has_history"])
            self.history = concatenate([self.history, history], SETTLED_DTYPE)
        if is_over:
            waits = np.flatnonzero(known["state"] == EntryState.PENDING)
            self._add_waiting(select(known, waits))

    def _add_problems(self, bad: Rows) -> None:
        self.problems += [np.count_nonzero(bad["problems"] & np.uint16(bit)) for bit in _BITS]
        self._add_examples(bad)

    def _add_examples(self, bad: Rows) -> None:
        room = EXAMPLES_MAX - len(self.examples)
        if room > 0 and len(bad):
            self.examples = concatenate([self.examples, bad[:room]], SETTLED_DTYPE)

    def _add_waiting(self, rows: Rows) -> None:
        if len(rows):
            both = concatenate([self.waiting, rows], SETTLED_DTYPE)
            keys = np.stack(
                [both["due_ms"] // 3_600_000, both["subject_id"], both["subscription_id"]], axis=1
            )
            _, firsts = np.unique(keys, axis=0, return_index=True)
            self.waiting = select(both, np.sort(firsts))

    def merge(self, other: "HourFacts") -> None:
        """Add the facts of another hour or part."""
        self.counts = concatenate([self.counts, other.counts], COUNT_DTYPE)
        self.plain += other.plain
        self.problems += other.problems
        self.history = concatenate([self.history, other.history], SETTLED_DTYPE)
        self._add_examples(other.examples)
        self._add_waiting(other.waiting)
        # Several parts of an hour find the same damaged place.
        self.damage = list(dict.fromkeys([*self.damage, *other.damage]))
        self.bodies += other.bodies

    @property
    def has_doubts(self) -> bool:
        """Whether a row is accused, rightly if definitions are as they were taken to be."""
        return any(
            self.problems[_BITS.index(int(one))]
            for one in (
                BrokenGuarantee.UNKNOWN_SUBSCRIPTION,
                BrokenGuarantee.MISDIRECTED,
                BrokenGuarantee.WRONGLY_DROPPED,
            )
        )

    def pack(self) -> bytes:
        """The facts as bytes."""
        return msgspec.msgpack.encode(
            [
                *(
                    getattr(self, name).tobytes()
                    for name in ("counts", "plain", "problems", "history", "examples", "waiting")
                ),
                [astuple(one) for one in self.damage],
                self.bodies,
            ]
        )


_Packed = tuple[
    bytes,
    bytes,
    bytes,
    bytes,
    bytes,
    bytes,
    list[tuple[str, int, int, str, bool, int, int, bool]],
    int,
]
_decoder = msgspec.msgpack.Decoder(_Packed)


def unpack_facts(data: bytes) -> HourFacts:
    """The facts from bytes. Raises msgspec.DecodeError, ValueError."""
    counts, plain, problems, history, examples, waiting, damage, bodies = _decoder.decode(data)
    return HourFacts(
        counts=np.frombuffer(counts, COUNT_DTYPE),
        plain=np.frombuffer(plain, np.int64).copy(),
        problems=np.frombuffer(problems, np.int64).copy(),
        history=np.frombuffer(history, SETTLED_DTYPE),
        examples=np.frombuffer(examples, SETTLED_DTYPE),
        waiting=np.frombuffer(waiting, SETTLED_DTYPE),
        damage=[Damage(*one) for one in damage],
        bodies=bodies,
    )


def merged(facts: Iterable[HourFacts]) -> HourFacts:
    """The facts of several hours as those of one."""
    whole = HourFacts()
    for one in facts:
        whole.merge(one)
    return whole


def _counted(rows: Rows, hour: int) -> Rows:
    """How often each combination occurs."""
    state = rows["state"].astype(np.int64)
    is_delivered = state == EntryState.DELIVERED
    lateness_ms = rows["settled_ms"] - rows["due_ms"]
    bucket = np.where(is_delivered, bucket_of(lateness_ms), -1).astype(np.int64)
    subscription_id = np.minimum(rows["subscription_id"], np.uint32(DIRECT_FIRST_ID))
    values, codes = zip(
        *(_coded(column) for column in (rows["subject_id"], subscription_id, state, bucket)),
        strict=True,
    )
    sizes = [len(one) for one in values]
    bins = int(np.prod(sizes, dtype=object))
    assert bins < 1 << 63
    keys = codes[0]
    for size, code in zip(sizes[1:], codes[1:], strict=True):
        keys = keys * size + code
    found = np.arange(bins)
    if bins > _BINS_MAX:
        found, keys = np.unique(keys, return_inverse=True)
    counts = np.bincount(keys, minlength=len(found))
    entries = np.bincount(keys[rows["is_first"]], minlength=len(found))
    max_ms = np.full(len(found), -1, np.int64)
    np.maximum.at(max_ms, keys[is_delivered], lateness_ms[is_delivered])
    occurs = np.flatnonzero(counts)
    table = np.empty(len(occurs), COUNT_DTYPE)
    rest = found[occurs]
    for name, distinct in zip(
        ("bucket", "state", "subscription_id", "subject_id"), reversed(values), strict=True
    ):
        table[name] = distinct[rest % len(distinct)]
        rest = rest // len(distinct)
    table["hour"], table["count"] = hour, counts[occurs]
    table["entries"], table["max_ms"] = entries[occurs], max_ms[occurs]
    return table


def _coded(column: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The values of a column, in order, and for each row which of them it has."""
    low, high = int(column.min()), int(column.max())
    if low == high:
        return np.array([low]), np.zeros(len(column), np.int64)
    if high - low < _TABLE_MAX:
        places = column.astype(np.int64) - low
        occurs = np.zeros(high - low + 1, bool)
        occurs[places] = True
        return np.flatnonzero(occurs) + low, (np.cumsum(occurs) - 1)[places]
    values, codes = np.unique(column, return_inverse=True)
    return values.astype(np.int64), codes
