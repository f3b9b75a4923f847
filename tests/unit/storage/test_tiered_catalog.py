"""Keys in tiers: whatever is committed is found, merged or not, and after any crash."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest

from storage.catalog import Catalog, LmdbCatalog, Table
from storage.catalog_columns import Columns
from storage.errors import DamageError, DiskFullError
from storage.files import Files, OsFiles
from storage.key_runs import DIRECTORY, NOTHING, numbers_in, run_path
from storage.tiered_catalog import KeyTiers, TieredCatalog
from tests.world.storage.catalog import MemoryCatalog
from tests.world.storage.faults import Fault, FaultKind, Faults, FaultyFiles, Moment, SimulatedCrash
from tests.world.storage.files import SimulatedFiles

STAMP = 77
TIERS = KeyTiers(young_max=8, slice_rows=5, run_min=10, runs_max=1)


def key(number: int) -> bytes:
    return random.Random(number).randbytes(16)


def value(number: int) -> bytes:
    return random.Random(-1 - number).randbytes(24)


@pytest.fixture(params=["memory", "lmdb"])
def parts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator:
    if request.param == "memory":
        yield MemoryCatalog(), SimulatedFiles()
        return
    path = tmp_path_factory.mktemp("tiered")
    inner = LmdbCatalog(str(path / "catalog"), max_bytes=1 << 26)
    yield inner, OsFiles(str(path))
    inner.close()


def tiered(inner: Catalog, files: Files, **options: bool) -> TieredCatalog:
    return TieredCatalog(inner, files, stamp=STAMP, tiers=TIERS, **options)


def as_columns(pairs: dict[bytes, bytes]) -> Columns:
    keys, values = b"".join(pairs), b"".join(pairs.values())
    return Columns(np.frombuffer(keys, "V16"), np.frombuffer(values, "V24"))


def tidy(catalog: TieredCatalog) -> int:
    steps = 0
    while catalog.tidy():
        steps += 1
    return steps


def known(catalog: TieredCatalog, model: dict[bytes, bytes], absent: list[bytes]) -> None:
    """All ways to look something up agree with the model."""
    asked = [*model, *absent]
    view = catalog.view()
    for look_up in (catalog, view):
        assert {one: found for one in asked if (found := look_up.get(Table.KEYS, one))} == model
        assert look_up.get_many(Table.KEYS, asked) == model
        assert look_up.get_many(Table.KEYS, asked[:3]) == {
            one: model[one] for one in asked[:3] if one in model
        }
    assert list(catalog.scan(Table.KEYS)) == sorted(model.items())


def test_keys_are_found_whichever_tier_they_are_in(parts) -> None:
    catalog, model = tiered(*parts), dict[bytes, bytes]()
    sizes = []
    for number in range(200):
        pairs = [(key(number), value(number))]
        if number % 5 == 4:
            pairs.append((key(number - 3), value(1000 + number)))
        if number % 7 == 6:
            catalog.commit({Table.KEYS: [(key(number - 6), None)]})
            model.pop(key(number - 6), None)
        columns = Columns(
            np.frombuffer(b"".join(one for one, _ in pairs), "V16"),
            np.frombuffer(b"".join(one for _, one in pairs), "V24"),
        )
        catalog.commit({Table.META: [(b"m", b"%d" % number)]}, {Table.KEYS: [columns]})
        model |= dict(pairs)
        tidy(catalog)
        sizes.append(tuple(run.state.rows for run in catalog.runs))
        if number % 20 == 0:
            known(catalog, model, [key(-number), key(number - 6)])
    assert max(map(len, sizes)) >= 2
    assert all(older > newer for one in sizes for newer, older in pairwise(one))
    assert catalog.verify() == []
    again = tiered(*parts)
    known(again, model, [key(-1)])
    assert again.get(Table.META, b"m") == b"199"
    assert numbers_in(parts[1]) == sorted(run.state.number for run in again.runs)


def test_what_is_committed_while_keys_are_merged_is_newer(parts) -> None:
    catalog = tiered(*parts)
    first = {key(number): value(number) for number in range(30)}
    catalog.commit({Table.KEYS: list(first.items())})
    tidy(catalog)
    assert [run.state.rows for run in catalog.runs] == [30]
    more = {key(number): value(number) for number in range(30, 60)}
    catalog.commit({Table.KEYS: list(more.items())})
    model = first | more
    steps = 0
    while catalog.tidy():
        # One that was merged, one that is about to be, one that is new, and one that is removed.
        changed = {key(number): value(500 + number + steps) for number in (steps, 59 - steps)}
        changed[key(100 + steps)] = value(100 + steps)
        gone = key(15 + steps)
        catalog.commit({Table.KEYS: [*changed.items(), (gone, None)]})
        model |= changed
        del model[gone]
        steps += 1
        known(catalog, model, [gone])
        if catalog.runs[0].state.rows > 30:
            break
    assert steps > 5
    known(catalog, model, [])
    known(tiered(*parts), model, [])
    tidy(catalog)
    known(catalog, model, [])
    recent = dict(catalog.scan_recent(Table.KEYS))
    assert NOTHING not in recent.values()


def test_a_key_that_is_removed_while_the_first_run_is_made_stays_removed(parts) -> None:
    catalog = tiered(*parts)
    gone = [key(number) for number in range(9)]
    catalog.commit({Table.KEYS: [(one, value(1)) for one in gone]})
    assert catalog.tidy() and not catalog.runs, "a merge is under way, and there is no run yet"
    catalog.commit({Table.KEYS: [(one, None) for one in gone]})
    known(catalog, {}, gone)
    # After a crash there is neither a run nor a merge, and what was noted stands in the table.
    again = tiered(*parts)
    known(again, {}, gone)
    tidy(again)
    known(again, {}, gone)


def test_what_was_removed_takes_no_place_in_the_oldest_run(parts) -> None:
    catalog = tiered(*parts)
    catalog.commit({Table.KEYS: [(key(number), value(number)) for number in range(20)]})
    tidy(catalog)
    catalog.commit({Table.KEYS: [(key(number), None) for number in range(19)]})
    known(catalog, {key(19): value(19)}, [key(number) for number in range(19)])
    tidy(catalog)
    # Longer than what was merged, the old run stays: which keys are gone has to be known besides.
    assert [run.state.rows for run in catalog.runs] == [19, 20]
    known(catalog, {key(19): value(19)}, [key(number) for number in range(19)])
    catalog.commit({Table.KEYS: [(key(number), None) for number in range(19)]})
    tidy(catalog)
    assert [run.state.rows for run in catalog.runs] == [1]
    assert catalog.size(Table.KEYS) == 1
    known(catalog, {key(19): value(19)}, [key(number) for number in range(19)])


def test_a_view_that_was_there_before_still_finds_all(parts) -> None:
    catalog = tiered(*parts)
    model = {key(number): value(number) for number in range(20)}
    catalog.commit({Table.KEYS: list(model.items())})
    view = catalog.view()
    assert view.get_many(Table.KEYS, [*model]) == model
    tidy(catalog)
    assert view.get_many(Table.KEYS, [*model]) == model
    view.refresh()
    assert view.get_many(Table.KEYS, [*model]) == model


def test_very_many_keys_are_a_run_of_their_own(parts) -> None:
    catalog = tiered(*parts)
    old = {key(number): value(-number) for number in range(5)}
    catalog.commit({Table.KEYS: list(old.items())})
    new = {key(number): value(number) for number in range(3, 20)}
    catalog.commit({Table.META: [(b"m", b"1")]}, {Table.KEYS: [as_columns(new)]})
    assert [run.state.rows for run in catalog.runs] == [17]
    # What the table had it has anew, lest the old value stand before the new one.
    assert catalog.inner.size(Table.KEYS) == 5
    known(catalog, old | new, [key(-1)])
    again = tiered(*parts)
    known(again, old | new, [key(-1)])
    assert again.get(Table.META, b"m") == b"1"
    # Removed before it is there once more, in one commit.
    last = {key(number): value(100 + number) for number in range(10, 30)}
    gone = [(key(number), None) for number in (4, 12, 25)]
    again.commit({Table.KEYS: gone}, {Table.KEYS: [as_columns(new), as_columns(last)]})
    known(again, old | new | last, [key(-1)])
    assert [run.state.rows for run in again.runs] == [27, 17]
    # What waits goes first, until there are eight times as many.
    assert not again.tidy(if_pressing=True)
    tidy(again)
    assert len(again.runs) == 1
    known(again, old | new | last, [key(-1)])
    assert numbers_in(parts[1]) == [again.runs[0].state.number]


def test_a_merge_that_cannot_wait_any_longer() -> None:
    catalog, model = tiered(MemoryCatalog(), SimulatedFiles()), dict[bytes, bytes]()
    while not catalog.tidy(if_pressing=True):
        pairs = {key(len(model) + number): value(number) for number in range(10)}
        catalog.commit({}, {Table.KEYS: [as_columns(pairs)]})
        model |= pairs
    assert len(model) == 90
    while catalog.tidy(if_pressing=True):
        pass
    assert [run.state.rows for run in catalog.runs] == [90]
    known(catalog, model, [key(-1)])


@pytest.mark.parametrize("seed", range(20))
def test_whatever_is_committed_while_runs_are_merged_is_found(seed: int) -> None:
    rng, memory, disk = random.Random(seed), MemoryCatalog(), SimulatedFiles()
    catalog, model = tiered(memory, disk), dict[bytes, bytes]()
    at_once = 0
    for _ in range(60):
        numbers = rng.sample(range(120), rng.choice((1, 2, 5, 12, 30)))
        pairs = {key(number): rng.randbytes(24) for number in numbers}
        gone = [key(rng.randrange(120)) for _ in range(rng.choice((0, 0, 1, 4)))]
        runs = catalog.runs
        writes = {Table.KEYS: [(one, None) for one in gone]}
        catalog.commit(writes, {Table.KEYS: [as_columns(pairs)]})
        at_once += catalog.runs != runs and catalog._merge is not None
        for one in gone:
            model.pop(one, None)
        model |= pairs
        for _ in range(rng.randrange(6)):
            catalog.tidy(if_pressing=rng.random() < 0.3)
        known(catalog, model, [key(-1), *gone])
    assert at_once
    assert catalog.verify() == []
    known(tiered(memory, disk, readonly=True), model, [key(-1)])
    tidy(catalog)
    known(catalog, model, [key(-1)])
    assert all(older > newer for newer, older in pairwise(run.state.rows for run in catalog.runs))
    assert numbers_in(disk) == sorted(run.state.number for run in catalog.runs)


@pytest.mark.parametrize("kind", [FaultKind.CRASH, FaultKind.NO_SPACE])
@pytest.mark.parametrize("moment", list(Moment))
@pytest.mark.parametrize("tries_again", [True, False])
def test_a_run_is_there_with_its_commit_or_not_at_all(
    kind: FaultKind, moment: Moment, tries_again: bool
) -> None:
    """`tries_again`: else the process ends behind a commit that failed."""
    at = 0
    while True:
        at += 1
        disk, memory = SimulatedFiles(rng=random.Random(at)), MemoryCatalog()
        old = {key(number): value(-number) for number in range(30)}
        new = {key(number): value(number) for number in range(20, 50)}
        catalog = tiered(memory, FaultyFiles(disk, Faults()))
        catalog.commit({}, {Table.KEYS: [as_columns(old)]})
        catalog.commit({Table.KEYS: [(key(25), value(25))]})
        old[key(25)] = value(25)
        faults = Faults(Fault(at=at, kind=kind, moment=moment))
        catalog._files = FaultyFiles(disk, faults)
        memory.faults = faults
        writes = {Table.META: [(b"checkpoint", b"new")]}
        try:
            try:
                catalog.commit(writes, {Table.KEYS: [as_columns(new)]})
            except DiskFullError:
                known(catalog, old, [key(-1)])
                if tries_again:
                    catalog.commit(writes, {Table.KEYS: [as_columns(new)]})
        except SimulatedCrash:
            disk, memory = disk.crash(), memory.crash()
        else:
            memory.faults = None
            faults.faults.clear()
            if tries_again or not faults.struck:
                known(catalog, old | new, [key(-1)])
            disk, memory = disk.kill(), memory.kill()
        again = tiered(memory, disk)
        is_there = again.get(Table.META, b"checkpoint") is not None
        known(again, old | new if is_there else old, [key(-1)])
        assert is_there or kind is FaultKind.CRASH or not tries_again
        assert numbers_in(disk) == sorted(run.state.number for run in again.runs)
        if at > faults.call_count:
            break
    assert at > 6


@pytest.mark.parametrize("kind", [FaultKind.CRASH, FaultKind.NO_SPACE])
@pytest.mark.parametrize("moment", list(Moment))
def test_nothing_is_lost_wherever_a_merge_ends(kind: FaultKind, moment: Moment) -> None:
    at = 0
    while True:
        at += 1
        disk, memory = SimulatedFiles(rng=random.Random(at)), MemoryCatalog()
        model = {key(number): value(number) for number in range(30)}
        faults = Faults(Fault(at=at, kind=kind, moment=moment))
        catalog = tiered(memory, FaultyFiles(disk, Faults()))
        catalog.commit({Table.KEYS: list(model.items())})
        tidy(catalog)
        more = {key(number): value(-number) for number in range(20, 50)}
        catalog.commit({Table.KEYS: list(more.items())})
        model |= more
        catalog._files = FaultyFiles(disk, faults)
        memory.faults = faults
        try:
            for _ in range(1000):
                try:
                    if not catalog.tidy():
                        break
                except DiskFullError:
                    known(catalog, model, [key(-1)])
        except SimulatedCrash:
            disk, memory = disk.crash(), memory.crash()
        else:
            memory.faults = None
            faults.faults.clear()
            known(catalog, model, [key(-1)])
            disk, memory = disk.kill(), memory.kill()
        known(tiered(memory, disk), model, [key(-1)])
        assert not [name for name in disk.list(DIRECTORY) if ".run" not in name]
        if not faults.struck:
            break
    assert at > (10 if kind is FaultKind.CRASH else 4)


@pytest.mark.parametrize("place", ["head", "block", "index", "gone", "cut"])
def test_damage_is_named_and_nothing_is_taken_for_absent(place: str) -> None:
    disk, memory = SimulatedFiles(), MemoryCatalog()
    catalog = tiered(memory, disk)
    model = {key(number): value(number) for number in range(300)}
    catalog.commit({Table.KEYS: list(model.items())})
    tidy(catalog)
    (run,) = catalog.runs
    file = disk.open(run.path)
    size = file.size()
    offset = {"head": 9, "block": 4096 + 50, "index": size - 9, "gone": 0, "cut": 0}[place]
    if place == "gone":
        disk.unlink(run.path)
    elif place == "cut":
        file.truncate(size - 8)
    else:
        (byte,) = file.pread(1, offset)
        file.pwrite([bytes([byte ^ 4])], offset)
    if place != "block":
        with pytest.raises(DamageError, match="keys/"):
            tiered(memory, disk)
        return
    again = tiered(memory, disk)
    (damage,) = again.verify()
    assert (damage.path, damage.offset) == (run_path(1), 4096)
    # The next block begins with the 103rd: one with the same beginning might stand before it.
    heads = sorted(model)[:103]
    for one, expected in model.items():
        if one in heads:
            with pytest.raises(DamageError):
                again.get(Table.KEYS, one)
        else:
            assert again.get(Table.KEYS, one) == expected


def test_a_reader_writes_nothing(tmp_path) -> None:
    files, memory = OsFiles(str(tmp_path)), MemoryCatalog()
    catalog = tiered(memory, files)
    catalog.commit({Table.KEYS: [(key(number), value(number)) for number in range(10)]})
    tidy(catalog)
    (tmp_path / run_path(9)).write_bytes(b"of a merge that is under way")
    reader = TieredCatalog(
        memory, OsFiles(str(tmp_path), readonly=True), stamp=STAMP, readonly=True
    )
    assert reader.get(Table.KEYS, key(3)) == value(3)
    assert numbers_in(files) == [1, 9]
    tiered(memory, files)
    assert numbers_in(files) == [1]


def test_keys_with_the_same_beginning_are_told_apart() -> None:
    catalog = tiered(MemoryCatalog(), SimulatedFiles())
    rng = random.Random(3)
    # More than a block of them, so that one block ends within them.
    model = {b"sameHead" + rng.randbytes(8): rng.randbytes(24) for _ in range(250)}
    model |= {key(number): value(number) for number in range(20)}
    absent = [b"sameHead" + rng.randbytes(8) for _ in range(50)]
    catalog.commit({Table.KEYS: list(model.items())})
    tidy(catalog)
    known(catalog, model, absent)
    changed = {one: rng.randbytes(24) for one in list(model)[:200:3]}
    catalog.commit({Table.KEYS: list(changed.items())})
    tidy(catalog)
    known(catalog, model | changed, absent)
