"""A log that has lost its end goes on behind the replica that people have named.

    `cluster adopt` ── AdoptRecord ──▶ the cluster's log ──▶ the node that it names
                                                                 │ ADOPT, if the log ends there
    the shard's log   … 898 899 ┊ 900: ADOPT  901: CLAIM  …    ◀─┘
                                ┊ (the records here were lost)

All servers of the engine have lost power, and the log ends before the records that replicas have
filed. The replicas stand behind its end and stop. The one that goes on says in the log where it is:
the next seq, and a checksum over all frames before (`OfficeState.chain`). Nothing is written anew:
that replica's files hold the records of the log, and a replica that lacks them copies them.

A replica that has stopped learns from the decisions where to look for such a record, since it
cannot read the records before its own place. It reads on there on two conditions: the frames that
it has filed are the same, and it has not missed an earlier decision. The records that followed an
earlier decision may be lost, too, and the settled deliveries may have other offsets since.

Cost: one look at the cluster's log when a replica is opened. Threads: none of its own.

Rejected: frames made again from the rows of the files. Their checksums, and where one ended, are
not known any more; and records that the log lacks need not be there, for no new replica reads them.
"""

from collections.abc import Callable, Sequence

from storage.errors import EngineError, OffsetRangeError, OtherHistoryError
from storage.replicated import envelope
from storage.replicated.engine import EngineLog
from storage.replicated.envelope import Adopt
from storage.replicated.meta import AdoptRecord
from storage.replicated.office import OfficeState
from storage.replicated.reading import read_to_end

Adoptions = Callable[[], Sequence[AdoptRecord]]
"""The decisions of people about a shard, in order. Raises EngineError."""


def nothing_decided() -> Sequence[AdoptRecord]:
    """The decisions about a log that never lost anything."""
    return ()


def concerns(decision: AdoptRecord, place: OfficeState) -> bool:
    """Whether it is about the log that a replica at this place has read, and is later than that."""
    reached = max(place.next_offset, place.last_offset + 1)
    return decision.epoch > place.epoch and decision.end < reached


def find_adopt(log: EngineLog, place: OfficeState, adoptions: Sequence[AdoptRecord]) -> int | None:
    """The offset of the ADOPT behind which a replica at this place may go on; None: there is none.

    Raises OtherHistoryError where there may have been one, long ago, and the records there were
    deleted; EngineError: it cannot be told now."""
    for decision in adoptions:
        if not concerns(decision, place) or not is_reached(log, decision):
            continue
        try:
            offset, data = next(read_to_end(log, decision.end, decision.end + 1))
        except OffsetRangeError as error:
            if decision.end < error.first:
                raise OtherHistoryError(log.name, decision.end) from error
            continue
        record = envelope.decode(data, log.name, offset)
        if isinstance(record, Adopt) and (record.end, record.epoch) == (offset, decision.epoch):
            return offset
    return None


def is_reached(log: EngineLog, decision: AdoptRecord) -> bool:
    """Whether something stands in the log where it is to go on. Raises EngineError."""
    end = log.end()
    if end is None:
        raise EngineError("read", log.name, "it does not say where it ends", "see the brokers")
    return end > decision.end


def append_adopt(
    log: EngineLog,
    settled: EngineLog,
    decision: AdoptRecord,
    place: OfficeState,
    settled_place: int,
    *,
    node: int,
    now_ms: int,
) -> bool:
    """Say in the log that it goes on behind this node's replica, whose checkpoint stands at
    `place`, if the log ends where people have seen it end. Returns whether it was said. The record
    counts if it came to stand there; every reader of it sees that.

    No clock goes back behind the clocks of before (R7)."""
    end, settled_end = log.end(), settled.end()
    if end != decision.end or settled_end is None:
        return False
    record = Adopt(
        node,
        decision.epoch,
        max(now_ms, place.clock_ms),
        decision.end,
        place.next_seq,
        place.frame_epoch,
        place.chain,
        settled_place,
        settled_end,
    )
    log.append([envelope.encode(record)])
    return True


def continues(record: Adopt, before: OfficeState) -> bool:
    """Whether a replica that has read up to `before` has the frames that the log continues."""
    return (record.next_seq, record.chain) == (before.next_seq, before.chain)


def knows_settled(record: Adopt, settled_place: int) -> bool:
    """Whether a replica that has the settled deliveries up to that offset can learn from the log
    all that the adopting replica knows of them."""
    return max(settled_place, record.settled_end) >= record.settled_place
