"""Deliberate bugs, one at a time: the simulation must find each of them, else it proves nothing.

Every canary is a patch of the real code that breaks one rule, and names what it may be caught by:
nearly always a violation of the ledger, else the typed error or the assertion by which the server
itself notices. Anything else is a mistake of the canary (a patch whose signature is out of date
dies of a TypeError, and proves nothing), and fails the test.

The invariants are those of the design notes; `tests.world.ledger` says which check speaks
for which. Bugs that the worlds cannot see, or hardly, are those of `test_invariants.py`."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest

from delayserver.config import Settings
from delayserver.decisions import retries
from delayserver.decisions.events import Events
from delayserver.decisions.groups import Groups
from delayserver.decisions.imported_keys import ImportedKeys
from delayserver.decisions.messages import Messages
from delayserver.decisions.new_messages import NewMessage
from delayserver.decisions.overlay import Overlay
from delayserver.decisions.publishing import Accepted, Publishing
from delayserver.decisions.retries import Retries
from delayserver.decisions.sequencer import Sequencer
from delayserver.decisions.subscribing import Subscribing
from delayserver.delivery import ranks, single_file
from delayserver.delivery.deliveries import Deliveries
from delayserver.delivery.dispatcher import Dispatcher
from delayserver.delivery.leases import Leases
from delayserver.delivery.looks import Looks
from delayserver.delivery.pushes import Pushes
from delayserver.delivery.queues import Queues
from delayserver.delivery.settler import Settler
from delayserver.delivery.settling import Settling
from delayserver.delivery.single_file import SingleFile
from delayserver.errors import NotFoundError
from delayserver.parts.heartbeats.heartbeats import Heartbeats
from delayserver.parts.imports.archives import Archives
from delayserver.parts.imports.importer import Importer
from delayserver.parts.imports.imports import Imports
from delayserver.parts.imports.records import Archived
from delayserver.parts.schedules import scheduling
from delayserver.parts.schedules.records import ScheduleChange, pack_schedule_change
from delayserver.parts.schedules.recurrence import Planned
from delayserver.parts.schedules.scheduling import Scheduling
from delayserver.parts.sources.sourcing import Sourcing
from delayserver.records.horizon import Horizon, Mark
from delayserver.records.message import (
    DueDelivery,
    MessageOptions,
    Payload,
    State,
    encode_payload,
    row_flags,
)
from delayserver.records.subscriptions import SubjectSpan, Subscription
from delayserver.records.tables import named_writes
from delayserver.recovery import recover as recovery
from delayserver.recovery import store
from delayserver.recovery.leases_file import LeasesFile
from delayserver.schedule import wheel_rows
from delayserver.schedule.days import Days
from delayserver.schedule.effects import Effects
from delayserver.schedule.expansion import Expansion
from delayserver.schedule.hours import Hours
from delayserver.schedule.loader import Loader
from delayserver.schedule.purge import Purge
from delayserver.schedule.replay import Filed, Replay, Snapshot
from delayserver.schedule.retired import extent_of
from delayserver.schedule.wheel import Wheel
from delayserver.server import carried_leases, redrive_calls, shard
from delayserver.server.body_reader import BodyReader
from delayserver.server.engine import Engine
from delayserver.server.redrive_calls import RedriveCalls
from delayserver.timers.rates import TokenBucket
from storage.catalog import Table
from storage.definitions_log import DefinitionsLog
from storage.errors import DamageError, DiskError, SyncError, UnreadableError
from storage.frame import seal
from storage.hour_log import HourLog
from storage.key_runs import RunState, RunWriter
from storage.rows import HOUR_MS, SEQ_MAX, RecordKind
from storage.tiered_catalog import TieredCatalog, _as_columns
from tests.depth import every
from tests.simulation.catching import caught_seeds, first_catch
from tests.world import Violation, run_world, server
from tests.world.storage.files import SimulatedFile
from tests.world.world import Theme, has_groups, theme_of

WORLDS_MAX = 1000
"""Some are caught in one world of a hundred; which ones changes with every file call."""

Patch = pytest.MonkeyPatch
Plant = Callable[[Patch], None]
Caught = type[Exception]
Worlds = Callable[[int], bool]
"""By seed."""


class Canary(NamedTuple):
    """A deliberate bug."""

    plant: Plant
    caught_by: tuple[Caught, ...]
    looks_at: Worlds
    """Only these worlds are looked at."""


CANARIES: dict[str, Canary] = {}


def every_world(seed: int) -> bool:
    return True


def worlds_of(theme: Theme) -> Worlds:
    return lambda seed: theme_of(seed) is theme


def canary(*caught_by: Caught, looks_at: Worlds = every_world) -> Callable[[Plant], Plant]:
    def add(plant: Plant) -> Plant:
        CANARIES[plant.__name__] = Canary(plant, caught_by, looks_at)
        return plant

    return add


@canary(Violation)
def the_message_log_is_not_synced(patch: Patch) -> None:
    """I3"""
    patch.setattr(SimulatedFile, "pwrite_durable", SimulatedFile.pwrite)


@canary(Violation, DamageError)
def nothing_is_ever_synced(patch: Patch) -> None:
    """I3, I4, I6. Without its FORMAT file a server does not start."""
    patch.setattr(SimulatedFile, "fdatasync", lambda self: None)


@canary(Violation, DamageError)
def new_files_are_not_synced_into_their_directory(patch: Patch) -> None:
    """I6. Without its FORMAT file or its segments a server does not start."""
    original = server.SimulatedServer.__init__

    def init(self: Any, settings: Any, files: Any, *rest: Any, **named: Any) -> None:
        files.sync_directory = lambda path: None
        original(self, settings, files, *rest, **named)

    patch.setattr(server.SimulatedServer, "__init__", init)


@canary(Violation)
def the_checkpoint_comes_before_the_schedule_is_synced(patch: Patch) -> None:
    """I6"""
    original = Replay.checkpoint

    def checkpoint(self: Any) -> int:
        sync, self.schedule.sync = self.schedule.sync, lambda: None
        try:
            return original(self)
        finally:
            self.schedule.sync = sync
            sync()

    patch.setattr(Replay, "checkpoint", checkpoint)


@canary(DamageError)
def the_message_log_is_deleted_before_the_checkpoint(patch: Patch) -> None:
    """I6. A server does not start where records are missing between the two."""
    original = Replay.file

    def file(self: Any, batch: Any, now_ms: int) -> Filed:
        filed = original(self, batch, now_ms)
        self._message_log.delete_through(filed.last_seq)
        return filed

    patch.setattr(Replay, "file", file)


@canary(Violation)
def a_publish_is_answered_before_it_is_durable(patch: Patch) -> None:
    """I3"""
    original = Groups.flush

    def flush(self: Any, now_ms: int, **how: Any) -> None:
        group = self._sequencer.group
        original(self, now_ms, **how)
        if self._committing is group:
            for waiter in group.waiters:
                waiter(None)

    patch.setattr(Groups, "flush", flush)


@canary(Violation)
def the_dispatch_logs_of_older_hours_are_forgotten(patch: Patch) -> None:
    """I4, I13"""
    original = Loader._read_dispatch

    def read_dispatch(self: Any, hour: int, *rest: Any) -> None:
        if hour >= max(self._dispatch.buckets(), default=hour):
            original(self, hour, *rest)

    patch.setattr(Loader, "_read_dispatch", read_dispatch)


@canary(Violation)
def leases_are_forgotten_at_a_planned_stop(patch: Patch) -> None:
    """I4"""
    patch.setattr(carried_leases, "take_over", lambda *arguments: None)


@canary(Violation)
def a_planned_stop_is_taken_for_a_kill(patch: Patch) -> None:
    """I4"""
    patch.setattr(LeasesFile, "keep", lambda self, kept: None)


@canary(Violation)
def a_lease_ends_soon_after_a_planned_restart(patch: Patch) -> None:
    """I4"""
    original = Leases.restore

    def restore(self: Any, deliveries: Any, pulls: Any, leases: Any) -> None:
        leases["left_ms"] = 1
        original(self, deliveries, pulls, leases)

    patch.setattr(Leases, "restore", restore)


@canary(Violation)
def hours_are_loaded_before_the_replay_has_ended(patch: Patch) -> None:
    """I11"""
    original = recovery.recover

    def recover(catalog: Any, log: Any, replay: Any, settler: Any, loader: Any, **rest: Any) -> Any:
        recovery._cut_schedule(replay.schedule, replay)
        early = replay.snapshot((rest["now_ms"] + rest["lead_ms"]) // HOUR_MS)
        recovered = original(catalog, log, replay, settler, loader, **rest)
        names = {number: name for name, number in recovered.subjects.items()}
        recovered.loaded = [loader.load(part, recovered.registry, names) for part in early]
        return recovered

    patch.setattr(store, "recover", recover)


@canary(Violation)
def schedule_files_are_not_cut_back(patch: Patch) -> None:
    """I7: what was filed and not covered by a checkpoint stays, and is filed behind it again."""
    append = HourLog.append

    def behind(self: Any, hour: int, *parts: bytes, offset: int, **rest: Any) -> tuple[int, int]:
        return append(self, hour, *parts, offset=max(offset, self.size(hour)), **rest)

    patch.setattr(recovery, "_cut_schedule", lambda schedule, replay: None)
    patch.setattr(HourLog, "append", behind)


@canary(Violation)
def a_failed_sync_is_tried_again(patch: Patch) -> None:
    """I9: the second one succeeds, and what the first one lost is lost."""
    original = HourLog.sync

    def sync(self: Any) -> None:
        try:
            original(self)
        except SyncError:
            original(self)

    patch.setattr(HourLog, "sync", sync)


@canary(Violation)
def messages_fire_a_millisecond_early(patch: Patch) -> None:
    """I1"""
    original = Wheel.advance

    def advance(self: Any, now_ms: int, **rest: Any) -> Any:
        return original(self, now_ms + 1, **rest)

    patch.setattr(Wheel, "advance", advance)


@canary(Violation)
def overdue_messages_fire_in_any_order(patch: Patch) -> None:
    """I13"""
    original = Wheel.advance
    patch.setattr(Wheel, "advance", lambda self, *a, **k: original(self, *a, **k)[::-1])


@canary(Violation)
def the_ack_is_answered_before_it_is_synced(patch: Patch) -> None:
    """I4"""
    patch.setattr(Settler, "sync", lambda self: setattr(self, "unsynced", False))


@canary(Violation)
def the_settler_writes_nothing(patch: Patch) -> None:
    """I4"""
    patch.setattr(Settler, "write", lambda self, rows_by_hour, now_ms: rows_by_hour.clear())


@canary(Violation)
def torn_tails_of_dispatch_logs_are_left(patch: Patch) -> None:
    """I4, I8"""
    patch.setattr(Settler, "recover", lambda self, hours: [])


@canary(Violation)
def cancelled_rows_that_come_late_are_not_left_out(patch: Patch) -> None:
    """I5"""

    def removed_among(self: Any, hour: int, rows: Any) -> Any:
        return rows["seq"] == 0

    patch.setattr(Engine, "_removed_among", removed_among)


@canary(Violation)
def a_cancelled_row_stays_in_the_wheel(patch: Patch) -> None:
    """I5"""
    patch.setattr(Messages, "_take_out", lambda self, entry: None)


@canary(Violation)
def a_cancel_gives_the_key_back(patch: Patch) -> None:
    """I5: a publish that comes behind the cancel of its repetition fires."""
    original = Publishing.holder_of_key

    def holder_of_key(self: Any, key_hash: bytes, now_ms: int) -> Any:
        found = original(self, key_hash, now_ms)
        if found is not None:
            located = self._messages.locate(found.seq, found.due_ms)
            if located.state is State.CANCELLED:
                return None
        return found

    patch.setattr(Publishing, "holder_of_key", holder_of_key)


@canary(Violation, AssertionError)
def rows_of_many_cancels_stay_in_the_wheel(patch: Patch) -> None:
    """I5. They fire, or are counted down twice."""
    original = Wheel.remove_many

    def remove_many(self: Any, hour: int, seqs: Any, dues_ms: Any) -> Any:
        rows, which = original(self, hour, seqs, dues_ms)
        self.insert(hour, rows)
        return rows, which

    patch.setattr(Wheel, "remove_many", remove_many)


@canary(Violation)
def many_cancels_are_answered_but_not_recorded(patch: Patch) -> None:
    """I5"""
    patch.setattr(Sequencer, "append_cancels", lambda self, seqs, dues_ms: None)


@canary(Violation)
def a_rolled_back_group_of_many_cancels_is_not_undone(patch: Patch) -> None:
    """I3"""
    patch.setattr(Overlay, "put_many", _without_undo(Overlay.put_many))


def _without_undo(original: Callable[..., Any]) -> Callable[..., Callable[[], None]]:
    def put_many(self: Any, last_seq: int, values: Any) -> Callable[[], None]:
        original(self, last_seq, values)
        return lambda: None

    return put_many


@canary(Violation)
def hours_retire_too_early(patch: Patch) -> None:
    """I3"""

    def pop_settled(self: Any, now_ms: int, next_seq: int, filed_seq: int) -> list[int]:
        over = [hour for hour in self._unsettled if (hour + 1) * HOUR_MS <= now_ms]
        return [hour for hour in over if hour not in self.loading]

    patch.setattr(Hours, "pop_settled", pop_settled)


@canary(Violation)
def a_load_does_not_make_its_hours_live(patch: Patch) -> None:
    """I3: what is filed next after a snapshot is neither in it nor in the wheel."""
    snapshot_of, file_all = Replay.snapshot, Replay.file

    def snapshot(self: Any, through_hour: int) -> list[Snapshot]:
        if self.live_through_hour >= 0:
            self.live_before = self.live_through_hour
        return snapshot_of(self, through_hour)

    def file(self: Any, batch: Any, now_ms: int) -> Filed:
        live = self.live_through_hour
        self.live_through_hour = vars(self).pop("live_before", live)
        try:
            return file_all(self, batch, now_ms)
        finally:
            self.live_through_hour = live

    patch.setattr(Replay, "snapshot", snapshot)
    patch.setattr(Replay, "file", file)


@canary(Violation)
def a_retry_is_settled_before_it_is_durable(patch: Patch) -> None:
    """I3"""
    original = Retries.retry

    def retry(self: Any, delivery: DueDelivery, *rest: Any) -> None:
        row = delivery.entry
        self._dispatcher.settling.settle(delivery, 1, rest[1])
        self._hours.add(row.hour, 1)
        original(self, delivery, *rest)

    patch.setattr(Retries, "retry", retry)


@canary(Violation)
def files_are_not_closed_when_they_are_deleted(patch: Patch) -> None:
    """I8: a reader would take the bytes of a deleted file for those of its successor."""
    patch.setattr(BodyReader, "release", lambda self, hours: None)


@canary(Violation)
def an_old_file_is_never_deleted(patch: Patch) -> None:
    """Nothing may be left over."""
    patch.setattr(HourLog, "delete", lambda self, hour: None)


@canary(Violation)
def a_failed_delivery_is_forgotten(patch: Patch) -> None:
    """I3"""
    patch.setattr(Settling, "return_delivery", lambda self, delivery, next_attempt: None)
    patch.setattr(Settling, "return_leased", lambda self, *rest, **named: None)


@canary(Violation)
def a_heartbeat_ends_and_publishes_nothing(patch: Patch) -> None:
    """I3"""
    patch.setattr(Publishing, "publish_sealed", lambda self, *rest: 0)


@canary(Violation)
def a_heartbeat_that_fired_is_not_ended(patch: Patch) -> None:
    """I4: after a crash it fires again."""

    def end(self: Any, key: str, *, message_seq: int) -> None:
        self._set(key, None)

    patch.setattr(Heartbeats, "_end", end)


@canary(Violation)
def a_run_is_made_and_not_recorded(patch: Patch) -> None:
    """I4: after a crash it is made again."""

    def publish_run(self: Any, subject_id: int, payload: Payload, due_ms: int) -> Any:
        message = NewMessage(
            self._sequencer.subject_names[subject_id],
            due_ms,
            msgspec.structs.replace(payload, run=None),
        )
        key_hash = self._messages.key_hash(subject_id, payload.key)
        return self._accept(message, subject_id, key_hash, encode_payload(message.payload))

    patch.setattr(Publishing, "publish_run", publish_run)


@canary(Violation)
def a_run_is_recorded_and_not_made(patch: Patch) -> None:
    """I3"""

    def publish_run(self: Any, subject_id: int, payload: Payload, due_ms: int) -> Any:
        run = payload.run
        assert run is not None
        change = ScheduleChange(run.schedule, None, run.state)
        sealed = seal(pack_schedule_change(change))
        seq = self._sequencer.append(RecordKind.SCHEDULE, payload=sealed)
        return Accepted("", due_ms, False, self._sequencer.group, seq)

    patch.setattr(Publishing, "publish_run", publish_run)


@canary(Violation)
def the_next_run_is_counted_from_now(patch: Patch) -> None:
    """I3: what is late skips what comes."""
    original = Scheduling._run

    def run(self: Any, known: Any, planned_ms: int, following: Planned, *, due_ms: int) -> Any:
        following = known.definition.following(max(planned_ms, due_ms))
        return original(self, known, planned_ms, following, due_ms=due_ms)

    patch.setattr(Scheduling, "_run", run)


@canary(Violation)
def a_clock_that_is_set_back_is_waited_for(patch: Patch) -> None:
    """I3: a schedule stands still until the clock shows again what it has shown."""
    patch.setattr(scheduling, "set_back", lambda schedule, state, now_ms: None)


@canary(Violation)
def what_ran_before_the_clock_was_set_back_runs_again(patch: Patch) -> None:
    """I4"""
    patch.setattr(
        scheduling, "behind", lambda schedule, state, time_ms: schedule.following(time_ms)
    )


def in_another_group(publishing: Any) -> None:
    """What comes now is another frame than what came before."""
    groups = publishing._groups
    groups._full.append(groups._sequencer.close_group(0))
    groups.wake()


@canary(Violation)
def positions_are_recorded_apart_from_their_messages(patch: Patch) -> None:
    """I4: a crash between the two, and the messages are published again."""
    original = Publishing.publish_taken

    def publish_taken(self: Any, subject_id: int, messages: Any, more_bytes: int) -> None:
        original(self, subject_id, messages, more_bytes)
        if messages:
            in_another_group(self)

    patch.setattr(Publishing, "publish_taken", publish_taken)


@canary(Violation)
def positions_are_recorded_before_their_messages(patch: Patch) -> None:
    """I3: a crash between the two, and the messages are never published."""
    original = Sourcing.take

    def take(self: Any, *rest: Any) -> Any:
        publishing, late = self._publishing, []
        publish = publishing.publish_taken
        publishing.publish_taken = lambda *arguments: late.append(arguments)
        try:
            group = original(self, *rest)
        finally:
            publishing.publish_taken = publish
        for arguments in late:
            in_another_group(publishing)
            publish(*arguments)
        return group

    patch.setattr(Sourcing, "take", take)


@canary(Violation)
def positions_are_forgotten_at_a_checkpoint(patch: Patch) -> None:
    """I6"""
    original = named_writes

    def writes(tables: Any, name: str, definition: bytes | None, state: bytes | None) -> Any:
        is_kept = state is None or definition is not None
        return original(tables, name, definition, state) if is_kept else ()

    patch.setattr("delayserver.parts.sources.part.named_writes", writes)


@canary(Violation)
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


@canary(Violation)
def an_event_is_answered_before_its_cancels_are_durable(patch: Patch) -> None:
    """I5"""
    original = Events.complete

    def complete(self: Any, *rest: Any) -> Any:
        done = original(self, *rest)
        done.group = None
        return done

    patch.setattr(Events, "complete", complete)


@canary(Violation)
def watch_keys_are_forgotten_at_a_checkpoint(patch: Patch) -> None:
    """I6"""
    patch.setattr(Effects, "_note_watches", lambda self, *rest: None)


@canary(Violation)
def watch_keys_are_never_purged(patch: Patch) -> None:
    """Nothing may be left over."""
    patch.setattr(Purge, "_purge_watches", lambda self, *rest: None)


@canary(Violation)
def two_events_fire_a_message_twice(patch: Patch) -> None:
    """An event counts a message once."""

    def state(self: Any, watcher: Any) -> State:
        return State(self._messages.locate(watcher.seq, watcher.due_ms).state)

    patch.setattr(Events, "_state", state)


@canary(Violation)
def staged_files_are_deleted_before_the_checkpoint(patch: Patch) -> None:
    """I7"""
    original = Replay.file_import

    def file_import(self: Any, now_ms: int) -> Filed:
        filed = original(self, now_ms)
        while self._imported:
            self._staging.delete(self._imported.pop()[1])
        return filed

    patch.setattr(Replay, "file_import", file_import)


@canary(Violation)
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


@canary(Violation)
def keys_that_are_committed_during_a_merge_are_forgotten(patch: Patch) -> None:
    """I3: the table is emptied, and the new run does not have them."""
    original = TieredCatalog._finish

    def finish(self: Any, merge: Any) -> None:
        merge.since.clear()
        original(self, merge)

    patch.setattr(TieredCatalog, "_finish", finish)


@canary(Violation)
def a_run_of_a_commit_stands_behind_what_the_table_had(patch: Patch) -> None:
    """I3: a publish with the key of an imported message would be answered with that before it."""
    original = TieredCatalog._as_run

    def as_run(self: Any, pairs: Any, parts: Any) -> Any:
        return original(self, pairs, parts)[0], []

    patch.setattr(TieredCatalog, "_as_run", as_run)


@canary(Violation)
def a_key_that_was_removed_is_found_in_an_older_run(patch: Patch) -> None:
    """I3: a publish would be answered with the id of a message that is gone."""

    def commit(self: Any, writes: Any, many: Any = None) -> None:
        self.inner.commit(writes, many)
        if self._merge is not None:
            pairs = [pair for pair in writes.get(Table.KEYS, ()) if pair[1] is not None]
            self._merge.since += [*_as_columns(pairs), *(many or {}).get(Table.KEYS, ())]

    patch.setattr(TieredCatalog, "commit", commit)


@canary(DamageError)
def a_key_run_is_named_before_it_is_synced(patch: Patch) -> None:
    """I6. A server does not start on a run that is not what the catalog says."""
    original = RunWriter.finish

    def finish(self: Any) -> RunState:
        sync, SimulatedFile.fdatasync = SimulatedFile.fdatasync, lambda self: None  # type: ignore[method-assign]
        try:
            return original(self)
        finally:
            SimulatedFile.fdatasync = sync  # type: ignore[method-assign]

    patch.setattr(RunWriter, "finish", finish)


@canary(Violation)
def the_keys_of_an_import_are_not_seen_until_it_is_filed(patch: Patch) -> None:
    """I3"""
    patch.setattr(ImportedKeys, "get", lambda self, key_hash: None)


@canary(Violation)
def what_changed_since_the_look_up_is_not_looked_at(patch: Patch) -> None:
    """I3"""
    patch.setattr(Imports, "_decide_changed", lambda self, adoption, verified: None)


@canary(Violation)
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


@canary(Violation)
def an_import_is_answered_before_it_is_durable(patch: Patch) -> None:
    """I3"""
    original = Imports._decide

    def decide(self: Any) -> None:
        adoption = self._current
        original(self)
        if adoption.shown.first_seq:
            self._answer(adoption, None)

    patch.setattr(Imports, "_decide", decide)


@canary(Violation)
def rows_that_were_left_out_are_filed(patch: Patch) -> None:
    """I7"""
    original = Expansion.__init__

    def init(self: Any, *rest: Any) -> None:
        original(self, *rest)
        self._duplicates = self._duplicates[:0]

    patch.setattr(Expansion, "__init__", init)


@canary(Violation)
def an_import_is_adopted_again(patch: Patch) -> None:
    """I4"""
    patch.setattr(Imports, "state", lambda self, import_id: raise_not_found())


@canary(Violation)
def a_subscription_goes_by_the_clock_alone(patch: Patch) -> None:
    """I3"""

    def spans(self: Subscription) -> tuple[SubjectSpan, ...]:
        return (SubjectSpan(self.subject, 0, (Mark(SEQ_MAX, self.created_ms),)),)

    patch.setattr(Subscription, "spans", property(spans))


@canary(Violation)
def what_fired_before_the_clock_was_set_back_is_forgotten(patch: Patch) -> None:
    """I4"""

    def advance(self: Any, seq: int, before_ms: int) -> None:
        self._marks = [Mark(seq, before_ms)]

    patch.setattr(Horizon, "advance", advance)


@canary(Violation)
def lengths_of_time_are_counted_on_the_clock_without_its_steps(patch: Patch) -> None:
    """I1. The steps are known when the server looks at the clock; somebody calls before."""
    init, tick = shard.Shard.__init__, server.SimulatedServer.tick

    def begin(self: Any, settings: Any, files: Any, catalog: Any, given: Any) -> None:
        self.clock, self.known_ms, self.shown_ms = given.clock, 0, 0
        self.steps_ms = lambda: given.clock() - given.stopwatch()
        self.known_ms = self.steps_ms()

        def stopwatch() -> int:
            self.shown_ms = max(self.shown_ms, given.clock() - self.known_ms)
            return self.shown_ms

        init(self, settings, files, catalog, replace(given, stopwatch=stopwatch))

    def look(self: Any) -> int:
        self.known_ms = self.steps_ms()
        return tick(self)

    patch.setattr(shard.Shard, "__init__", begin)
    patch.setattr(server.SimulatedServer, "tick", look)


@canary(Violation, looks_at=worlds_of(Theme.SET_BACK))
def rates_are_counted_on_the_clock(patch: Patch) -> None:
    """I1. A queue stands still for an hour, if the clock is set back by one."""
    original = Queues.__init__

    def init(self: Any, *rest: Any, **named: Any) -> None:
        original(self, *rest, **named)
        self.stopwatch = lambda: self.now_ms

    patch.setattr(Queues, "__init__", init)


def raise_not_found() -> None:
    raise NotFoundError("planted")


@canary(Violation)
def an_hour_is_deleted_that_nobody_has_archived(patch: Patch) -> None:
    """Of the setting archive."""
    patch.setattr(Archives, "lets_go", lambda self, hour: True)


@canary(Violation, looks_at=worlds_of(Theme.SET_BACK))
def an_archive_counts_for_more_than_it_covers(patch: Patch) -> None:
    """Of the setting archive."""
    original = Archives.confirm

    def confirm(self: Any, hour: int, archived: Archived) -> None:
        if hour in self._hours:
            extent = extent_of(self._hours[hour], self._dispatch.size(hour))
            archived = Archived(*extent, self._hours[hour].entries, "", "", 0)
        original(self, hour, archived)

    patch.setattr(Archives, "confirm", confirm)


@canary(Violation)
def an_archive_is_answered_before_it_is_durable(patch: Patch) -> None:
    """I6"""
    original = Archives.confirm

    def confirm(self: Any, hour: int, archived: Archived) -> None:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(self, "_checkpoint", lambda: None)
            original(self, hour, archived)

    patch.setattr(Archives, "confirm", confirm)


# The definitions log


@canary(Violation)
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


@canary(Violation)
def the_definitions_log_is_not_cut_back(patch: Patch) -> None:
    """I7. What no checkpoint covers would count without a catalog."""

    def resume(self: Any, place: Any) -> None:
        self._committed = self._recorded = place

    patch.setattr(DefinitionsLog, "resume", resume)


@canary(Violation)
def a_rewritten_definitions_log_replaces_the_old_one_before_it_is_synced(patch: Patch) -> None:
    """I6"""
    patch.setattr(DefinitionsLog, "_rewrite", _without_syncs(DefinitionsLog._rewrite))


@canary(Violation)
def no_descriptor_on_the_event_loop_ends_the_server(patch: Patch) -> None:
    """What is used up for a time is waited for, by those who may wait."""

    def read_now(self: Any, hour: int, offset: int, length: int) -> bytes | None:
        file = self._file(hour)
        return file.pread_now(length, offset) if file else None

    patch.setattr(HourLog, "read_now", read_now)


@canary(Violation, looks_at=worlds_of(Theme.REDEFINED))
def a_pause_is_made_of_the_definition_in_force(patch: Patch) -> None:
    """I3: what is being deleted or changed meanwhile is as it was again."""

    def pause(self: Any, subscription_id: int, reason: str) -> Any:
        in_force = self._registry.by_id(subscription_id)
        if in_force is None or in_force.paused:
            return None
        paused = msgspec.structs.replace(in_force, paused=True, pause_reason=reason)
        return self.put_subscription(paused)

    patch.setattr(Subscribing, "pause", pause)


@canary(Violation)
def a_redrive_takes_what_dies_again_meanwhile(patch: Patch) -> None:
    """I3: it does not end while the receiver refuses."""
    original = RedriveCalls._some_letters

    def some_letters(self: Any, owner: Any, from_seq: int, end_seq: int, *rest: Any) -> Any:
        return original(self, owner, from_seq, SEQ_MAX, *rest)

    patch.setattr(RedriveCalls, "_some_letters", some_letters)


@canary(Violation)
def a_replay_is_answered_before_it_is_durable(patch: Patch) -> None:
    """I3"""

    async def replay(self: Any, found: Any, subscription_ids: Any) -> Any:
        receivers, _ = self._engine.redriving.replay(found, subscription_ids, self._shard.clock())
        return [self._engine.registry.by_id(one) for one in receivers]

    patch.setattr(RedriveCalls, "replay", replay)


@canary(Violation)
def a_deleted_subscription_takes_its_dead_letters_along(patch: Patch) -> None:
    """I3"""
    patch.setattr(redrive_calls, "read_dead_letter_owners", lambda catalog, name: [])


@canary(Violation)
def a_consumer_that_hangs_up_uses_up_an_attempt(patch: Patch) -> None:
    """I3: a message would be dead though nobody was sent it."""
    original = Settling.return_leased

    def return_leased(
        self: Any, deliveries: Any, which: Any, attempts_used: int = 1, **named: Any
    ) -> None:
        original(self, deliveries, which, **named)

    patch.setattr(Settling, "return_leased", return_leased)


# A delivery that waits for a connection


@canary(Violation)
def a_delivery_is_not_checked_when_it_begins(patch: Patch) -> None:
    """I5: a pause, another URL and a time to live do not hold for what waits for a connection."""

    def may_begin(self: Any, subscription: Any, deliveries: Any, now_ms: int) -> bool:
        queue = self._queues.get(subscription.id)
        if queue is not None:
            queue.begin([one.entry.seq for one in deliveries], self._queues.stopwatch())
        return True

    patch.setattr(Pushes, "may_begin", may_begin)


@canary(Violation)
def a_rate_is_spent_when_rows_leave_their_queue(patch: Patch) -> None:
    """More than the burst begins at once when connections come after a while."""
    patch.setattr(TokenBucket, "reserve", TokenBucket.take)
    patch.setattr(TokenBucket, "spend", lambda self, count, now_s: None)
    patch.setattr(TokenBucket, "release", TokenBucket.give_back)


# Options of a message


@canary(Violation)
def a_message_is_delivered_after_its_time_to_live(patch: Patch) -> None:
    patch.setattr(Deliveries, "expired", lambda self, now_ms: np.empty(0, np.intp))


@canary(Violation)
def nobody_finds_out_when_rows_expire_that_wait(patch: Patch) -> None:
    patch.setattr(Looks, "for_deadlines", lambda self, queue: None)


@canary(Violation)
def a_message_that_was_filed_lives_for_ever(patch: Patch) -> None:
    patch.setattr(wheel_rows, "_ROUTE_BITS", np.zeros(256, np.uint32))


@canary(Violation)
def a_dead_letter_is_redriven_with_the_time_to_live_that_was_over(patch: Patch) -> None:
    def expires_ms(self: Any, due_ms: int) -> int | None:
        return due_ms + self.ttl_ms if self.ttl_ms else None

    patch.setattr(MessageOptions, "expires_ms", expires_ms)


@canary(Violation)
def rows_leave_in_the_order_in_which_they_came(patch: Patch) -> None:
    patch.setattr(ranks, "priority_of", lambda route: 0)


@canary(Violation)
def a_retry_loses_its_priority(patch: Patch) -> None:
    patch.setattr(retries, "row_flags", lambda payload: row_flags(payload) & 0x0F)


@canary(Violation)
def an_outcome_is_told_again_when_its_delivery_is_repeated(patch: Patch) -> None:
    def publish_outcome(self: Any, subject: str, payload: Any, sealed: bytes, now_ms: int) -> Any:
        subject_id = self._sequencer.subject_id(subject)
        key_hash = self._messages.key_hash(subject_id, payload.key)
        message = NewMessage(subject, now_ms, payload)
        return self._accept(message, subject_id, key_hash, sealed).group

    patch.setattr(Publishing, "publish_outcome", publish_outcome)


# ── groups ─────────────────────────────────────────────────────────────────────────────────────


@canary(Violation, looks_at=has_groups)
def the_head_of_a_group_is_forgotten_at_a_start(patch: Patch) -> None:
    patch.setattr(Dispatcher, "expect", lambda self, hour, rows: None)


@canary(Violation, looks_at=has_groups)
def the_next_of_a_group_does_not_wait(patch: Patch) -> None:
    patch.setattr(SingleFile, "_is_turn", lambda self, group, message_seq, seq: True)


@canary(Violation, looks_at=has_groups)
def a_retry_of_a_group_loses_its_place(patch: Patch) -> None:
    original = Settling.release_delivery

    def release_delivery(self: Any, delivery: DueDelivery) -> None:
        original(self, delivery)
        self.end_turn(delivery.subscription_id, (delivery.origin.message_seq,))

    patch.setattr(Settling, "release_delivery", release_delivery)


@canary(Violation, looks_at=has_groups)
def a_group_goes_in_the_order_of_its_seqs(patch: Patch) -> None:
    zeros = np.zeros_like
    patch.setattr(single_file, "orders_ms", lambda deliveries: zeros(deliveries.settled["due_ms"]))


@canary(Violation, looks_at=worlds_of(Theme.FAR))
def a_day_is_deleted_before_the_checkpoint_that_has_its_hours(patch: Patch) -> None:
    """I3, I6"""
    original = Purge.drop

    def drop(self: Any, day: int) -> None:
        original(self, day)
        self._schedule.delete(day)

    patch.setattr(Purge, "drop", drop)


@canary(Violation, looks_at=worlds_of(Theme.FAR))
def a_split_forgets_what_is_filed_meanwhile(patch: Patch) -> None:
    """I3"""
    original = Days.split

    def split(self: Any, day: int, file_hour: Any) -> Any:
        done, damage = original(self, day, file_hour)
        if done is None:
            self._hours[day].length = self._split.end
            done, _ = original(self, day, file_hour)
        return done, damage

    patch.setattr(Days, "split", split)


@canary(Violation, looks_at=worlds_of(Theme.FAR))
def half_a_split_counts_after_a_crash(patch: Patch) -> None:
    """I7: its rows would stand there twice."""
    original = Days.split

    def split(self: Any, day: int, file_hour: Any) -> Any:
        found = original(self, day, file_hour)
        if self._split is not None:
            self._hours.update(self._split.states)
        return found

    patch.setattr(Days, "split", split)
    patch.setattr(Replay, "checkpoint", _with_all_hours(Replay.checkpoint))


def _with_all_hours(checkpoint: Any) -> Any:
    def of_all(self: Any) -> int:
        self.effects.changed_hours.update(self.hours)
        return int(checkpoint(self))

    return of_all


@canary(Violation)
def what_is_due_soon_is_filed_by_day(patch: Patch) -> None:
    """I3: its hour is in the wheel already."""
    patch.setattr(Replay, "near_hour", lambda self, now_ms: now_ms // HOUR_MS - 48)


@canary(Violation)
def keys_go_with_an_hour_whose_retention_is_over(patch: Patch) -> None:
    """I3: the message of one that is published again within the dedupe window comes twice."""
    patch.setattr(Settings, "kept_ms", property(lambda self: self.retention_ms))


@canary(DiskError)
def a_bad_sector_ends_the_server(patch: Patch) -> None:
    """I8"""
    original = HourLog.read

    def read(self: Any, hour: int, offset: int, length: int) -> bytes:
        try:
            return original(self, hour, offset, length)
        except UnreadableError as error:
            raise DiskError("pread", error.path, error.cause) from error

    patch.setattr(HourLog, "read", read)


@pytest.mark.timeout(1200)
@pytest.mark.unchecked("a bug is planted")
@pytest.mark.parametrize("name", CANARIES)
def test_the_simulation_finds(name: str, monkeypatch: Patch) -> None:
    plant, caught_by, looks_at = CANARIES[name]
    plant(monkeypatch)
    caught = first_catch(name, filter(looks_at, range(WORLDS_MAX)), run_world, caught_by)
    assert caught is not None, f"nobody noticed that {name.replace('_', ' ')}"
    print(f"{name}: {caught}")


def test_a_canary_that_dies_of_itself_is_not_caught(monkeypatch: Patch) -> None:
    monkeypatch.setattr(Groups, "flush", lambda self: None)  # a signature that is out of date
    with pytest.raises(AssertionError, match="ended by a TypeError"):
        first_catch("none", range(1), run_world, (Violation,))


@pytest.mark.timeout(600)
def test_without_a_canary_nothing_is_found() -> None:
    """In the worlds that caught one: what ended them came from the bug. `test_simulation` looks at
    others."""
    seeds = every(4, sorted(caught_seeds(CANARIES)))
    assert first_catch("none", seeds, run_world, (Violation,)) is None


def test_the_evidence_lists_them() -> None:
    text = (Path(__file__).parents[1] / "EVIDENCE.md").read_text()
    table = text.partition("\n## Canaries\n")[2].partition("\n### Of a shard with replicas")[0]
    listed = dict(re.findall(r"^\| ([a-z ]+) \| .*\| (.+) \|$", table, re.MULTILINE))
    names: dict[Caught, str] = {Violation: "violation"}
    assert {name: by for name, by in listed.items() if by != "own check"} == {
        name.replace("_", " "): " or ".join(names.get(one, f"`{one.__name__}`") for one in by)
        for name, (_, by, _) in CANARIES.items()
    }
