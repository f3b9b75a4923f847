"""A verdict on each hour once it is over, out of the pieces of one micro-batch after the other.

An hour is over by the clock in the logs, that of the shard that is furthest behind, and a minute
later it is judged. If none of its messages wait, it is closed, and reported. If some wait, it is
reported when that has lasted for `patience_ms`, and again when it is closed. Rows that come for it
afterwards have it judged again, and reported again if the verdict is another. When an hour is
closed and ended at least `patience_ms` ago, its rows are forgotten. Later rows are counted as late.

A watch that was stopped or killed goes on from its directory: the micro-batch that was on its way
is repeated, and counts once (`hours`).

Cost: 0.1 µs a row to sort it into files, and the cost of `verdicts` for each hour that is judged.
The directory holds 64 bytes for each message of hours that are not closed, and 40 for each
delivery. Threads: one, that of the caller that hands in pieces.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from delayserver.errors import PipelineError
from delayserver.pipeline.topics.folding import LogPlace
from delayserver.pipeline.topics.hours import HourStore, KeptShard, Kind, ToldHour
from delayserver.pipeline.topics.names import KnownNames
from delayserver.pipeline.topics.pieces import (
    BEGUN,
    DAMAGED,
    DEFINED,
    PLACE,
    SCHEDULED,
    SETTLED,
    DamagedRecord,
    LoggedDefinition,
    unpack_place,
)
from delayserver.pipeline.topics.verdicts import HourVerdict, ShardHour, judge_hour
from delayserver.records.subscriptions import decode_subscription, encode_subscription
from delayserver.schedule.filing import by_bucket
from storage.buckets import end_ms
from storage.frame import Rows
from storage.replicated.meta import ClusterIdentity
from storage.replicated.office import OfficeState
from storage.rows import DISPATCH_DTYPE, HOUR_MS, SCHEDULE_DTYPE, RecordKind, select

GRACE_MS: Final = 60_000
"""An hour is judged so long after its end: by then its last deliveries are recorded."""
PATIENCE_MS: Final = HOUR_MS

Piece = tuple[int, str, bytes]


class LogBeginningError(PipelineError):
    """The log of a shard begins in its middle, and no directory gives the earlier names."""

    def __init__(self, shard: int, first_seq: int) -> None:
        super().__init__(
            f"the log of shard {shard} begins with seq {first_seq}: subjects and subscriptions "
            "that are older are not in it. Give --data-dir, the directory of a node or an export"
        )


class HourAuditStream:
    """Takes pieces, and gives verdicts."""

    def __init__(
        self,
        directory: Path,
        identity: ClusterIdentity,
        known: Mapping[int, KnownNames] | None = None,
        *,
        patience_ms: int = PATIENCE_MS,
    ) -> None:
        """`known`: by shard; needed where the log does not reach back to its beginning.

        Raises WatchStateError if the directory cannot be used."""
        self._store = HourStore(directory, identity.stamps)
        self._identity = identity
        self._known = known or {}
        self._patience_ms = patience_ms
        self.damage: list[DamagedRecord] = []
        """The damage that was found in this run."""

    @property
    def is_new(self) -> bool:
        """Whether nothing was taken yet."""
        return self._store.index.batch < 0

    @property
    def late(self) -> int:
        """Rows that came for hours that were told and forgotten."""
        return self._store.index.late

    @property
    def places(self) -> dict[int, LogPlace]:
        """By shard, where its log was left."""
        shards = self._store.index.shards
        return {shard: unpack_place(one.place) for shard, one in shards.items() if one.place}

    @property
    def clock_ms(self) -> int:
        """The earliest clock in the logs of all shards; 0: not all were read yet."""
        return min(_office(one).clock_ms for one in self._store.index.shards.values())

    def take(self, batch: int, pieces: Iterable[Piece]) -> list[HourVerdict]:
        """Take in a micro-batch, once, and judge the hours that are over.

        Raises LogBeginningError, WatchStateError. If a record of NAME.log is damaged, nothing is
        taken in, and `damage` has the record."""
        if batch <= self._store.index.batch:
            return []
        found = list(pieces)
        self.damage += [
            msgspec.msgpack.decode(data, type=DamagedRecord)
            for _, what, data in found
            if what == DAMAGED
        ]
        if any(one.ends_log for one in self.damage):
            return []
        for shard, what, data in found:
            self._take(shard, what, data)
        verdicts = self._judge()
        self._store.commit(batch)
        self._store.tidy()
        return verdicts

    def _take(self, shard: int, what: str, data: bytes) -> None:
        kept = self._store.index.shards[shard]
        if what == BEGUN:
            self._begin(shard, kept, int.from_bytes(data, "little"))
        elif what == DEFINED:
            _define(kept, msgspec.msgpack.decode(data, type=LoggedDefinition))
        elif what == PLACE:
            kept.place = data
        elif what == SCHEDULED:
            self._keep(shard, "schedule", np.frombuffer(data, SCHEDULE_DTYPE))
        elif what == SETTLED:
            self._keep(shard, "dispatch", np.frombuffer(data, DISPATCH_DTYPE))

    def _begin(self, shard: int, kept: KeptShard, first_seq: int) -> None:
        kept.first_seq = first_seq
        if first_seq == 1:
            return
        known = self._known.get(shard)
        if known is None:
            raise LogBeginningError(shard, first_seq)
        older = {number: encode_subscription(one) for number, one in known.subscriptions.items()}
        kept.subjects = {**known.subjects, **kept.subjects}
        kept.subscriptions = older | kept.subscriptions

    def _keep(self, shard: int, kind: Kind, rows: Rows) -> None:
        index = self._store.index
        for hour, here in by_bucket(rows["due_ms"] // HOUR_MS):
            told = index.told.get(hour)
            if told is not None and told.is_forgotten:
                index.late += len(here)
            else:
                self._store.append(shard, hour, kind, select(rows, here))

    def _judge(self) -> list[HourVerdict]:
        """The verdicts that are news."""
        index, now_ms = self._store.index, self.clock_ms
        verdicts = []
        for hour in sorted({hour for one in index.shards.values() for hour in one.hours}):
            if end_ms(hour) + GRACE_MS > now_ms:
                break
            of_shards = [one.hours[hour] for one in index.shards.values() if hour in one.hours]
            size_bytes = sum(one.length_bytes for one in of_shards)
            is_old = end_ms(hour) + self._patience_ms <= now_ms
            told = index.told.get(hour, ToldHour())
            if (told.size_bytes, told.is_old) == (size_bytes, is_old):
                continue
            verdict = judge_hour(hour, self._shards(hour, now_ms))
            is_told = is_old or not verdict.waiting or not verdict.is_clean
            said = verdict.said() if is_told else told.said
            if said != told.said:
                verdicts.append(verdict)
            is_forgotten = is_old and not verdict.waiting
            index.told[hour] = ToldHour(size_bytes, is_old, said, not verdict.waiting, is_forgotten)
            if is_forgotten:
                self._store.forget(hour)
        return verdicts

    def _shards(self, hour: int, now_ms: int) -> dict[int, ShardHour]:
        secret = bytes.fromhex(self._identity.id_secret)
        return {
            shard: ShardHour(
                schedule=self._store.rows(shard, hour, "schedule"),
                dispatch=self._store.rows(shard, hour, "dispatch"),
                subjects=kept.subjects,
                subscriptions={
                    number: decode_subscription(data) for number, data in kept.subscriptions.items()
                },
                first_seq=kept.first_seq,
                through_seq=_office(kept).next_seq - 1,
                now_ms=now_ms,
                id_secret=secret,
            )
            for shard, kept in self._store.index.shards.items()
        }

    @property
    def open_hours(self) -> list[int]:
        """Hours that are over, and of which something waits."""
        now_ms = self.clock_ms
        hours = {hour for one in self._store.index.shards.values() for hour in one.hours}
        told = self._store.index.told
        return sorted(
            hour
            for hour in hours
            if end_ms(hour) + GRACE_MS <= now_ms and not told.get(hour, ToldHour()).is_closed
        )


def _define(kept: KeptShard, defined: LoggedDefinition) -> None:
    if defined.kind == RecordKind.SUBJECT:
        kept.subjects[defined.number] = defined.data.decode()
    else:
        kept.subscriptions[defined.number] = defined.data


def _office(kept: KeptShard) -> OfficeState:
    state = OfficeState.unpack(unpack_place(kept.place).office) if kept.place else OfficeState()
    assert state is not None
    return state
