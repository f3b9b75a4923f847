"""The walk over LMDB's pages: what LMDB writes is sound, and what is not is named."""

import random
from collections.abc import Iterator
from pathlib import Path

import lmdb
import lmdb.verify
import pytest

from storage.catalog_pages import Walk, read_meta, verify
from storage.files import OsFiles
from storage.frame import Damage

TABLES = ("first", "second", "third")
PAGE = 4096
MAP_BYTES = 1 << 26


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path


@pytest.fixture
def environment(root: Path) -> Iterator[lmdb.Environment]:
    with lmdb.open(str(root), map_size=MAP_BYTES, max_dbs=len(TABLES), sync=False) as opened:
        yield opened


def found(root: Path, *, leaves: bool = True) -> list[str]:
    file = OsFiles(str(root)).open("data.mdb")
    try:
        return [one.reason for one in verify(file, file.size(), TABLES, leaves=leaves)]
    finally:
        file.close()


def fill(environment: lmdb.Environment, *, turns: int = 1, keys: int = 500, seed: int = 0) -> None:
    """Several levels, long values, deleted keys: all kinds of pages."""
    rng = random.Random(seed)
    tables = {name: environment.open_db(name.encode()) for name in TABLES}
    for _ in range(turns):
        with environment.begin(write=True) as transaction:
            for _ in range(keys):
                transaction.put(rng.randbytes(16), rng.randbytes(28), db=tables["first"])
            for _ in range(5):
                long = rng.randbytes(rng.randrange(9000))
                transaction.put(rng.randbytes(3), long, db=tables["second"])
            with transaction.cursor(db=tables["first"]) as cursor:
                cursor.first()
                for _ in range(keys // 4):
                    cursor.delete()


def damage(root: Path, at: int, data: bytes) -> None:
    with (root / "data.mdb").open("r+b") as file:
        file.seek(at)
        file.write(data)


def test_what_lmdb_writes_is_sound(environment: lmdb.Environment, root: Path) -> None:
    for seed in range(12):
        fill(environment, turns=3, seed=seed)
        assert found(root) == []
        assert found(root, leaves=False) == []
        assert lmdb.verify.verify(str(root)) == [], "a second opinion"


def test_a_new_file_and_an_empty_one_are_sound(
    environment: lmdb.Environment, root: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    assert found(root) == []
    empty = tmp_path_factory.mktemp("empty")
    (empty / "data.mdb").write_bytes(b"")
    assert found(empty) == []


def test_all_entries_are_found_in_order(environment: lmdb.Environment, root: Path) -> None:
    fill(environment, turns=4)
    file = OsFiles(str(root)).open("data.mdb")
    meta = read_meta(file, file.size())
    assert not isinstance(meta, Damage)
    entries = [(one.table, one.key, one.value) for one in Walk(file, meta, TABLES).run()]
    expected = []
    with environment.begin() as transaction:
        for name in TABLES:
            cursor = transaction.cursor(db=environment.open_db(name.encode(), transaction))
            expected += [(name, key, value) for key, value in cursor]
    assert entries == expected
    file.close()


def test_a_table_that_nobody_gave(environment: lmdb.Environment, root: Path) -> None:
    fill(environment)
    file = OsFiles(str(root)).open("data.mdb")
    assert [one.reason for one in verify(file, file.size(), TABLES[1:])] == [
        "there is no table 'first'"
    ]
    file.close()


def used_pages(root: Path, flags: int) -> list[int]:
    """Numbers of pages of a kind that the newest state leads to."""
    data = (root / "data.mdb").read_bytes()
    file = OsFiles(str(root)).open("data.mdb")
    meta = read_meta(file, file.size())
    assert not isinstance(meta, Damage)
    walk = Walk(file, meta, TABLES)
    leaves = {entry.page for entry in walk.run()}
    file.close()
    if flags == 2:
        return sorted(leaves)
    return [at // PAGE for at in range(2 * PAGE, len(data), PAGE) if data[at + 10] == flags]


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("zeros", "it is another page"),
        ("another leaf", "it is another page"),
        ("another kind", "it is a page of another kind"),
        ("fewer nodes", "the page has other bounds"),
        ("a node elsewhere", "a node lies outside of the page"),
        ("a longer key", "nodes "),
        ("keys exchanged", "keys do not ascend"),
    ],
)
def test_a_damaged_leaf(environment: lmdb.Environment, root: Path, what: str, reason: str) -> None:
    fill(environment, turns=2)
    first, second, *_ = used_pages(root, 2)
    data = (root / "data.mdb").read_bytes()
    page = bytearray(data[first * PAGE : (first + 1) * PAGE])
    match what:
        case "zeros":
            page[:] = bytes(PAGE)
        case "another leaf":
            page[:] = data[second * PAGE : (second + 1) * PAGE]
        case "another kind":
            page[10] = 1
        case "fewer nodes":
            page[12] ^= 1
        case "a node elsewhere":
            page[16:18] = b"\xff\xff"
        case "a longer key":
            at = int.from_bytes(page[16:18], "little")
            page[at + 6] ^= 1
        case "keys exchanged":
            page[16:18], page[18:20] = page[18:20], page[16:18]
    damage(root, first * PAGE, bytes(page))
    assert reason in " ".join(found(root))


def test_a_branch_that_leads_elsewhere(environment: lmdb.Environment, root: Path) -> None:
    fill(environment, turns=3)
    data = (root / "data.mdb").read_bytes()
    file = OsFiles(str(root)).open("data.mdb")
    named = 0
    for number in used_pages(root, 1):
        at = number * PAGE + int.from_bytes(data[number * PAGE + 16 : number * PAGE + 18], "little")
        child = data[at : at + 2]
        for wrong in (b"\x00\x00", child[:1] + b"\x7f", data[at + 40 : at + 42]):
            damage(root, at, wrong)
            named += bool(found(root, leaves=False))
        damage(root, at, child)
    file.close()
    assert named >= 3  # old copies of branches are in no tree
    assert found(root) == []


@pytest.mark.parametrize("length", [100, PAGE, 2 * PAGE, 5 * PAGE + 7])
def test_a_file_that_is_cut_off(environment: lmdb.Environment, root: Path, length: int) -> None:
    fill(environment)
    data = (root / "data.mdb").read_bytes()
    environment.close()
    (root / "data.mdb").write_bytes(data[:length])
    assert found(root)


def test_a_second_opinion(environment: lmdb.Environment, root: Path) -> None:
    """Whatever LMDB's own verifier names is named here, too, and what it does not know of besides:
    docs/decisions/0027-our-own-walk-over-the-catalog.md."""
    fill(environment, turns=3, keys=60)
    environment.close()
    data = bytearray((root / "data.mdb").read_bytes())
    rng, theirs, ours = random.Random(0), 0, 0
    for _ in range(400):
        page = rng.randrange(len(data) // PAGE) * PAGE
        at = page + rng.choice((rng.randrange(48), rng.randrange(PAGE)))
        bit = 1 << rng.randrange(8)
        data[at] ^= bit
        (root / "data.mdb").write_bytes(data)
        data[at] ^= bit
        try:
            is_named = bool(lmdb.verify.verify(str(root)))
        except lmdb.verify.VerifyError:
            is_named = True
        assert found(root) or not is_named, f"byte {at}"
        theirs, ours = theirs + is_named, ours + bool(found(root))
    assert 0 < theirs <= ours
