"""The fold over a shard's log in pieces: the same frames count as for a replica that reads it."""

import pytest

from delayserver.pipeline.topics.folding import HistoryLeftError, LogFold, LogPlace, Record
from delayserver.pipeline.topics.pieces import pack_place, unpack_place
from storage.errors import OffsetGapError, RecordDamageError
from storage.replicated import envelope
from storage.replicated.envelope import Adopt, Beat, Claim, LogRecord
from storage.replicated.office import OfficeState
from storage.replicated.reader import RecordReader
from tests.unit.storage.replicated.test_holder import STAMP
from tests.unit.storage.replicated.test_reader import BEAT, CLAIM, FOREIGN, log_of, parts

LATE = parts(3, 1)
"""Of the first owner, behind the claim of the second."""
LOG: list[LogRecord] = [
    CLAIM, *parts(1, 3), BEAT, FOREIGN, *parts(2, 2), Claim(2, 2, 5, 7, ""),
    *LATE, *parts(3, 2, node=2, epoch=2), Beat(2, 2, 6, 0, 0, 0), *parts(4, 1, node=2, epoch=2),
]  # fmt: skip


def records_of(*records: LogRecord, first: int = 0) -> list[Record]:
    return [(first + at, envelope.encode(record)) for at, record in enumerate(records)]


def folded(records: list[Record], place: LogPlace | None = None) -> tuple[list[int], LogFold]:
    """The first seqs of the frames that count, and the fold behind them."""
    fold = LogFold("log/0", STAMP, place)
    return [frame.first_seq for frame in fold.frames(records)], fold


def test_what_counts_is_what_counts_for_a_replica() -> None:
    reader = RecordReader(log_of(*LOG), STAMP, OfficeState())
    expected = [one.frame.first_seq for one in reader.read(0) if one.frame is not None]
    seqs, fold = folded(records_of(*LOG))
    assert seqs == expected == [1, 2, 3, 4]
    assert fold.place == LogPlace(reader.office.state.pack())
    assert fold.first_seq == 1


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_in_pieces_it_is_the_same_also_where_a_frame_is_cut(size: int) -> None:
    records, place = records_of(*LOG), None
    seqs: list[int] = []
    for start in range(0, len(records), size):
        some, fold = folded(records[start : start + size], place)
        seqs += some
        assert fold.place is not None
        place = unpack_place(pack_place(fold.place))
    assert seqs == [1, 2, 3, 4]
    assert place == folded(records)[1].place


def test_a_log_whose_beginning_was_deleted_is_begun_with_the_last_owner() -> None:
    """What a former owner says late is void, and stands in front of it."""
    records = records_of(*LOG)[9:]
    assert envelope.decode(records[0][1], "", 9) == LATE[0]
    seqs, fold = folded(records)
    assert (seqs, fold.first_seq) == ([3, 4], 3)
    more = records_of(Claim(1, 3, 7, len(LOG) - 1, ""), *parts(5, 1, epoch=3), first=len(LOG))
    assert folded(more, fold.place)[0] == [5]


def test_a_log_is_begun_with_who_owned_it_there_also_if_others_came_later() -> None:
    """The next owner has only said that it is there."""
    records = records_of(*LOG)[9:]
    end = len(LOG)
    records += records_of(Claim(1, 3, 7, end - 1, ""), Beat(1, 3, 8, 0, 0, 0), first=end)
    seqs, fold = folded(records)
    assert seqs == [3, 4]
    assert fold.place is not None
    state = OfficeState.unpack(fold.place.office)
    assert state is not None and (state.epoch, state.clock_ms) == (3, 8)


def test_before_a_frame_has_come_a_log_is_not_begun() -> None:
    seqs, fold = folded(records_of(BEAT, Claim(2, 2, 5, 8, ""), BEAT, first=8))
    assert (seqs, fold.place) == ([], None)
    assert folded([])[1].place is None


def test_damage_ends_a_piece_in_front_of_it() -> None:
    records = records_of(*LOG)
    offset, data = records[6]
    records[6] = (offset, data[:-1] + bytes([data[-1] ^ 1]))
    fold = LogFold("log/0", STAMP, None)
    seqs: list[int] = []
    with pytest.raises(RecordDamageError, match="log/0 at offset 6: it does not match its checks"):
        for frame in fold.frames(records):
            seqs.append(frame.first_seq)
    assert seqs == [1]
    assert fold.place is not None
    state = OfficeState.unpack(fold.place.office)
    assert state is not None and state.next_seq == 2


def test_records_that_are_not_there_are_not_passed_over() -> None:
    records = records_of(*LOG)
    with pytest.raises(OffsetGapError):
        folded(records[:4] + records[5:])


def test_a_log_that_goes_on_behind_another_replica_ends_it() -> None:
    state = OfficeState.unpack(folded(records_of(*LOG))[1].place.office)  # type: ignore[union-attr]
    assert state is not None
    end = len(LOG)
    ours = Adopt(2, 9, 5, end, state.next_seq, state.frame_epoch, state.chain, 0, 0)
    other = Adopt(2, 9, 5, end, state.next_seq, state.frame_epoch, state.chain + 1, 0, 0)
    assert folded(records_of(*LOG, ours))[0] == [1, 2, 3, 4]
    with pytest.raises(HistoryLeftError, match=f"at offset {end}.*Begin with another --state"):
        folded(records_of(*LOG, other))
