"""Reads the file of an LMDB environment without LMDB: is every page the page it claims to be?

LMDB maps its file and believes it: pages carry no checksum, and a flipped bit makes it return the
wrong value, miss a key, or follow a number out of the map and die. So the file is walked here
first, with plain reads and nothing believed (I8):

    meta pages      two, of one transaction and the one before; the newer counts
    trees           every page has its own number and a known kind, its nodes fill it without gaps,
                    keys ascend and lie between the separators above, each page is used once
    tables          as many pages, levels and entries as their record says; only names that we gave
    free pages      none of them is in use

After a walk without damage LMDB can be trusted with the file, and nothing is missing from it. The
checksum of each value tells whether it is the value that was put there (`storage.catalog`). Bytes
that no page uses may be anything.

The layout is that of LMDB 0.9 (data version 1), which every 0.9 release reads:

    page    number u64, pad u16, flags u16, lower u16, upper u16 │ offsets u16 … │ free │ nodes
    node    low u16, high u16, flags u16, key length u16 │ key │ value

Cost: 50 µs per page, and 1 µs per entry for its checksum; no page is read twice. Memory: a byte per
page. Threads: none. The file must not change meanwhile, or a read transaction of LMDB must hold its
snapshot.
"""

import itertools
import struct
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from storage.errors import UnreadableError
from storage.frame import Damage, Readable

META_PAGES = 2
_MAGIC = 0xBEEFC0DE
_DATA_VERSION = 1
_NO_PAGE = (1 << 64) - 1
_LEVELS_MAX = 32

_BRANCH, _LEAF, _OVERFLOW, _META = 1, 2, 4, 8
_BIG, _TABLE = 1, 2
_INTEGER_KEY = 8

_PAGE = struct.Struct("<QHHHH")
_META_HEAD = struct.Struct("<IIQQ")
_TREE = struct.Struct("<IHHQQQQQ")
_META_TAIL = struct.Struct("<QQ")
_NODE = struct.Struct("<HHHH")
_NUMBER = struct.Struct("<Q")
_META_BYTES = _PAGE.size + _META_HEAD.size + 2 * _TREE.size + _META_TAIL.size
_PAGE_BYTES_MAX = 1 << 16
_PAGE_BYTES_MIN = 256


class Tree(NamedTuple):
    """The record of one tree."""

    pad: int
    flags: int
    levels: int
    branch_pages: int
    leaf_pages: int
    overflow_pages: int
    entries: int
    root: int


@dataclass(frozen=True, slots=True)
class Meta:
    """A meta page."""

    page_bytes: int
    transaction: int
    last_page: int
    free: Tree
    main: Tree


class Entry(NamedTuple):
    """A key and its value, as they stand in a table."""

    table: str
    key: bytes
    value: bytes
    page: int


class _Broken(Exception):
    """A page is not as it should be."""


def _read(file: Readable, length: int, offset: int) -> bytes:
    try:
        return file.pread(length, offset)
    except UnreadableError as error:
        raise _Broken(error.reason) from error


def read_meta(file: Readable, size: int, *, transaction: int | None = None) -> Meta | Damage:
    """The meta page of the newest transaction, or of `transaction`."""
    found: list[Meta] = []
    page_bytes = 0
    for number in range(META_PAGES):
        try:
            found.append(_parse_meta(file, size, number, page_bytes))
        except _Broken as error:
            start = number * page_bytes
            return Damage(file.path, start, start + _META_BYTES, f"{error}", torn=False)
        page_bytes = found[0].page_bytes
    first, second = (meta.transaction for meta in found)
    if abs(first - second) != 1 and (first or second):
        reason = f"the meta pages are of transactions {first} and {second}"
        return Damage(file.path, 0, _META_BYTES, reason, torn=False)
    newest = max(found, key=lambda meta: meta.transaction)
    if transaction is None:
        return newest
    for meta in found:
        if meta.transaction == transaction:
            return meta
    reason = f"no meta page is of transaction {transaction}, but of {first} and {second}"
    return Damage(file.path, 0, _META_BYTES, reason, torn=False)


def _parse_meta(file: Readable, size: int, number: int, page_bytes: int) -> Meta:
    """The meta page of that number; `page_bytes`: as far as they are known."""
    page = _read(file, _META_BYTES, number * page_bytes)
    if len(page) < _META_BYTES:
        raise _Broken("a meta page is cut off")
    own_number, _, flags, _, _ = _PAGE.unpack_from(page)
    magic, version, address, _ = _META_HEAD.unpack_from(page, _PAGE.size)
    at = _PAGE.size + _META_HEAD.size
    free, main = Tree(*_TREE.unpack_from(page, at)), Tree(*_TREE.unpack_from(page, at + _TREE.size))
    last_page, transaction = _META_TAIL.unpack_from(page, at + 2 * _TREE.size)
    found = free.pad
    if (own_number, flags, magic, version, address) != (number, _META, _MAGIC, _DATA_VERSION, 0):
        raise _Broken("it is not a meta page")
    if found & (found - 1) or not _PAGE_BYTES_MIN <= found <= _PAGE_BYTES_MAX:
        raise _Broken(f"a page cannot have {found} bytes")
    if page_bytes and found != page_bytes:
        raise _Broken(f"one meta page says {page_bytes} bytes to a page, the other {found}")
    if (last_page + 1) * found > size:
        raise _Broken(f"the file has {size} bytes, and its last page should be {last_page}")
    if transaction and transaction % META_PAGES != number:
        raise _Broken(f"transaction {transaction} does not belong here")
    if free.flags != _INTEGER_KEY or main.flags or main.pad:
        raise _Broken("flags that are not known")
    return Meta(found, transaction, last_page, free, main)


class Walk:
    """One pass over all trees of a snapshot. It notes the damage, and reads the rest."""

    def __init__(self, file: Readable, meta: Meta, tables: Collection[str]) -> None:
        self._file = file
        self._meta = meta
        self._tables = tables
        self._used = bytearray(meta.last_page + 1)
        self.damage: list[Damage] = []

    def run(self, *, leaves: bool = True) -> Iterator[Entry]:
        """All entries of all tables, and `damage` when it is exhausted.

        Without `leaves` none are yielded: of a tree with several levels only the branches are read,
        which are about one page in fifty."""
        for number in range(META_PAGES):
            self._used[number] = 1
        roots: dict[str, Tree] = {}
        for key, value, flags, number in self._tree(self._meta.main, "the list of tables"):
            name = key.decode("ascii", "replace")
            if name not in self._tables or flags != _TABLE or len(value) != _TREE.size:
                self._note(number, f"there is no table {name!r}")
            else:
                roots[name] = Tree(*_TREE.unpack(value))
        for name, tree in roots.items():
            if tree.flags or tree.pad:
                self._note(0, f"table {name}: flags that are not known")
            for key, value, flags, number in self._tree(tree, f"table {name}", leaves=leaves):
                if flags:
                    self._note(number, f"table {name}: an entry with flags")
                elif leaves:
                    yield Entry(name, key, value, number)
        self._free_pages()

    def _note(self, number: int, reason: str) -> None:
        start = number * self._meta.page_bytes
        end = start + self._meta.page_bytes
        self.damage.append(Damage(self._file.path, start, end, reason, torn=False))

    def _page(self, number: int) -> bytes:
        """A page that the walk has not seen yet, with its own number."""
        self._use(number)
        page = _read(self._file, self._meta.page_bytes, number * self._meta.page_bytes)
        if len(page) < self._meta.page_bytes or _NUMBER.unpack_from(page)[0] != number:
            raise _Broken("it is another page")
        return page

    def _use(self, number: int) -> None:
        if not META_PAGES <= number <= self._meta.last_page:
            raise _Broken(f"there is no page {number}")
        if self._used[number]:
            raise _Broken(f"page {number} is used twice")
        self._used[number] = 1

    # ── one tree ───────────────────────────────────────────────────────────────────────────────

    def _tree(
        self, tree: Tree, name: str, *, leaves: bool = True
    ) -> Iterator[tuple[bytes, bytes, int, int]]:
        """Key, value, flags and page of every entry, in order."""
        if tree.root == _NO_PAGE:
            if any(tree[2:7]):
                self._note(0, f"{name}: an empty tree with pages")
            return
        pages = {_BRANCH: 0, _LEAF: 0, _OVERFLOW: 0}
        entries = 0
        order = _as_number if tree.flags & _INTEGER_KEY else _as_bytes
        before = len(self.damage)
        # Page, level from the top, and the keys that it lies between.
        todo: list[tuple[int, int, bytes | None, bytes | None]] = [(tree.root, 1, None, None)]
        while todo:
            number, level, low, high = todo.pop()
            is_leaf = level == tree.levels
            pages[_LEAF if is_leaf else _BRANCH] += 1
            try:
                if is_leaf and level > 1 and not leaves:
                    self._use(number)
                    continue
                if level > min(tree.levels, _LEVELS_MAX):
                    raise _Broken("the tree has more levels than its record says")
                page = self._page(number)
                nodes = _nodes(page, _LEAF if is_leaf else _BRANCH)
                keys = [order(key) for key, *_ in nodes]
                if not is_leaf:
                    keys = keys[1:]  # The first separator is empty: less than all.
                _must_ascend(keys, low and order(low), high and order(high))
                if not is_leaf:
                    ends = [*(key for key, *_ in nodes[1:]), high]
                    starts = [low, *ends[:-1]]
                    todo += [
                        (child, level + 1, start, end)
                        for (_, child, _), start, end in zip(
                            reversed(nodes), reversed(starts), reversed(ends), strict=True
                        )
                    ]
                    continue
            except _Broken as error:
                self._note(number, f"{name}: {error}")
                continue
            entries += len(nodes)
            for key, at, flags in nodes:
                try:
                    value, overflow = self._value(page, at, flags, len(key))
                except _Broken as error:
                    self._note(number, f"{name}: {error}")
                    continue
                pages[_OVERFLOW] += overflow
                yield key, value, flags & ~_BIG, number
        found = (pages[_BRANCH], pages[_LEAF], pages[_OVERFLOW], entries)
        is_whole = leaves or tree.levels == 1
        said = tree[3:7]
        if len(self.damage) == before and (found != said if is_whole else found[:2] != said[:2]):
            self._note(0, f"{name}: {found} pages and entries, its record says {said}")

    def _value(self, page: bytes, at: int, flags: int, key_bytes: int) -> tuple[bytes, int]:
        """The value of the node at `at`, and how many overflow pages it has."""
        low, high, *_ = _NODE.unpack_from(page, at)
        start, length = at + _NODE.size + key_bytes, low | high << 16
        if not flags & _BIG:
            return page[start : start + length], 0
        page_bytes = self._meta.page_bytes
        number = _NUMBER.unpack_from(page, start)[0]
        head = self._page(number)
        page_flags, pages = struct.unpack_from("<HI", head, 10)
        if page_flags != _OVERFLOW or pages != -(-(_PAGE.size + length) // page_bytes):
            raise _Broken(f"page {number} is not the value that belongs here")
        for behind in range(number + 1, number + pages):
            self._use(behind)
        return _read(self._file, length, number * page_bytes + _PAGE.size), pages

    def _free_pages(self) -> None:
        """The pages that LMDB will write next must not be in use."""
        for _, value, _, number in self._tree(self._meta.free, "the list of free pages"):
            count = len(value) // _NUMBER.size
            numbers = struct.unpack(f"<{count}Q", value[: count * _NUMBER.size])
            if len(value) % _NUMBER.size or not count or numbers[0] > count - 1:
                self._note(number, "the list of free pages: it has another length")
                continue
            try:
                for free in numbers[1 : numbers[0] + 1]:
                    self._use(free)
            except _Broken as error:
                self._note(number, f"the list of free pages: {error}")


def _as_bytes(key: bytes) -> bytes:
    return key


def _as_number(key: bytes) -> bytes:
    return key[::-1]  # little-endian numbers: in the order of the bytes from the last to the first


def _must_ascend(keys: list[bytes], low: bytes | None, high: bytes | None) -> None:
    if any(first >= second for first, second in itertools.pairwise(keys)):
        raise _Broken("keys do not ascend")
    if keys and ((low is not None and keys[0] < low) or (high is not None and keys[-1] >= high)):
        raise _Broken("keys do not lie where the page above says")


def _nodes(page: bytes, kind: int) -> list[tuple[bytes, int, int]]:
    """The nodes of a page: key, where it stands (leaf) or its page (branch), flags. Strictly."""
    _, _, flags, lower, upper = _PAGE.unpack_from(page)
    if flags != kind:
        raise _Broken("it is a page of another kind")
    count, rest = divmod(lower - _PAGE.size, 2)
    if rest or count < (1 if kind == _LEAF else 2) or not lower <= upper <= len(page):
        raise _Broken("the page has other bounds")
    offsets = struct.unpack_from(f"<{count}H", page, _PAGE.size)
    nodes, extents = [], []
    for at in offsets:
        if at < upper or at + _NODE.size > len(page):
            raise _Broken("a node lies outside of the page")
        low, high, node_flags, key_bytes = _NODE.unpack_from(page, at)
        key = page[at + _NODE.size : at + _NODE.size + key_bytes]
        if kind == _BRANCH:
            nodes.append((key, low | high << 16 | node_flags << 32, 0))
            value_bytes = 0
        else:
            nodes.append((key, at, node_flags))
            value_bytes = _NUMBER.size if node_flags & _BIG else low | high << 16
        length = _NODE.size + key_bytes + value_bytes
        extents.append((at, at + length + length % 2))
    end = upper
    for start, stop in sorted(extents):
        if start != end:
            raise _Broken("nodes overlap, or leave gaps")
        end = stop
    if end != len(page):
        raise _Broken("nodes do not end where the page does")
    return nodes


def verify(
    file: Readable,
    size: int,
    tables: Collection[str],
    *,
    transaction: int | None = None,
    leaves: bool = True,
    is_sound: Callable[[Entry], bool] = lambda entry: True,
) -> list[Damage]:
    """Everything that is wrong with the file. An empty file is sound: LMDB makes one of it."""
    if not size:
        return []
    meta = read_meta(file, size, transaction=transaction)
    if isinstance(meta, Damage):
        return [meta]
    walk = Walk(file, meta, tables)
    unsound = []
    for entry in walk.run(leaves=leaves):
        if not is_sound(entry):
            start = entry.page * meta.page_bytes
            reason = f"{entry.table}: entry {entry.key.hex()} does not match its checksum"
            unsound.append(Damage(file.path, start, start + meta.page_bytes, reason, torn=False))
    return walk.damage + unsound
