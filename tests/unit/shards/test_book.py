"""The book of owners: a later epoch is right, whatever comes when."""

import itertools

import pytest

from delayserver.errors import InputError
from delayserver.shards.book import (
    Entry,
    OwnerBook,
    ShardOwner,
    Vacancy,
    encode_line,
    split_address,
)


def owner(epoch: int, shard: int = 1, node: str = "n1") -> ShardOwner:
    return ShardOwner(shard, epoch, node, f"http://{node}:8081", f"{node}:7001")


def test_nobody_owns_a_shard_before_it_is_told() -> None:
    book = OwnerBook(3)
    assert [book.owner(shard) for shard in range(3)] == [None] * 3
    assert book.entries == (Vacancy(0, 0), Vacancy(1, 0), Vacancy(2, 0))
    assert not book.may_own(1, 0) and book.may_own(1, 1)


def test_a_later_epoch_is_right_and_an_earlier_one_is_over() -> None:
    book, changes = OwnerBook(3), list[int]()
    book.on_change(changes.append)
    assert book.take(owner(2))
    assert not book.take(owner(2, node="n2")), "an epoch has one owner"
    assert not book.take(owner(1, node="n2"))
    assert book.owner(1) == owner(2)
    assert (book.may_own(1, 1), book.may_own(1, 2), book.may_own(1, 3)) == (False, True, True)
    assert book.take(owner(5, node="n2"))
    assert book.owner(1) == owner(5, node="n2")
    assert changes == [1, 1]


def test_an_epoch_that_was_given_up_does_not_come_back() -> None:
    book, changes = OwnerBook(3), list[int]()
    book.on_change(changes.append)
    book.take(owner(2))
    assert not book.take(Vacancy(1, 1))
    assert book.take(Vacancy(1, 2))
    assert book.owner(1) is None and not book.may_own(1, 2) and book.may_own(1, 3)
    assert not book.take(Vacancy(1, 2)) and not book.take(owner(2))
    assert book.take(Vacancy(1, 4))
    assert not book.take(owner(4)) and book.take(owner(5))
    assert changes == [1, 1, 1, 1]


def test_in_any_order_the_same_is_known_in_the_end() -> None:
    told: list[Entry] = [owner(1), Vacancy(1, 1), owner(2, node="n2"), owner(3), Vacancy(1, 3)]
    found = set()
    for order in itertools.permutations(told):
        book = OwnerBook(2)
        for entry in (*order, *order[:2]):
            book.take(entry)
        found.add(book.entries)
    assert found == {(Vacancy(0, 0), Vacancy(1, 3))}


def test_a_line_says_to_others_what_is_known() -> None:
    book, other = OwnerBook(3), OwnerBook(3)
    book.take(owner(2, node="a\nb"))
    book.take(Vacancy(2, 7))
    for entry in book.entries:
        line = encode_line(entry)
        assert line.count(b"\n") == 1 and line.endswith(b"\n")
        other.take_line(line)
    assert other.entries == book.entries
    assert encode_line(Vacancy(2, 7)) == b'{"type":"vacant","shard":2,"epoch":7}\n'
    assert not other.take_line(encode_line(owner(2)))


@pytest.mark.parametrize(
    "line",
    [
        b"ready\n",
        b"",
        b"{}",
        b"\xff",
        b'{"type":"vacant","shard":3,"epoch":1}',
        b'{"type":"vacant","shard":-1,"epoch":1}',
        b'{"type":"owner","shard":1,"epoch":1,"node":"n","url":"u","link":"nowhere"}',
    ],
)
def test_what_is_no_such_line_changes_nothing(line: bytes) -> None:
    book = OwnerBook(3)
    with pytest.raises(InputError):
        book.take_line(line)
    assert book.entries == OwnerBook(3).entries


def test_addresses() -> None:
    assert split_address("n1:7001") == ("n1", 7001)
    assert split_address("[::1]:7001") == ("::1", 7001)
    for wrong in ("n1", ":1", "n1:", "n1:0", "n1:65536", "n1:x", "n1:²"):
        with pytest.raises(ValueError, match="host:port"):
            split_address(wrong)
