"""A standby: files the records that a shard's owner has logged, and claims a silent office.

    the shard's log ───────▶ RecordReader ──▶ Replay.file ──▶ schedule log, catalog
    the log of settled rows ▶ Settler.write ──▶ dispatch log
    no owner is heard of ──▶ CLAIM ──▶ it counts ──▶ all that is behind it is filed: the new owner

A standby is a recovery that does not end. It files with the code of the server, to the same rows
(R5), makes the same checkpoints, and deletes hours that are past their retention; it loads nothing
and delivers nothing. It reads the settled rows from a log that all replicas share, and finds out by
itself whether an hour is done, by loading it once when it is over.

Taking over is like a start after a crash: the directory is closed at a checkpoint, and opened
by a server, which finds nothing left to file. From the claim on the office is held by beats.

Where the log has lost its end, `step` raises LogReplacedError or OffsetRangeError, and nothing more
can be read until people have named the replica behind which it goes on. If this replica has exactly
the records of the named one, the same call goes on then; else it raises OtherHistoryError: it is to
be made anew.

Cost: 0.3 to 0.5 µs per record, as filing; two reads of the engine for each step, and two
questions a second. Threads: one, the caller's.
"""

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Final

from delayserver.config import Settings
from delayserver.delivery.replicated_settler import ReplicatedSettler
from delayserver.records.subscriptions import Registry
from delayserver.records.tables import read_subjects, read_subscriptions
from delayserver.recovery.recover import cut_to_checkpoint, is_import
from delayserver.recovery.scrub import Scrub
from delayserver.recovery.snapshots import taken
from delayserver.recovery.store import Store
from delayserver.schedule.committed import Records
from delayserver.schedule.replay import Snapshot
from storage.buckets import is_day
from storage.errors import (
    CopySourceError,
    FencedError,
    OffsetRangeError,
    OtherHistoryError,
    StorageError,
)
from storage.frame import Damage
from storage.replicated import envelope
from storage.replicated.adoption import Adoptions, append_adopt, knows_settled
from storage.replicated.engine import EngineLog
from storage.replicated.envelope import Adopt, Beat, Claim, Release
from storage.replicated.holder import Holder
from storage.replicated.lag import Lag
from storage.replicated.lease import Follower, Tenure
from storage.replicated.log import FollowedLog
from storage.replicated.meta import AdoptRecord
from storage.replicated.office import OfficeState, RecordDecision
from storage.replicated.reader import RecordReader, RecordReading
from storage.rows import DISPATCH_DTYPE, HOUR_MS, LogKind

ASK_MS: Final = 200
"""Between two questions where the log ends."""
PLACE_MS: Final = 60_000
"""A checkpoint is made so often though only beats have come: a reader would begin at the first."""
FILE_BYTES_MAX: Final = 32 * 1024 * 1024
"""The bytes that are filed at once, more or less."""
DONE_MS: Final = 60_000
"""So long after its end an hour may be done."""
SLICES_MAX: Final = 20
"""The most slices of housekeeping in one step."""
WAIT_S: Final = 0.5
SCRUB_MS: Final = 1_000
"""The time between two checks that the filed rows are still intact."""
LAG_MAX_MS: Final = 60_000
"""A replica that is further behind does not claim."""

TakeSnapshot = Callable[[Store], object]
SnapshotCallback = Callable[[object, StorageError | None], None]


class Standby:
    """One replica of a shard, until it holds the office."""

    def __init__(
        self,
        store: Store,
        settler: ReplicatedSettler,
        log: EngineLog,
        writer: EngineLog,
        fence: Callable[[], None],
        settings: Settings,
        *,
        node: int,
        follower: Follower,
        address: str,
        adoptions: Adoptions,
        clock: Callable[[], int],
        stopwatch: Callable[[], int],
    ) -> None:
        """`store` was opened with a `FollowedLog` and with `settler`. `log` and `writer` are the
        shard's log, opened twice: once to be read, once for an owner to write. `fence` ends
        the transactions of other owners, and waits for brokers. `address`: where the others
        find this node as the owner. `adoptions`: people's decisions about a log that has
        lost its end. Raises StorageError."""
        assert isinstance(store.message_log, FollowedLog)
        self._store = store
        self._followed = store.message_log
        self._replay = store.replay
        self._settler = settler
        self._log = log
        self._writer = writer
        # A claim that is long under way meets that of another.
        writer.prepare_append()
        self._fence = fence
        self._settings = settings
        self._node = node
        self._follower = follower
        self._address = address
        self._clock = clock
        self._stopwatch = stopwatch
        first_seq = self._followed.place.next_seq
        damage = cut_to_checkpoint(first_seq, store.replay)
        self.damage: list[Damage] = damage
        """Damage that was found and is not reported yet."""
        self._reader = RecordReader(log, store.identity.stamp, self._followed.place, adoptions)
        self.is_drained = False
        """This node is to own nothing; may be set by any thread."""
        self._waiting: list[Records] = []
        self._waiting_bytes = 0
        self._imported_bytes = 0
        """The bytes of imports, since a checkpoint was made within one."""
        now_ms = stopwatch()
        self._filed_ms = self._checkpoint_ms = self._asked_ms = now_ms
        self._end: int | None = None
        """Where the log ended when it was asked last."""
        self._lag = Lag(now_ms)
        self._tried: dict[int, tuple[int, int]] = {}
        """Hours that were looked at and not done → the lengths of their files then."""
        self._scrub = Scrub(store.hour_log(LogKind.SCHEDULE), store.replay.hours)
        self._scrubbed_ms = now_ms
        self._wanted: deque[tuple[TakeSnapshot, SnapshotCallback]] = deque()
        """Snapshots that somebody waits for."""

    # ── the state for other threads ────────────────────────────────────────────────────────────

    @property
    def state(self) -> OfficeState:
        """The office by the log, as far as it was read."""
        return self._reader.office.state

    @property
    def is_known(self) -> bool:
        """Whether it is sure that the log goes on where this replica is."""
        return self._reader.is_known

    @property
    def lag_records(self) -> int | None:
        """How many records stand in the log that were not read when it was asked last; None: it
        did not answer."""
        return None if self._end is None else max(0, self._end - self.state.next_offset)

    @property
    def lag_ms(self) -> int:
        """All that stood in the log so long ago is filed."""
        return self._lag.ms(self._stopwatch())

    @property
    def stuck_ms(self) -> int:
        """For how long it has not kept up with a log that answers. Only for who steps."""
        return self._lag.stuck_ms(self._stopwatch())

    @property
    def owner_address(self) -> str:
        """The address in the claim of the current owner; empty: none is known."""
        return self._followed.owner_address

    @property
    def kept(self) -> tuple[int, int]:
        """The places where it would begin to read if it were started again: in the shard's log, and
        in that of settled rows."""
        return self._followed.kept

    @property
    def clock_differs(self) -> bool:
        """R7: it does not claim, since its clock is not that of the owner."""
        return self._follower.clock_differs(self.state, self._clock())

    def set_rank(self, rank: int) -> None:
        """So many nodes go before this one from now on when the shard is to be claimed. Any thread
        may call this."""
        self._follower.rank = rank

    # ── one step after the other ───────────────────────────────────────────────────────────────

    def step(self, wait_s: float) -> Holder | None:
        """Take in new records, waiting for them up to `wait_s`; then do due housekeeping.

        Returns the office once this node holds it: all that the log had is filed and behind a
        checkpoint then, and the caller has to beat from now on and to close the store.
        Raises StorageError: the process has to end."""
        if self._stopwatch() - self._asked_ms >= ASK_MS:
            self._ask()
        if self._end is not None and self._end <= self.state.next_offset:
            # Records from now on came into the log behind the question.
            self._follower.read_all(self._asked_ms)
        if self._waiting_bytes < FILE_BYTES_MAX:  # Else the disk takes nothing, for now.
            self._read(wait_s)
        if self._reader.is_known:
            self._take_in_settled(0)
        present_ms = self._stopwatch()
        if self._waiting_bytes >= FILE_BYTES_MAX or (
            self._waiting and present_ms - self._filed_ms >= self._settings.file_ms
        ):
            self._file()
        if present_ms - self._checkpoint_ms >= self._checkpoint_in_ms():
            self.checkpoint()
            self._keep_house()
        if self._wanted:
            self.checkpoint()
            while self._wanted:
                take, told = self._wanted.popleft()
                told(*taken(partial(take, self._store)))
        if present_ms - self._scrubbed_ms >= SCRUB_MS:
            self._scrubbed_ms = present_ms
            self.damage += self._scrub.step()
        self._lag.filed(self._filed_offset())
        is_due = self._follower.is_due(self.state, self._stopwatch())
        may_claim = self._reader.is_known and not self.is_drained
        return self._claim() if is_due and may_claim else None

    def _filed_offset(self) -> int:
        """All that stands before it in the log is filed."""
        if self._waiting or self._replay.is_importing:
            return self._followed.place.next_offset
        return self._reader.office.frame_place().next_offset

    def want_snapshot(self, take: TakeSnapshot, told: SnapshotCallback) -> None:
        """Have the next step call `take` behind a checkpoint, and `told` with its result, or its
        error. Any thread may call this."""
        self._wanted.append((take, told))

    def _read(self, wait_s: float) -> None:
        for found in self._reader.read(wait_s):
            self._follower.read(found.record, found.verdict, self._stopwatch(), self._clock())
            if found.frame is not None and found.frame.last_seq > self._replay.filed_seq:
                assert found.frame.payload is not None
                self._waiting.append(Records(found.frame.rows, found.frame.payload))
                self._waiting_bytes += found.frame.header.frame_bytes
            if found.verdict is RecordDecision.VOID:
                continue
            if isinstance(found.record, Adopt):
                self._pass(found.record, found)
            elif isinstance(found.record, Claim):
                self._followed.owner_address = found.record.address
                if found.seized_ms is not None:
                    self._followed.note_seized(found.seized_ms)
            elif isinstance(found.record, Release):
                self._followed.owner_address = ""
            elif isinstance(found.record, Beat):
                # A row that has fired at the owner was live, also if this clock is behind its own.
                self._replay.live_once_through_hour = max(
                    self._replay.live_once_through_hour, found.record.live_through_hour
                )

    def _pass(self, record: Adopt, found: RecordReading) -> None:
        """The log has lost its end there, and goes on. Raises OtherHistoryError: not with this
        replica."""
        is_own = record.node == self._node
        knows_all = not found.has_missed_one and knows_settled(record, self._settler.offset)
        if found.is_other_history or not (is_own or knows_all):
            raise OtherHistoryError(self._log.name, record.end)
        self._settler.go_back(record.settled_end)
        self._followed.owner_address = ""

    def _take_in_settled(self, wait_s: float) -> None:
        """Raises StorageError."""
        try:
            self._settler.take_in(wait_s)
        except OffsetRangeError as error:
            if error.offset < error.first:
                raise
            # It has lost its end. Rows of it that the files have are settled; others may repeat
            # them.
            self._settler.go_back(error.end)

    def _file(self) -> None:
        """File all that was read. Raises StorageError; ShortageError: the next call goes on with
        the rest, and no place is behind that."""
        self._filed_ms = self._stopwatch()
        now_ms = self._clock()
        while self._waiting or self._replay.is_importing:
            if self._replay.is_importing:
                self._file_import(now_ms)
            else:
                self._file_some(now_ms)
        self._waiting_bytes = 0
        self._followed.place = self._reader.office.checkpoint()

    def _file_some(self, now_ms: int) -> None:
        """File the records before the next import, and the record of that one."""
        imports = (number for number, one in enumerate(self._waiting, 1) if is_import(one))
        count = next(imports, len(self._waiting))
        batch = self._waiting[:count]
        if is_import(batch[-1]):
            self._replay.check_staged(batch[-1])
        self.damage += self._replay.file(batch, now_ms).damage
        del self._waiting[:count]

    def _file_import(self, now_ms: int) -> None:
        filed = self._replay.file_import(now_ms)
        self.damage += filed.damage
        self._imported_bytes += filed.total_bytes
        if self._imported_bytes >= FILE_BYTES_MAX:
            # This bounds the changes for the catalog that it holds in memory.
            self._imported_bytes = 0
            self._replay.checkpoint()

    def _checkpoint_in_ms(self) -> int:
        is_new = bool(self._waiting) or self._replay.is_dirty
        return self._settings.checkpoint_ms if is_new else PLACE_MS

    def checkpoint(self) -> None:
        """Make all that was read durable."""
        self._checkpoint_ms = self._stopwatch()
        self._file()
        self._settler.sync_files()
        self._replay.checkpoint()

    def _ask(self) -> None:
        self._asked_ms = self._stopwatch()
        self._end = self._log.end()
        if self._end is not None:
            self._lag.asked(self._asked_ms, self._end)
        else:
            self._lag.could_not_ask()
            # Else it would claim as soon as there is a leader again, before the owner is heard.
            self._follower.could_not_ask(self._stopwatch())

    # ── housekeeping ───────────────────────────────────────────────────────────────────────────

    def _keep_house(self) -> None:
        now_ms, replay = self._clock(), self._replay
        self._retire_one(now_ms)
        for _ in range(SLICES_MAX):
            near_hour = replay.near_hour(now_ms)
            if replay.must_split(near_hour):
                self.damage += replay.split(near_hour, now_ms).damage
            elif not self._purge(now_ms) and not replay.tidy():
                break
        replay.purging.deleted_hours.clear()  # nobody here has them open

    def _purge(self, now_ms: int) -> bool:
        """Whether there is more to delete. A standby is not told which hours parts let go, such as
        those that were archived: it keeps them until it owns the shard."""
        settings = self._settings
        return self._replay.purge(now_ms, settings.kept_ms)

    def _retire_one(self, now_ms: int) -> None:
        """Look at an hour that may be done, and retire it if it is.

        The owner knows when the last delivery of an hour is settled, and does not log it: whoever
        has the same rows, and the same set of settled ones, comes to the same result."""
        for hour, state in sorted(self._replay.hours.items()):
            if (hour + 1) * HOUR_MS + DONE_MS > now_ms:
                return
            if is_day(hour) or state.retired_ms or not state.length:
                continue
            settled_bytes = self._settler.size_bytes(hour)
            lengths = (state.length, settled_bytes)
            is_likely = settled_bytes >= (state.entries - state.removals) * DISPATCH_DTYPE.itemsize
            if not is_likely or self._tried.get(hour) == lengths:
                continue
            self._tried[hour] = lengths
            catalog = self._store.catalog
            registry = Registry(read_subscriptions(catalog))
            loaded = self._store.loader.load(
                Snapshot(hour, state.length), registry, read_subjects(catalog)
            )
            if loaded.is_whole and not loaded.count:
                self._replay.retire(hour, state.last_entry_seq, now_ms)
                del self._tried[hour]
            return

    # ── a log that has lost its end ────────────────────────────────────────────────────────────

    @property
    def place(self) -> OfficeState:
        """Where the last checkpoint stands in the log."""
        return self._followed.place

    def adopt(self, decision: AdoptRecord, writer: EngineLog, settled: EngineLog) -> bool:
        """Say in the log that it goes on behind this replica, as people have decided, if it ends
        where they have seen that; whether it was said. Both logs are opened for it alone. The
        records that were read are behind a checkpoint."""
        place = self.place
        assert self._replay.filed_seq == place.next_seq - 1, (self._replay.filed_seq, place)
        return append_adopt(
            writer,
            settled,
            decision,
            place,
            self._settler.offset,
            node=self._node,
            now_ms=self._clock(),
        )

    # ── taking over ────────────────────────────────────────────────────────────────────────────

    def _claim(self) -> Holder | None:
        """Claim the office if no owner is heard of, and this node has read all that there is.
        Raises StorageError; ShortageError: the records that were read find no room, so another node
        had better own the shard."""
        if self._waiting:
            self._file()
        self._lag.filed(self._filed_offset())
        self._ask()
        wall_ms = self._clock()
        knows_all = self._follower.may_claim(self.state, self._end, self._asked_ms, wall_ms)
        if not knows_all or self.lag_ms > LAG_MAX_MS:
            return None
        state, leases = self.state, self._reader.leases
        claim = Claim(self._node, state.epoch + 1, self._clock(), state.last_offset, self._address)
        sent_ms = self._stopwatch()
        (offset,) = self._writer.append([envelope.encode(claim)])
        if offset is None:
            raise FencedError(self._log.name, "it is not known whether the claim stands in the log")
        while self.state.next_offset <= offset:
            self._read(WAIT_S)
        tenure = Tenure.of(self._reader.office, offset, sent_ms)
        if tenure is None:
            return None  # Another was quicker.
        floor_ms = state.clock_ms
        return Holder(
            self._node,
            self._writer,
            self._reader.office,
            tenure,
            # R7: time does not go back for rows that have fired already.
            clock=lambda: max(self._clock(), floor_ms),
            stopwatch=self._stopwatch,
            # It leaves them to no other node: the claim counts only directly behind the release.
            leases=leases or b"",
        )

    def _has_transactions(self) -> bool:
        """Whether a subscription has, or had before it was deleted."""
        return any(one.is_exactly_once for one in read_subscriptions(self._store.catalog))

    def close(self) -> None:
        """Let go of the log, but for the writer of an office that was taken."""
        while self._wanted:
            _, told = self._wanted.popleft()
            told(None, CopySourceError(self._address, "it follows no more"))
        self._log.close()
        self._store.close()

    def abandon(self) -> None:
        """Let go of all of it: the replica is opened anew."""
        self._writer.close()
        self.close()

    def finish(self) -> None:
        """File all that stood before the claim, and learn all that was settled by then; the store
        is closed behind that. The office is held by beats meanwhile.

        Raises StorageError."""
        self.checkpoint()  # Then the catalog has all definitions.
        if self._has_transactions():
            # A transaction that another owner has left open would hide the records behind it.
            self._fence()
        end: int | None = None
        while end is None:
            end = self._settler.end()
        # Nothing is read behind a transaction that is open, so this waits for the end of all that
        # began before.
        while self._settler.offset < end:
            self._take_in_settled(WAIT_S)
        self.checkpoint()
        self.close()
