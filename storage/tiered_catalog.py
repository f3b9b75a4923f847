"""A catalog whose table KEYS stands in two tiers: young keys in the table, the others in key runs.

    commit ─┬─▶ KEYS of the inner catalog ── when there are many ──▶ run ─ run ── run   newest first
            └── very many at once: a run of their own ─────────────▶
    get    ─▶ KEYS, then run after run, and the first that knows the key answers

Hashes come in no order, so in a large table each new key has a page of its own: a checkpoint of
20,000 keys took 0.1 s with a million others and 1.5 s with a hundred million. Here the table is
emptied again and again, and its keys are merged with the newest runs, those that are no longer than
the rows that are merged with them, as a counter carries. So each run is longer than all before it
together, there are few, and a key is written some times in its life. This is a log-structured
merge-tree (O'Neil, Cheng, Gawlick, O'Neil 1996) with a B+ tree as its first level.

The keys of an import come by the hundred thousand in one commit. Sorted they are a run, which that
commit names, in a fifth of the time that the table takes. The table counts before it, so a key that
the table has, too, is also put there. With a few of such runs all are merged, if there is nothing
else to do: an import goes first, until there are very many.

A merge goes slice by slice, beside everything else; a commit meanwhile is noted. In the end one
commit of the inner catalog empties the table, puts back the noted changes, and names the new runs.
A crash before it leaves a file that the catalog does not name, which the next start deletes. A
removed key keeps the value NOTHING as long as a run may know the key.

Cost: as the inner catalog, and 0.15 µs for each key that is in no run, run by run; 5 µs for each
that is in one. A run of a commit: 0.6 µs for each key, and a look into the table. Merging: some 0.5
µs for each key of the runs, 1 µs for one of the table, and the memory of the commits meanwhile.
Threads: any may read; commits and `tidy` belong to one.
"""

import heapq
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from storage.catalog import Catalog, Frozen, ManyWrites, Table, View, Writes
from storage.catalog_columns import Columns, ascending
from storage.errors import DamageError, ShortageError
from storage.files import Files
from storage.frame import Damage
from storage.key_runs import (
    DIRECTORY,
    NOTHING,
    RUNS_KEY,
    FilterBits,
    KeyRun,
    RunState,
    RunWriter,
    heads_of,
    merged,
    numbers_in,
    pack_runs,
    run_path,
    unpack_runs,
)

FEW_KEYS = 8
"""So many are looked up one by one in less time than together."""
_HEADS = 1 << 64
_PRESSING = 8
"""So many times as much as usually has to be there until a merge cannot wait."""
_RUN_SLICE = 8192
"""Rows of a run that are written at once, and looked up in the table in one call."""
_KEY = itemgetter(0)


class KeyTiers(NamedTuple):
    """When keys are moved, and how."""

    young_max: int = 1 << 20
    """Keys in the table before they are merged into a run: with these a commit is still quick."""
    slice_rows: int = 1 << 18
    """Rows of a merge in one step: some 50 ms."""
    run_min: int = 1 << 16
    """Keys of one commit that are a run of their own."""
    runs_max: int = 3
    """With more of them those are merged that came one after the other: each is asked for a key."""


KEY_TIERS = KeyTiers()


class TieredCatalog:
    """See `storage.catalog.Catalog`."""

    def __init__(
        self,
        inner: Catalog,
        files: Files,
        *,
        stamp: int,
        readonly: bool = False,
        tiers: KeyTiers = KEY_TIERS,
    ) -> None:
        """Open the runs that `inner` names, and delete all others. Raises DamageError."""
        self.inner = inner
        self.run_keys_min = tiers.run_min
        self._files = files
        self._stamp = stamp
        self._tiers = tiers
        self.runs: tuple[KeyRun, ...] = ()
        """Newest first."""
        self._outdated: tuple[KeyRun, ...] = ()
        """The runs that they replaced: another thread may be reading them."""
        self._merge: _Merge | None = None
        self.runs = self._open_all()
        known = {run.state.number for run in self.runs}
        self._next_number = max(known, default=0) + 1
        if not readonly:
            files.make_directory(DIRECTORY)
            for number in set(numbers_in(files)) - known:
                files.unlink(run_path(number))

    def _open_all(self) -> tuple[KeyRun, ...]:
        states = self._named()
        runs: list[KeyRun] = []
        while len(runs) < len(states):
            state = states[len(runs)]
            try:
                runs.append(self._open(state))
            except FileNotFoundError:
                # The owner of the directory may have merged it with others since.
                states, before = self._named(), states
                if states == before:
                    reason = "the catalog names it, and it is not there"
                    raise DamageError(run_path(state.number), 0, reason) from None
                while runs:
                    runs.pop().close()
        return tuple(runs)

    def _named(self) -> list[RunState]:
        return unpack_runs(self.inner.get(Table.META, RUNS_KEY) or b"")

    def _open(self, state: RunState) -> KeyRun:
        return KeyRun(self._files, state, stamp=self._stamp)

    # ── reading ────────────────────────────────────────────────────────────────────────────────

    def get(self, table: Table, key: bytes) -> bytes | None:
        value = self.inner.get(table, key)
        return value if table is not Table.KEYS else self.older(key, value)

    def older(self, key: bytes, value: bytes | None) -> bytes | None:
        """The value of a key if the table has `value` for it."""
        if value is None:
            for run in self.runs:
                if (value := run.get(key)) is not None:
                    break
        return None if value == NOTHING else value

    def get_many(self, table: Table, keys: Sequence[bytes]) -> dict[bytes, bytes]:
        found = self.inner.get_many(table, keys)
        return found if table is not Table.KEYS else self.older_many(keys, found)

    def older_many(self, keys: Sequence[bytes], found: dict[bytes, bytes]) -> dict[bytes, bytes]:
        """The same for many keys."""
        runs = self.runs
        if not runs and NOTHING not in found.values():
            return found
        if len(keys) <= FEW_KEYS:
            pairs = ((key, self.older(key, found.get(key))) for key in keys)
            return {key: value for key, value in pairs if value is not None}
        known = FilterBits.of(np.frombuffer(b"".join(keys), "V16"))
        for run in runs:
            run.add_found(keys, known, found)
        return {key: value for key, value in found.items() if value != NOTHING}

    def view(self) -> View:
        return TieredView(self, self.inner.view())

    def scan(
        self, table: Table, start: bytes = b"", *, prefix: bytes = b""
    ) -> Iterator[tuple[bytes, bytes]]:
        found = self.inner.scan(table, start, prefix=prefix)
        if table is not Table.KEYS:
            return found
        tiers = [found, *(_rows(run, max(start, prefix), prefix) for run in self.runs)]
        pairs = heapq.merge(*tiers, key=_KEY)  # of the same key that of the newest tier first
        newest = (next(same) for _, same in groupby(pairs, key=_KEY))
        return (pair for pair in newest if pair[1] != NOTHING)

    def scan_recent(self, table: Table) -> Iterator[tuple[bytes, bytes]]:
        return (pair for pair in self.inner.scan(table) if pair[1] != NOTHING)

    def size(self, table: Table) -> int:
        of_runs = sum(run.state.rows for run in self.runs) if table is Table.KEYS else 0
        return self.inner.size(table) + of_runs

    def freeze(self) -> Frozen:
        return self.inner.freeze()

    def verify(self) -> list[Damage]:
        return self.inner.verify() + self.verify_runs()

    def verify_runs(self) -> list[Damage]:
        """Read every block of the runs. Returns the damage."""
        return [found for run in self.runs for found in run.verify()]

    def close(self) -> None:
        self.close_runs()
        self.inner.close()

    def close_runs(self) -> None:
        """Give back its own resources; the caller that opened the inner catalog closes it."""
        for run in self.runs + self._outdated:
            run.close()
        self.runs = self._outdated = ()

    # ── writing ────────────────────────────────────────────────────────────────────────────────

    def refill(self, table: Table, parts: Sequence[Columns], writes: Writes) -> None:
        assert table is not Table.KEYS
        self.inner.refill(table, parts, writes)

    def commit(self, writes: Writes, many: ManyWrites | None = None) -> None:
        pairs = writes.get(Table.KEYS, ())
        merge, run = self._merge, None
        if pairs and (self.runs or merge is not None):
            pairs = [(key, NOTHING if value is None else value) for key, value in pairs]
            writes = {**writes, Table.KEYS: pairs}
        columns = list((many or {}).get(Table.KEYS, ()))
        if sum(len(part.keys) for part in columns) >= self.run_keys_min:
            run, columns = self._as_run(pairs, columns)
            states = [one.state for one in (run, *self.runs)]
            names = [*writes.get(Table.META, ()), (RUNS_KEY, pack_runs(states))]
            writes = {**writes, Table.META: names}
        try:
            self.inner.commit(writes, {**(many or {}), Table.KEYS: columns})
        except ShortageError:
            if run is not None:
                run.close()
                # An error may be told behind the commit, and then the catalog names it.
                if run.state.number not in {state.number for state in self._named()}:
                    self._delete(run.path)
            raise
        if merge is not None:
            merge.since += [*_as_columns(pairs), *columns]
        if run is not None:
            self.runs = (run, *self.runs)
            if merge is not None:
                merge.newer += 1

    def _as_run(
        self, pairs: Sequence[tuple[bytes, bytes | None]], parts: Sequence[Columns]
    ) -> tuple[KeyRun, list[Columns]]:
        """A run with these keys, which the catalog does not name yet, and those of them that the
        table has, or gets with `pairs`, which are older."""
        columns = ascending(parts)
        number = self._next_number
        self._next_number += 1
        count = len(columns.keys)
        newer = [key for key, _ in pairs]
        writer = RunWriter(self._files, number, stamp=self._stamp, count_max=count)
        try:
            for start in range(0, count, _RUN_SLICE):
                part = Columns(*(one[start : start + _RUN_SLICE] for one in columns))
                writer.append(part)
                newer += self.inner.get_many(Table.KEYS, part.keys.tolist())
            run = self._open(writer.finish())
        except ShortageError:
            writer.close()
            self._delete(run_path(number))
            raise
        in_table = np.isin(heads_of(columns.keys), heads_of(np.array(newer, "V16")))
        return run, [Columns(*(one[in_table] for one in columns))] if newer else []

    def _delete(self, path: str) -> None:
        """Delete a file that the catalog does not name; the next start deletes it if this fails."""
        with suppress(ShortageError, FileNotFoundError):
            self._files.unlink(path)

    def tidy(self, *, if_pressing: bool = False) -> bool:
        """Merge a slice of the young keys and of runs into a new run, where it is time for that;
        True: there is more to do. Call it between two checkpoints.

        Raises ShortageError: call it again. Raises CatalogError, DamageError, SyncError."""
        if self._merge is None:
            young, more = self.inner.size(Table.KEYS), _PRESSING if if_pressing else 1
            are_many = len(self.runs) > self._tiers.runs_max * more and self._to_merge(0) > 0
            if young < self._tiers.young_max * more and not are_many:
                return False
            self._merge = self._begin(young)
        if self._merge.step():
            self._finish(self._merge)
        return True

    def _to_merge(self, young: int) -> int:
        """How many of the newest runs are to be merged with so many young keys: up to the last that
        is no longer than all before it together."""
        count, taken = young, 0
        for place, run in enumerate(self.runs, 1):
            if run.state.rows <= count:
                taken = place
            count += run.state.rows
        return taken

    def _begin(self, young: int) -> "_Merge":
        taken = self._to_merge(young)
        count = young + sum(run.state.rows for run in self.runs[:taken])
        writer = RunWriter(self._files, self._next_number, stamp=self._stamp, count_max=count)
        self._next_number += 1
        slices = -(-count // self._tiers.slice_rows)
        is_last = taken == len(self.runs)
        return _Merge(self.inner.view(), self.runs[:taken], writer, slices, drop_nothing=is_last)

    def _finish(self, merge: "_Merge") -> None:
        if merge.state is None:
            merge.state = merge.writer.finish()
        if merge.run is None:
            merge.run = self._open(merge.state)
        if merge.run not in self.runs:
            # Before the commit: a reader that sees the table empty must see the run. The other way
            # round, both give the same answer.
            self._outdated, outdated = merge.runs, self._outdated
            for run in outdated:
                run.close()
            newer = self.runs[: merge.newer]
            self.runs = (*newer, merge.run, *self.runs[merge.newer + len(merge.runs) :])
        states = [run.state for run in self.runs]
        runs = {Table.META: [(RUNS_KEY, pack_runs(states))]}
        self.inner.refill(Table.KEYS, merge.since, runs)
        self._merge = None
        for run in merge.runs:
            self._delete(run.path)


class _Merge:
    """A merge that is under way."""

    def __init__(
        self,
        view: View,
        runs: tuple[KeyRun, ...],
        writer: RunWriter,
        slices: int,
        *,
        drop_nothing: bool,
    ) -> None:
        """`runs`: newest first; `drop_nothing`: there are no older ones."""
        self.runs = runs
        self.writer = writer
        self.state: RunState | None = None
        self.run: KeyRun | None = None
        """The run that the merge made."""
        self.since: list[Columns] = []
        """The pairs that were committed to the table since the merge began."""
        self.newer = 0
        """Runs that were committed since."""
        self._view = view
        self._slices = slices
        self._slice = 0
        self._drop_nothing = drop_nothing
        view.between(Table.KEYS, b"", b"")  # the moment that it sees

    def step(self) -> bool:
        """Merge the next slice; True: it was the last one. Raises ShortageError: call it again."""
        if self._slice < self._slices:
            first, until = ((self._slice + more) * _HEADS // self._slices for more in (0, 1))
            end = until.to_bytes(8, "big") if until < _HEADS else None
            young = self._view.between(Table.KEYS, first.to_bytes(8, "big"), end)
            parts = [run.between(first, until) for run in reversed(self.runs)]
            parts += _as_columns(young)
            if parts:
                self.writer.append(merged(parts, drop_nothing=self._drop_nothing))
            self._slice += 1
            if self._slice == self._slices:
                self._view.refresh()
        return self._slice == self._slices


class TieredView:
    """A look at the catalog. See `storage.catalog.View`: in KEYS it finds the newest values."""

    def __init__(self, catalog: TieredCatalog, inner: View) -> None:
        self._catalog = catalog
        self._inner = inner
        self.prefixes = inner.prefixes
        self.scan = inner.scan
        self.between = inner.between
        self.refresh = inner.refresh

    def get(self, table: Table, key: bytes) -> bytes | None:
        value = self._inner.get(table, key)
        return value if table is not Table.KEYS else self._catalog.older(key, value)

    def get_many(self, table: Table, keys: Sequence[bytes]) -> dict[bytes, bytes]:
        found = self._inner.get_many(table, keys)
        return found if table is not Table.KEYS else self._catalog.older_many(keys, found)


def _as_columns(pairs: Sequence[tuple[bytes, bytes | None]]) -> list[Columns]:
    if not pairs:
        return []
    keys, values = (b"".join(column) for column in zip(*pairs, strict=True))
    return [Columns(np.frombuffer(keys, "V16"), np.frombuffer(values, "V24"))]


def _rows(run: KeyRun, start: bytes, prefix: bytes) -> Iterator[tuple[bytes, bytes]]:
    """All pairs of a run, in the order of their keys."""
    slices = -(-run.state.rows // KEY_TIERS.slice_rows)
    for number in range(slices):
        first, until = ((number + more) * _HEADS // slices for more in (0, 1))
        columns = run.between(first, until)
        pairs = zip(columns.keys.tolist(), columns.values.tolist(), strict=True)
        for key, value in sorted(pairs):
            if key >= start and key.startswith(prefix):
                yield key, value
