"""Who seems to own a shard, from a piece of its log."""

from storage.replicated.envelope import NOBODY, Adopt, Beat, Claim, FramePart, LogRecord, Release
from storage.replicated.sighting import Sighting


def claim(node: int, epoch: int) -> Claim:
    return Claim(node, epoch, 100 * epoch, 0, f"n{node}:{epoch}")


def beat(node: int, epoch: int, clock_ms: int = 5) -> Beat:
    return Beat(node, epoch, clock_ms, 0, 0, 0)


def seen(*records: LogRecord) -> tuple[int, int, str | None]:
    sighting = Sighting()
    for record in records:
        sighting.see(record)
    return sighting.owner, sighting.epoch, sighting.address


def test_an_owner_with_its_claim() -> None:
    assert seen(claim(1, 1), beat(1, 1)) == (1, 1, "n1:1")


def test_a_piece_without_the_claim() -> None:
    assert seen(FramePart(2, 7, 5, 0, 1, b"")) == (2, 7, None)


def test_a_claim_alone_names_nobody() -> None:
    assert seen() == (NOBODY, 0, None)
    assert seen(claim(1, 1)) == (NOBODY, 0, None)
    assert seen(beat(1, 1), claim(2, 2), beat(1, 1)) == (1, 1, None)


def test_of_two_claims_the_one_that_goes_on() -> None:
    records = (beat(1, 1), claim(3, 2), claim(2, 2), beat(3, 2))
    assert seen(*records) == (3, 2, "n3:2")


def test_a_late_record_of_an_earlier_owner() -> None:
    assert seen(beat(1, 1), claim(2, 2), beat(2, 2), beat(1, 1)) == (2, 2, "n2:2")
    assert seen(beat(1, 1), beat(2, 2)) == (2, 2, None)


def test_an_owner_that_left() -> None:
    assert seen(claim(1, 1), beat(1, 1), Release(1, 1, 5, 2)) == (NOBODY, 1, None)


def test_the_clock_is_that_of_the_owner() -> None:
    sighting = Sighting()
    for record in (beat(2, 2, 50), claim(3, 3), beat(1, 1, 70)):
        sighting.see(record)
    assert sighting.clock_ms == 50


def test_an_adopt_names_nobody_before_its_node_has_claimed() -> None:
    adopt = Adopt(2, 5, 5, 1, 9, 1, 0, 0, 0)
    assert seen(beat(1, 1), adopt) == (1, 1, None)
    assert seen(beat(1, 1), adopt, claim(2, 6), beat(2, 6)) == (2, 6, "n2:6")
