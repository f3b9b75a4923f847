"""Many groups become one, and their payloads are gathered."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from delayserver.schedule.committed import Records, gather_payloads
from storage.rows import HOUR_MS, SCHEDULE_DTYPE
from tests.unit.fakes import START_MS, Disk, Log
from tests.world.storage.files import SimulatedFiles


def gathered(blob: bytes, starts: Sequence[int], lengths: Sequence[int]) -> bytes:
    rows = np.zeros(len(lengths), SCHEDULE_DTYPE)
    rows["payload_length"] = lengths
    payload = bytes(gather_payloads(blob, np.array(starts, np.int64), rows))
    assert rows["payload_offset"].tolist() == list(accumulate(lengths, initial=0))[: len(lengths)]
    return payload


def test_payloads_that_are_scattered_are_gathered_in_order() -> None:
    blob = b"abcdefghij"
    starts, lengths = [0, 2, 9, 4, 0], [2, 2, 1, 3, 0]
    assert gathered(blob, starts, lengths) == b"abcdjefg"
    assert gathered(blob, starts[:2], lengths[:2]) == b"abcd"
    assert gathered(blob, starts[4:], lengths[4:]) == b""
    assert gathered(blob, [], []) == b""


def test_groups_are_filed_in_one_as_one_by_one(log: Log) -> None:
    groups, waiting = [], []
    for number in range(20):
        due_ms = START_MS + number * HOUR_MS // 7
        for body in range(1 + number % 3):
            waiting.append((log.publish(due_ms, body=bytes(number + body)), due_ms))
        log.cancel(*waiting.pop(0))
        groups.append(log.close())
    alone, together = Disk(SimulatedFiles()), Disk(SimulatedFiles())
    alone.file(*groups)
    express = frozenset((3, 4))
    whole = Records.of_groups([group.encode() for group in groups], express)
    assert whole.express_seqs == express
    together.replay.file([whole], START_MS)
    assert alone.replay.hours == together.replay.hours
    for hour, state in alone.replay.hours.items():
        assert alone.schedule.read(hour, 0, state.length) == together.schedule.read(
            hour, 0, state.length
        )


@given(
    st.lists(st.tuples(st.integers(0, 400), st.sampled_from([0, 4, 5, 60, 61])), max_size=60),
    st.booleans(),
)
def test_payloads_are_gathered_in_their_order(
    places: list[tuple[int, int]], in_one_piece: bool
) -> None:
    blob = bytes(range(256)) * 2
    if in_one_piece:
        lengths = [length for _, length in places]
        places = list(zip(accumulate(lengths, initial=7), lengths, strict=False))
        places = [(start, length) for start, length in places if start + length <= len(blob)]
    expected = b"".join(blob[start : start + length] for start, length in places)
    starts, lengths = [start for start, _ in places], [length for _, length in places]
    assert gathered(blob, starts, lengths) == expected
