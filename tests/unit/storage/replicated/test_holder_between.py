"""What an owner makes of records that it has not written."""

import numpy as np
import pytest

from storage.errors import EngineError, FencedError
from storage.frame import encode as encode_frame
from storage.replicated import envelope
from storage.replicated.envelope import PART_MAX_BYTES, Beat, Claim, LogRecord
from storage.replicated.holder import READ_MS, Holder
from storage.replicated.lease import BEAT_MS, LEASE_MS, MARGIN_MS, Tenure
from storage.replicated.office import Office
from storage.rows import DTYPES, LogKind
from tests.world.storage.engine import MemoryLog

STAMP = 77


class Cluster:
    """Node 1 owns the shard in epoch 1."""

    def __init__(self) -> None:
        self.now_ms = 0
        self.log = MemoryLog()
        self.others = self.log.another()
        office = Office(self.log.name, STAMP)
        claim = Claim(1, 1, 0, -1, "n1")
        self.log.append([envelope.encode(claim)])
        office.apply(0, claim)
        tenure = Tenure.of(office, 0, 0)
        assert tenure is not None
        self.holder = Holder(
            1, self.log, office, tenure, clock=lambda: 0, stopwatch=lambda: self.now_ms
        )

    def write(self, record: LogRecord) -> None:
        """Somebody else does."""
        self.others.append([envelope.encode(record)])

    def append(self, first_seq: int, payload_bytes: int = 10) -> None:
        self.holder.append_frame(
            encode_frame(
                LogKind.MESSAGE,
                np.zeros(1, DTYPES[LogKind.MESSAGE]).tobytes(),
                bytes(payload_bytes),
                first_seq=first_seq,
                last_seq=first_seq,
                created_ms=0,
                stamp=STAMP,
            )
        )


@pytest.fixture
def cluster() -> Cluster:
    return Cluster()


def late_record() -> Beat:
    """Of somebody who is not in office."""
    return Beat(2, 1, 0, 0, 0, 0)


def test_what_a_former_owner_says_late_costs_nobody_the_office(cluster: Cluster) -> None:
    cluster.append(1)
    cluster.write(late_record())
    cluster.write(late_record())
    cluster.now_ms = BEAT_MS
    cluster.append(2)
    assert cluster.holder.state.next_seq == 3
    assert cluster.holder.state.next_offset == 5
    assert cluster.holder.may_deliver()
    cluster.append(3)


def test_nor_does_a_claim_that_came_second(cluster: Cluster) -> None:
    cluster.write(Claim(2, 1, 0, -1, "n2"))
    cluster.now_ms = BEAT_MS
    assert cluster.holder.beat()
    assert cluster.holder.state.owner == 1


def test_a_claim_that_counts_does(cluster: Cluster) -> None:
    cluster.write(Claim(2, 2, 0, 0, "n2"))
    with pytest.raises(FencedError):
        cluster.append(1)
    assert not cluster.holder.may_deliver()
    assert cluster.holder.state.owner == 2


def test_what_cannot_be_read_is_unknown(cluster: Cluster) -> None:
    cluster.write(late_record())
    cluster.log.is_reachable = False

    def stopwatch() -> int:
        cluster.now_ms += READ_MS // 2
        return cluster.now_ms

    cluster.holder._stopwatch = stopwatch
    with pytest.raises(FencedError, match="expected at offset 1, and it is at 2"):
        cluster.append(1)


def test_nor_is_what_the_engine_refuses_to_give(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(offset: int, wait_s: float) -> list[tuple[int, bytes]]:
        raise EngineError("read", cluster.log.name, "not now", "ask again")

    cluster.write(late_record())
    monkeypatch.setattr(cluster.log, "read", read)
    with pytest.raises(FencedError, match="expected at offset 1, and it is at 2"):
        cluster.append(1)
    assert not cluster.holder.may_deliver()


def test_the_lease_begins_where_the_record_was_sent(cluster: Cluster) -> None:
    cluster.write(late_record())
    cluster.now_ms = 1000
    cluster.append(1)
    cluster.now_ms = 1000 + LEASE_MS - MARGIN_MS - 1
    assert cluster.holder.may_deliver()
    cluster.now_ms += 1
    assert not cluster.holder.may_deliver()


def test_a_frame_that_stands_there_twice_is_not_answered(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    append = cluster.log.append

    def twice(records):
        append(records)
        return append(records)

    monkeypatch.setattr(cluster.log, "append", twice)
    with pytest.raises(FencedError, match="expected at offset 1, and it is at 2"):
        cluster.append(1)
    # It counts nevertheless, as all others see.
    assert cluster.holder.state.next_seq == 2


def test_a_frame_that_was_cut_in_two_is_not_answered(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    append = cluster.log.append

    def with_others_between(records):
        offsets = []
        for record in records:
            offsets += append([record])
            cluster.write(late_record())
        return offsets

    monkeypatch.setattr(cluster.log, "append", with_others_between)
    with pytest.raises(FencedError):
        cluster.append(1, payload_bytes=2 * PART_MAX_BYTES)
    assert cluster.holder.state.next_seq == 1
