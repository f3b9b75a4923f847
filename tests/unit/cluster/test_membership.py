"""What the processes of a node know and tell each other."""

from __future__ import annotations

import asyncio
import os
import random

from delayserver.cluster.membership import Address, Lines, Membership, entry_of, news_line
from delayserver.cluster.placement import Placement
from delayserver.cluster.watch import News
from delayserver.shards.book import OwnerBook, ShardOwner, Vacancy, encode_line
from delayserver.shards.map import Machines
from storage.replicated.meta import make_identity

IDENTITY = make_identity("demo", 3, "fsync", random.Random(1).randbytes)
PLACEMENT = Placement(2, {"n1": "", "n2": "a", "n3": "a"})


def test_all_nodes_have_the_same_identity_of_a_shard() -> None:
    one, other = (Membership(f"n{n}", n, IDENTITY, PLACEMENT) for n in (1, 2))
    assert one.of_shard(2) == other.of_shard(2)
    assert len({one.of_shard(shard).stamp for shard in range(3)}) == 3
    assert one.of_shard(2).shard == 2


def test_a_membership_goes_through_a_document() -> None:
    member = Membership("n1", 7, IDENTITY, PLACEMENT)
    assert Membership.from_document(member.to_document()) == member


def test_what_a_claim_says_is_an_owner_where_it_can_be_reached() -> None:
    address = Address("n1", "http://n1:8080", "n1:7000").pack()
    assert entry_of(2, 5, address) == ShardOwner(2, 5, "n1", "http://n1:8080", "n1:7000")
    assert entry_of(2, 5, "") == Vacancy(2, 5)
    for wrong in ("node-1", "{}", '{"node":"n1","url":"http://n1","link":"nowhere"}'):
        assert entry_of(2, 5, wrong) == Vacancy(2, 5)


def test_lines_come_in_any_pieces_and_one_loop_after_the_other() -> None:
    owner = ShardOwner(0, 1, "n1", "http://n1:8080", "n1:7000")
    later = ShardOwner(1, 4, "n2", "http://n2:8080", "n2:7000")
    news = News(at_ms=5, machines=Machines([]), drained=["n2"])
    text = encode_line(owner) + news_line(news) + encode_line(later)
    reading, writing = os.pipe()
    book = OwnerBook(2)
    lines = Lines(reading, text[:30], book)
    told: list[int] = []

    async def first() -> None:
        lines.begin(lambda: told.append(-1), lambda: told.append(lines.news.at_ms))
        known = asyncio.Event()
        book.on_change(lambda shard: known.set())
        os.write(writing, text[30:200])
        await known.wait()
        lines.end()

    async def second() -> None:
        lines.book = book.renewed()
        gone = asyncio.Event()
        lines.begin(gone.set, lambda: told.append(lines.news.at_ms))
        os.write(writing, text[200:])
        os.close(writing)
        await gone.wait()

    asyncio.run(first())
    asyncio.run(second())
    os.close(reading)
    assert told == [5]
    assert lines.news == news
    assert lines.book.entries == (owner, later)
    assert book.owner(1) is None, "nobody looks into the old one any more"


def test_whole_lines_that_were_read_already_count_at_once() -> None:
    owner = ShardOwner(0, 1, "n1", "http://n1:8080", "n1:7000")
    news = News(5, Machines([]), placement=PLACEMENT, owners={1: (3, "somewhere")})
    lines = Lines(0, encode_line(owner) + news_line(news) + b'{"type"', OwnerBook(2))
    assert lines.news == news
    assert lines.book.owner(0) == owner
