"""Deliberate bugs, one at a time: the simulation must find each of them, else it proves nothing.

Every canary is a patch of the real code that breaks one rule. The invariants are those of the
design notes; `delayserver.testing.ledger` says which check speaks for which. Bugs by which nothing
is lost, only late, dear or shared, are those of `test_invariants.py`."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest

from delayserver.decisions.events import Events
from delayserver.decisions.groups import Groups
from delayserver.decisions.heartbeats import Heartbeats
from delayserver.decisions.imported_keys import ImportedKeys
from delayserver.decisions.imports import Importer, Imports
from delayserver.decisions.messages import Messages
from delayserver.decisions.overlay import Overlay
from delayserver.decisions.publishing import Publishing
from delayserver.decisions.sequencer import Sequencer
from delayserver.delivery.dispatcher import Dispatcher
from delayserver.delivery.settler import Settler
from delayserver.errors import NotFoundError
from delayserver.records.horizon import Horizon, Mark
from delayserver.records.message import Delivery, State
from delayserver.records.subscriptions import Subscription
from delayserver.records.tables import Archived
from delayserver.recovery import recover as recovery
from delayserver.schedule.archives import extent_of
from delayserver.schedule.expansion import Expansion
from delayserver.schedule.hours import Hours
from delayserver.schedule.loader import Loader
from delayserver.schedule.replay import Filed, Replay, Snapshot
from delayserver.schedule.wheel import Wheel
from delayserver.server import shard
from delayserver.server.engine import Engine
from delayserver.testing import World, run_world, server
from storage import frame
from storage.definitions_log import DefinitionsLog
from storage.errors import SyncError
from storage.hour_log import HourLog
from storage.rows import HOUR_MS, SEQ_MAX
from storage.testing.files import SimulatedFile

WORLDS_MAX = 400
"""Some are caught in one world of a hundred; which ones changes with every file call."""

Patch = pytest.MonkeyPatch
CANARIES: dict[str, Callable[[Patch], None]] = {}


def canary(plant: Callable[[Patch], None]) -> Callable[[Patch], None]:
    CANARIES[plant.__name__] = plant
    return plant


@canary
def the_message_log_is_not_synced(patch: Patch) -> None:
    """I3"""
    patch.setattr(SimulatedFile, "pwrite_durable", SimulatedFile.pwrite)


@canary
def nothing_is_ever_synced(patch: Patch) -> None:
    """I3, I4, I6"""
    patch.setattr(SimulatedFile, "fdatasync", lambda self: None)


@canary
def new_files_are_not_synced_into_their_directory(patch: Patch) -> None:
    """I6"""
    patch.setattr(server.SimulatedServer, "__init__", _without_directory_sync(server))


def _without_directory_sync(module: Any) -> Callable[..., None]:
    original = module.SimulatedServer.__init__

    def init(self: Any, settings: Any, files: Any, *rest: Any) -> None:
        files.sync_directory = lambda path: None
        original(self, settings, files, *rest)

    return init


@canary
def the_checkpoint_comes_before_the_schedule_is_synced(patch: Patch) -> None:
    """I6"""
    original = Replay.checkpoint

    def checkpoint(self: Any) -> int:
        sync, self._schedule.sync = self._schedule.sync, lambda: None
        try:
            return original(self)
        finally:
            self._schedule.sync = sync
            sync()

    patch.setattr(Replay, "checkpoint", checkpoint)


@canary
def the_message_log_is_deleted_before_the_checkpoint(patch: Patch) -> None:
    """I6"""
    original = Replay.file

    def file(self: Any, batch: Any, now_ms: int) -> Filed:
        filed = original(self, batch, now_ms)
        self._message_log.delete_through(filed.last_seq)
        return filed

    patch.setattr(Replay, "file", file)


@canary
def a_publish_is_answered_before_it_is_durable(patch: Patch) -> None:
    """I3"""
    original = Groups.flush

    def flush(self: Any, now_ms: int) -> None:
        group = self._sequencer.group
        original(self, now_ms)
        if self._committing is group:
            for waiter in group.waiters:
                waiter(None)

    patch.setattr(Groups, "flush", flush)


@canary
def the_dispatch_logs_of_older_hours_are_forgotten(patch: Patch) -> None:
    """I4, I13"""
    original = Loader._read_settled

    def read_settled(self: Any, hour: int, *rest: Any) -> Any:
        newest = max(self._dispatch.hours(), default=hour)
        if hour >= newest:
            return original(self, hour, *rest)
        scan, self._dispatch.scan = self._dispatch.scan, lambda hour: iter(())
        try:
            return original(self, hour, *rest)
        finally:
            self._dispatch.scan = scan

    patch.setattr(Loader, "_read_settled", read_settled)


@canary
def hours_are_loaded_before_the_replay_has_ended(patch: Patch) -> None:
    """I11"""
    original = recovery.recover

    def recover(
        catalog: Any, log: Any, schedule: Any, replay: Any, settler: Any, loader: Any, **rest: Any
    ) -> Any:
        recovery._cut_schedule(schedule, replay)
        early = replay.snapshot((rest["now_ms"] + rest["lead_ms"]) // HOUR_MS)
        recovered = original(catalog, log, schedule, replay, settler, loader, **rest)
        names = {number: name for name, number in recovered.subjects.items()}
        recovered.loaded = [loader.load(part, recovered.registry, names) for part in early]
        return recovered

    patch.setattr(shard, "recover", recover)


@canary
def schedule_files_are_not_cut_back(patch: Patch) -> None:
    """I7: what was filed and not covered by a checkpoint stays, and is filed behind it again."""
    append = HourLog.append

    def behind(self: Any, hour: int, *parts: bytes, offset: int, **rest: Any) -> tuple[int, int]:
        return append(self, hour, *parts, offset=max(offset, self.size(hour)), **rest)

    patch.setattr(recovery, "_cut_schedule", lambda schedule, replay: None)
    patch.setattr(HourLog, "append", behind)


@canary
def a_failed_sync_is_tried_again(patch: Patch) -> None:
    """I9: the second one succeeds, and what the first one lost is lost."""
    original = HourLog.sync

    def sync(self: Any) -> None:
        try:
            original(self)
        except SyncError:
            original(self)

    patch.setattr(HourLog, "sync", sync)


@canary
def checksums_are_ignored(patch: Patch) -> None:
    """I8"""
    patch.setattr(frame, "crc32c", lambda data: 0)


@canary
def messages_fire_a_millisecond_early(patch: Patch) -> None:
    """I1"""
    original = Wheel.advance

    def advance(self: Any, now_ms: int, **rest: Any) -> Any:
        return original(self, now_ms + 1, **rest)

    patch.setattr(Wheel, "advance", advance)


@canary
def overdue_messages_fire_in_any_order(patch: Patch) -> None:
    """I13"""
    original = Wheel.advance
    patch.setattr(Wheel, "advance", lambda self, *a, **k: original(self, *a, **k)[::-1])


@canary
def the_ack_is_answered_before_it_is_synced(patch: Patch) -> None:
    """I4"""
    patch.setattr(Settler, "sync", lambda self: setattr(self, "unsynced", False))


@canary
def the_settler_writes_nothing(patch: Patch) -> None:
    """I4"""
    patch.setattr(Settler, "write", lambda self, rows_by_hour, now_ms: rows_by_hour.clear())


@canary
def torn_tails_of_dispatch_logs_are_left(patch: Patch) -> None:
    """I4, I8"""
    patch.setattr(Settler, "recover", lambda self, hours: [])


@canary
def cancelled_rows_that_come_late_are_not_left_out(patch: Patch) -> None:
    """I5"""

    def removed_among(self: Any, hour: int, rows: Any) -> Any:
        return rows["seq"] == 0

    patch.setattr(Engine, "_removed_among", removed_among)


@canary
def a_cancelled_row_stays_in_the_wheel(patch: Patch) -> None:
    """I5"""
    patch.setattr(Messages, "_take_out", lambda self, entry: None)


@canary
def rows_of_many_cancels_stay_in_the_wheel(patch: Patch) -> None:
    """I5"""
    original = Wheel.remove_many

    def remove_many(self: Any, hour: int, seqs: Any, dues_ms: Any) -> Any:
        rows, which = original(self, hour, seqs, dues_ms)
        self.insert(hour, rows)
        return rows, which

    patch.setattr(Wheel, "remove_many", remove_many)


@canary
def many_cancels_are_answered_but_not_recorded(patch: Patch) -> None:
    """I5"""
    patch.setattr(Sequencer, "append_cancels", lambda self, seqs, dues_ms: None)


@canary
def a_rolled_back_group_of_many_cancels_is_not_undone(patch: Patch) -> None:
    """I3"""
    patch.setattr(Overlay, "put_many", _without_undo(Overlay.put_many))


def _without_undo(original: Callable[..., Any]) -> Callable[..., Callable[[], None]]:
    def put_many(self: Any, last_seq: int, values: Any) -> Callable[[], None]:
        original(self, last_seq, values)
        return lambda: None

    return put_many


@canary
def hours_retire_too_early(patch: Patch) -> None:
    """I3"""

    def take_settled(self: Any, now_ms: int, next_seq: int, filed_seq: int) -> list[int]:
        over = [hour for hour in self._unsettled if (hour + 1) * HOUR_MS <= now_ms]
        return [hour for hour in over if hour not in self.loading]

    patch.setattr(Hours, "take_settled", take_settled)


@canary
def a_load_does_not_make_its_hours_live(patch: Patch) -> None:
    """I3: what is filed between the snapshot and the load falls between them."""
    original = Replay.snapshot

    def snapshot(self: Any, through_hour: int) -> list[Snapshot]:
        before = self.live_through_hour
        snapshots = original(self, through_hour)
        if before >= 0:
            self.live_through_hour = before
        return snapshots

    patch.setattr(Replay, "snapshot", snapshot)


@canary
def a_retry_is_settled_before_it_is_durable(patch: Patch) -> None:
    """I3"""
    original = Engine._retry

    def retry(self: Any, delivery: Delivery, *rest: Any) -> None:
        row = delivery.entry
        self.dispatcher._settle(delivery, 1, rest[1])
        self.hours.add(row.hour, 1)
        original(self, delivery, *rest)

    patch.setattr(Engine, "_retry", retry)


@canary
def files_are_not_closed_when_they_are_deleted(patch: Patch) -> None:
    """I8: a reader would take the bytes of a deleted file for those of its successor."""
    patch.setattr(server.SimulatedServer, "_on_deleted", lambda self, hours: None)


@canary
def an_old_file_is_never_deleted(patch: Patch) -> None:
    """Nothing may be left over."""
    patch.setattr(HourLog, "delete", lambda self, hour: None)


@canary
def a_failed_delivery_is_forgotten(patch: Patch) -> None:
    """I3"""
    patch.setattr(Dispatcher, "give_back", lambda self, delivery, next_attempt: None)
    patch.setattr(Dispatcher, "return_leased", lambda self, deliveries, which: None)


@canary
def a_heartbeat_ends_and_publishes_nothing(patch: Patch) -> None:
    """I3"""
    patch.setattr(Publishing, "publish_sealed", lambda self, *rest: 0)


@canary
def a_heartbeat_that_fired_is_not_ended(patch: Patch) -> None:
    """I4: after a crash it fires again."""

    def end(self: Any, key: str, *, message_seq: int) -> None:
        self._set(key, None)

    patch.setattr(Heartbeats, "_end", end)


@canary
def a_renewal_is_not_heard(patch: Patch) -> None:
    """I1"""

    def put(self: Any, key: str, *rest: Any) -> Any:
        before = self._beats.get(key)
        expires_ms = before.expires_ms if before is not None else 0
        result = original(self, key, *rest)
        if before is not None and self._beats.get(key) is before:
            before.expires_ms = expires_ms
        return result

    original = Heartbeats.put
    patch.setattr(Heartbeats, "put", put)


@canary
def an_event_is_answered_before_its_cancels_are_durable(patch: Patch) -> None:
    """I5"""
    original = Events.complete

    def complete(self: Any, *rest: Any) -> Any:
        done = original(self, *rest)
        done.group = None
        return done

    patch.setattr(Events, "complete", complete)


@canary
def watch_keys_are_forgotten_at_a_checkpoint(patch: Patch) -> None:
    """I6"""
    patch.setattr(Replay, "_note_watches", lambda self, *rest: None)


@canary
def watch_keys_are_never_purged(patch: Patch) -> None:
    """Nothing may be left over."""
    patch.setattr(Replay, "_purge_watches", lambda self, *rest: None)


@canary
def two_events_fire_a_message_twice(patch: Patch) -> None:
    """An event counts a message once."""

    def waits(self: Any, watcher: Any) -> bool:
        located = self._messages.locate(watcher.seq, watcher.due_ms)
        return bool(located.state is State.SCHEDULED)

    patch.setattr(Events, "_waits", waits)


@canary
def staged_files_are_deleted_before_the_checkpoint(patch: Patch) -> None:
    """I7"""
    original = Replay.file_import

    def file_import(self: Any, now_ms: int) -> Filed:
        filed = original(self, now_ms)
        while self._imported:
            self._staging.delete(self._imported.pop()[1])
        return filed

    patch.setattr(Replay, "file_import", file_import)


@canary
def staged_files_are_not_synced_before_the_import_is_committed(patch: Patch) -> None:
    """I3, I7"""
    original = Importer.verify

    def verify(self: Any, request: Any) -> Any:
        sync, SimulatedFile.fdatasync = SimulatedFile.fdatasync, lambda self: None  # type: ignore[method-assign]
        try:
            return original(self, request)
        finally:
            SimulatedFile.fdatasync = sync  # type: ignore[method-assign]

    patch.setattr(Importer, "verify", verify)


@canary
def the_keys_of_an_import_are_not_seen_until_it_is_filed(patch: Patch) -> None:
    """I3"""
    patch.setattr(ImportedKeys, "get", lambda self, key_hash: None)


@canary
def what_changed_since_the_look_up_is_not_looked_at(patch: Patch) -> None:
    """I3"""
    patch.setattr(Imports, "_decide_changed", lambda self, adoption, verified: None)


@canary
def a_checkpoint_in_an_import_claims_all_of_it(patch: Patch) -> None:
    """I6"""
    original = Replay.file_import

    def file_import(self: Any, now_ms: int) -> Filed:
        last_seq = self._importing.last_seq
        filed = original(self, now_ms)
        self.filed_seq = last_seq if self.is_importing else self.filed_seq
        self._importing = None
        return filed

    patch.setattr(Replay, "file_import", file_import)


@canary
def an_import_is_answered_before_it_is_durable(patch: Patch) -> None:
    """I3"""
    original = Imports._decide

    def decide(self: Any) -> None:
        adoption = self._current
        original(self)
        if adoption.shown.first_seq:
            self._answer(adoption, None)

    patch.setattr(Imports, "_decide", decide)


@canary
def rows_that_were_left_out_are_filed(patch: Patch) -> None:
    """I7"""
    original = Expansion.__init__

    def init(self: Any, *rest: Any) -> None:
        original(self, *rest)
        self._duplicates = self._duplicates[:0]

    patch.setattr(Expansion, "__init__", init)


@canary
def an_import_is_adopted_again(patch: Patch) -> None:
    """I4"""
    patch.setattr(Imports, "state", lambda self, import_id: raise_not_found())


@canary
def a_subscription_goes_by_the_clock_alone(patch: Patch) -> None:
    """I3"""
    by_clock = property(lambda self: (Mark(SEQ_MAX, self.created_ms),))
    patch.setattr(Subscription, "_marks", by_clock)


@canary
def what_fired_before_the_clock_was_set_back_is_forgotten(patch: Patch) -> None:
    """I4"""

    def advance(self: Any, seq: int, before_ms: int) -> None:
        self._marks = [Mark(seq, before_ms)]

    patch.setattr(Horizon, "advance", advance)


def raise_not_found() -> None:
    raise NotFoundError("planted")


@canary
def an_hour_is_deleted_that_nobody_has_archived(patch: Patch) -> None:
    """Of the setting archive."""
    patch.setattr(Replay, "_is_archived", lambda self, hour: True)


@canary
def an_hour_that_came_back_counts_as_archived(patch: Patch) -> None:
    """Of the setting archive."""
    patch.setattr(Replay, "_is_archived", lambda self, hour: hour in self._archived)


@canary
def an_archive_counts_for_more_than_it_covers(patch: Patch) -> None:
    """Of the setting archive."""
    original = Replay.confirm

    def confirm(self: Any, hour: int, archived: Archived) -> None:
        if hour in self.hours:
            extent = extent_of(self.hours[hour], self._dispatch.size(hour))
            archived = Archived(*extent, self.hours[hour].entries, "", "", 0)
        original(self, hour, archived)

    patch.setattr(Replay, "confirm", confirm)


@canary
def an_archive_is_answered_before_it_is_durable(patch: Patch) -> None:
    """I6"""
    original = Replay.confirm

    def confirm(self: Any, hour: int, archived: Archived) -> None:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(self, "checkpoint", lambda: None)
            original(self, hour, archived)

    patch.setattr(Replay, "confirm", confirm)


# The definitions log


@canary
def the_definitions_log_is_not_synced_before_the_checkpoint(patch: Patch) -> None:
    """I6"""
    patch.setattr(DefinitionsLog, "record", _without_syncs(DefinitionsLog.record))


def _without_syncs(original: Callable[..., Any]) -> Callable[..., Any]:
    def record(self: Any, *rest: Any) -> Any:
        sync, SimulatedFile.fdatasync = SimulatedFile.fdatasync, lambda self: None  # type: ignore[method-assign]
        try:
            return original(self, *rest)
        finally:
            SimulatedFile.fdatasync = sync  # type: ignore[method-assign]

    return record


@canary
def the_definitions_log_is_not_cut_back(patch: Patch) -> None:
    """I7: what no checkpoint covers would count without a catalog."""

    def resume(self: Any, place: Any) -> None:
        self._committed = self._recorded = place

    patch.setattr(DefinitionsLog, "resume", resume)


@canary
def a_rewritten_definitions_log_replaces_the_old_one_before_it_is_synced(patch: Patch) -> None:
    """I6"""
    patch.setattr(DefinitionsLog, "_rewrite", _without_syncs(DefinitionsLog._rewrite))


def first_catch(seeds: Iterable[int]) -> str | None:
    for seed in seeds:
        try:
            world: World = run_world(seed)
            del world
        except Exception as error:  # a broken rule may show as anything
            return f"seed {seed}: {type(error).__name__}: {error}"
    return None


@pytest.mark.parametrize("name", CANARIES)
def test_the_simulation_finds(name: str, monkeypatch: Patch) -> None:
    CANARIES[name](monkeypatch)
    caught = first_catch(range(WORLDS_MAX))
    assert caught is not None, f"nobody noticed that {name.replace('_', ' ')}"
    print(f"{name}: {caught}")


def test_without_a_canary_nothing_is_found() -> None:
    assert first_catch(range(WORLDS_MAX // 4)) is None
