"""Who owns a shard, as somebody sees it who has no replica."""

from storage.replicated.envelope import Beat, Claim, LogRecord, Release, encode
from storage.replicated.onlooker import TAIL_RECORDS, Onlooker
from tests.world.storage.engine import MemoryLog


def claim(node: int, epoch: int) -> Claim:
    return Claim(node, epoch, 100, 0, f"n{node}:{epoch}")


def beat(node: int, epoch: int) -> Beat:
    return Beat(node, epoch, 100, 0, 0, 0)


class Shard:
    """A log, and who looks on."""

    def __init__(self, *records: LogRecord) -> None:
        self.log = MemoryLog()
        self.write(*records)
        self.reading = self.log.another()
        self.onlooker = Onlooker(self.reading)

    def write(self, *records: LogRecord) -> None:
        self.log.append([*map(encode, records)])

    def seen(self) -> tuple[bool, int, str | None]:
        changed = self.onlooker.step(0)
        return changed, self.onlooker.epoch, self.onlooker.address


def test_it_sees_who_takes_over() -> None:
    shard = Shard(claim(1, 1), beat(1, 1))
    assert shard.seen() == (True, 1, "n1:1")
    assert shard.seen() == (False, 1, "n1:1")
    shard.write(beat(1, 1), claim(2, 2))
    assert shard.seen() == (False, 1, "n1:1"), "a claim alone may be void"
    shard.write(beat(2, 2))
    assert shard.seen() == (True, 2, "n2:2")


def test_an_owner_that_leaves_is_none() -> None:
    shard = Shard(claim(1, 1), beat(1, 1), Release(1, 1, 100, 2))
    assert shard.seen() == (True, 1, "")


def test_where_nobody_was_nobody_is_known() -> None:
    assert Shard().seen() == (False, 0, None)


def test_of_an_owner_who_is_there_for_long_it_does_not_know_where() -> None:
    shard = Shard(claim(1, 1), *[beat(1, 1)] * TAIL_RECORDS)
    assert shard.seen() == (True, 1, None)


def test_what_was_deleted_is_not_needed() -> None:
    shard = Shard(claim(1, 1), *[beat(1, 1)] * 5)
    shard.log.delete_before(4)
    assert shard.seen() == (False, 0, None), "it has to begin later"
    assert shard.seen() == (True, 1, None)


def test_a_log_that_has_lost_its_end_is_read_anew() -> None:
    shard = Shard(claim(1, 1), *[beat(1, 1)] * 5)
    shard.seen()
    shard.onlooker._offset = 9
    assert shard.seen() == (False, 1, "n1:1")
    shard.write(claim(2, 2), beat(2, 2))
    assert shard.seen() == (True, 2, "n2:2")


def test_it_waits_for_brokers_that_are_away() -> None:
    shard = Shard(claim(1, 1), beat(1, 1))
    shard.reading.is_reachable = False
    assert shard.seen() == (False, 0, None)
    assert not shard.onlooker.is_there
    shard.reading.is_reachable = True
    assert shard.seen() == (True, 1, "n1:1")
    assert shard.onlooker.is_there
    shard.onlooker.close()
