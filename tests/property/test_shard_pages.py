"""Pages of shards that are put together, compared with pages of one sorted list."""

from __future__ import annotations

from itertools import pairwise

import msgspec
from hypothesis import example, given
from hypothesis import strategies as st

from delayserver.shards.pages import (
    Place,
    Spot,
    merge_pages,
    read_cursor,
    spot_of,
    start_of,
    write_cursor,
)
from delayserver.wire.operations import ShardPageDocument

dues = st.integers(0, 6)
seqs = st.integers(0, 5)
places = st.tuples(dues, seqs)
shards = st.lists(st.lists(places, unique=True, max_size=12), min_size=2, max_size=4)
ends = st.lists(st.integers(0, 6), min_size=1, max_size=8)
"""After how many rows a page of a shard ends early; after which others it goes on."""
NO_LIMIT_BYTES = 10**9


def row_of(shard: int, place: Place) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode([shard, *place]))


def page_of(
    rows: list[Place], start: Place, limit: int, most: int, shard: int
) -> ShardPageDocument:
    """What a shard answers: up to `limit` rows from a place on, or fewer, if only `most` are looked
    at; then it goes on behind the last of these, in the middle of nowhere."""
    found = sorted(row for row in rows if row >= start)
    page, following = found[:limit], found[limit : limit + 1]
    end = following[0] if following else None
    if most < len(page):
        page = page[:most]
        end = (page[-1][0], page[-1][1] + 1) if page else found[0]
    items = [row_of(shard, place) for place in page]
    return ShardPageDocument(items, page, end, limit)


def numbers(items: list[msgspec.Raw]) -> list[Spot]:
    return [(due_ms, shard, seq) for shard, due_ms, seq in map(msgspec.json.decode, items)]


def read_all(
    lists: list[list[Place]], limit: int, most: list[int], max_bytes: int = NO_LIMIT_BYTES
) -> list[list[Spot]]:
    """All pages."""
    pages: list[list[Spot]] = []
    cursor = None
    while True:
        if cursor is None:
            starts: list[Place] = [(0, 0)] * len(lists)
        else:
            spot = read_cursor(cursor, len(lists), 2)
            starts = [start_of(spot, shard) for shard in range(len(lists))]
        # Once in a while each shard gets further, as a real one does.
        some = [most[(len(pages) + n) % len(most)] for n in range(len(lists))]
        if len(pages) % 3 == 2:
            some = [limit] * len(lists)
        parts = [
            page_of(rows, starts[shard], limit, some[shard], shard)
            for shard, rows in enumerate(lists)
        ]
        items, following = merge_pages(parts, limit, max_bytes)
        assert len(items) <= limit
        pages.append(numbers(items))
        if following is None:
            return pages
        cursor = write_cursor(following, len(lists))
        assert read_cursor(cursor, len(lists), 2) == following


@given(shards, st.integers(1, 8), ends)
@example([[], []], 1, [0])
@example([[(1, 1)], [(1, 1)]], 1, [0])
def test_pages_together_are_the_sorted_list(
    lists: list[list[Place]], limit: int, most: list[int]
) -> None:
    expected = sorted(spot_of(n, place) for n, rows in enumerate(lists) for place in rows)
    pages = read_all(lists, limit, most)
    assert [spot for page in pages for spot in page] == expected


@given(shards, st.integers(1, 8))
def test_pages_are_full_where_no_shard_ends_early(lists: list[list[Place]], limit: int) -> None:
    expected = sorted(spot_of(n, place) for n, rows in enumerate(lists) for place in rows)
    pages = read_all(lists, limit, [limit])
    assert pages == ([expected[at : at + limit] for at in range(0, len(expected), limit)] or [[]])


@given(shards, st.integers(1, 8), st.integers(0, 40))
def test_a_page_ends_where_it_is_long_but_not_before_its_first_row(
    lists: list[list[Place]], limit: int, max_bytes: int
) -> None:
    expected = sorted(spot_of(n, place) for n, rows in enumerate(lists) for place in rows)
    pages = read_all(lists, limit, [limit], max_bytes)
    assert [spot for page in pages for spot in page] == expected
    for page in pages:
        assert len(page) == 1 or not expected or sum(map(bytes_of, page)) <= max_bytes
    for page, following in pairwise(pages):
        is_full = len(page) == limit
        assert is_full or sum(map(bytes_of, [*page, following[0]])) > max_bytes


def bytes_of(spot: Spot) -> int:
    due_ms, shard, seq = spot
    return len(row_of(shard, (due_ms, seq)))


@given(places, st.integers(0, 3), places, st.integers(0, 3))
def test_a_start_is_the_first_place_from_a_spot_on(
    place: Place, shard: int, at: Place, at_shard: int
) -> None:
    spot = spot_of(at_shard, at)
    assert (place >= start_of(spot, shard)) == (spot_of(shard, place) >= spot)


@given(shards, st.integers(1, 4), st.lists(st.tuples(st.integers(0, 3), places), max_size=10))
def test_what_comes_meanwhile_is_listed_if_it_is_behind_and_nothing_is_twice(
    lists: list[list[Place]], limit: int, coming: list[tuple[int, Place]]
) -> None:
    """As in the list of one server, also in shards that had nothing more."""
    count = len(lists)
    there = {spot_of(n, place) for n, rows in enumerate(lists) for place in rows}
    seen: list[Spot] = []
    spot: Spot = (0, 0, 0)
    expected = set(there)
    while True:
        starts = [start_of(spot, shard) for shard in range(count)]
        parts = [page_of(lists[n], starts[n], limit, limit, n) for n in range(count)]
        items, following = merge_pages(parts, limit, NO_LIMIT_BYTES)
        seen += numbers(items)
        if following is None:
            break
        spot = following
        if coming:
            shard, place = coming.pop()
            new = spot_of(shard % count, place)
            if new not in there:
                there.add(new)
                lists[shard % count].append(place)
                if new >= spot:
                    expected.add(new)
    assert seen == sorted(expected)
