"""The selection of a read, given by its options: it picks files, frames and rows.

    from, to        the due time, as RFC 3339 or in ms since the epoch; `to` itself is not in it
    seq             a number, or a range: 5, 5..9, 5.., ..9
    subject         names, separated by commas
    subscription    likewise; `_to` stands for messages that go where they say themselves
    shard           numbers, separated by commas; the files of the others are not looked at
    state           of delaystate: the states of messages, separated by commas

These are options, and not the conditions that Spark would push down. A selection belongs to the
relation, so it is the same each time that the relation is looked at. A condition that Spark pushes
stays with a relation that it planned once, and is applied to later queries that have other
conditions. A `where` on top of a selection is Spark's, and always right.

Cost: a few ns per row and option. Threads: values and pure functions.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from delayserver.errors import InputError
from delayserver.pipeline.logs.columns import Names
from delayserver.pipeline.logs.logs import ALL, Range
from delayserver.pipeline.logs.options import Options
from delayserver.records.arrow import texts
from delayserver.records.direct import DIRECT_FIRST_ID, DIRECT_NAME
from delayserver.times import read_time_ms
from storage.frame import Rows
from storage.rows import HOUR_MS

SELECTING = ("from", "to", "seq", "subject", "shard")
"""The options of every source that reads."""

_NUMBER = re.compile(r"[0-9]{1,18}")
_SEQ = re.compile(r"([0-9]{0,18})(\.\.)?([0-9]{0,18})")


@dataclass(frozen=True, slots=True)
class RowSelection:
    """The rows of a shard that are wanted: names are numbers here."""

    due_ms: Range
    seqs: Range
    subject_ids: np.ndarray | None
    subscription_ids: np.ndarray | None
    takes_direct: bool
    """Also messages that go where they say themselves, which have many numbers."""
    states: tuple[int, ...]
    """Empty: all of them."""

    def mask(self, rows: Rows) -> np.ndarray:
        """Whether each row is wanted."""
        keep = np.ones(len(rows), bool)
        if self.due_ms != ALL:
            keep &= self.due_ms.holds(rows["due_ms"])
        if self.seqs != ALL:
            keep &= self.seqs.holds(rows["seq"])
        if self.subject_ids is not None:
            keep &= np.isin(rows["subject_id"], self.subject_ids)
        if self.subscription_ids is not None:
            numbers = rows["subscription_id"]
            wanted = np.isin(numbers, self.subscription_ids)
            keep &= (wanted | (numbers >= DIRECT_FIRST_ID)) if self.takes_direct else wanted
        if self.states:
            keep &= np.isin(rows["state"], self.states)
        return keep


@dataclass(frozen=True, slots=True)
class Selection:
    """The wanted part of a data directory."""

    due_ms: Range = ALL
    seqs: Range = ALL
    subjects: tuple[str, ...] = ()
    """Empty: all subjects; likewise the fields below."""
    subscriptions: tuple[str, ...] = ()
    shards: tuple[int, ...] = ()
    states: tuple[int, ...] = ()

    @property
    def hours(self) -> Range:
        """The hours whose files may hold rows that are wanted."""
        return Range(self.due_ms.first // HOUR_MS, self.due_ms.last // HOUR_MS)

    @property
    def columns(self) -> frozenset[str]:
        """The names that select rows, and that must be known for it."""
        named = {"subject": self.subjects, "subscription": self.subscriptions}
        return frozenset(column for column, names in named.items() if names)

    def of_shard(self, names: Names) -> RowSelection:
        """The wanted rows of a shard, whose names these are."""
        return RowSelection(
            self.due_ms,
            self.seqs,
            _numbers(names.subjects, self.subjects),
            _numbers(names.subscriptions, self.subscriptions),
            DIRECT_NAME in self.subscriptions,
            self.states,
        )


def parse_selection(options: Options, states: Mapping[str, int] | None = None) -> Selection:
    """The selection in the options of a source. `states`: the numbers of its states, by name.

    Raises InputError, which names the option."""
    return Selection(
        due_ms=_due_ms(options),
        seqs=_seqs(options),
        subjects=options.names("subject"),
        subscriptions=options.names("subscription"),
        shards=_shards(options),
        states=_states(options, states or {}),
    )


def _due_ms(options: Options) -> Range:
    first_ms, end_ms = _time_ms(options, "from"), _time_ms(options, "to")
    return Range(
        ALL.first if first_ms is None else first_ms, ALL.last if end_ms is None else end_ms - 1
    )


def _time_ms(options: Options, name: str) -> int | None:
    text = options.text(name)
    if text is None:
        return None
    try:
        return read_time_ms(text)
    except InputError as error:
        raise options.error(name, f"a time ({error.detail})") from None


def _seqs(options: Options) -> Range:
    text = options.text("seq")
    if text is None:
        return ALL
    first, dots, last = found.groups("") if (found := _SEQ.fullmatch(text)) else ("", "", "")
    wanted = Range(int(first or ALL.first), int((last if dots else first) or ALL.last))
    if not (first or last) or wanted.last < wanted.first:
        raise options.error("seq", "a number or a range, as 5, 5..9, 5.. or ..9")
    return wanted


def _shards(options: Options) -> tuple[int, ...]:
    found = options.names("shard")
    if not all(map(_NUMBER.fullmatch, found)):
        raise options.error("shard", "a number, or several separated by commas")
    return tuple(map(int, found))


def _states(options: Options, known: Mapping[str, int]) -> tuple[int, ...]:
    found = options.names("state")
    if not known.keys() >= set(found):
        raise options.error("state", f"one or several of {', '.join(known)}")
    return tuple(known[name] for name in found)


def _numbers(table: pa.Array, wanted: Collection[str]) -> np.ndarray | None:
    """The numbers of names; None: of all."""
    if not wanted:
        return None
    present = pc.is_in(table, value_set=texts(list(wanted)), skip_nulls=True)
    return np.flatnonzero(present.to_numpy(zero_copy_only=False))
