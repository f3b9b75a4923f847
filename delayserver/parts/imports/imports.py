"""Imports: adopting the staged rows of a bulk load, all or nothing.

    adopt ─▶ verify (importer.py, on its thread: checksums, sync, which keys the catalog has)
          ─▶ decide the keys that were found, some per turn of the event loop
          ─▶ just before a group is closed: changes since, then one IMPORT record ─▶ durable
          ─▶ filed slice by slice, behind a checkpoint ─▶ adopted

Until the record is durable nothing of the import counts; from then on everything does, whatever
crashes. One import is decided and filed at a time; others wait for it. While one is being decided
the overlays keep every change, so that nothing falls between the look-up in the catalog and the
decision.

Cost: the event loop sees the keys that are taken, 500 per turn, and arrays for all others.
Threads: belongs to the event loop.
"""

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

import msgspec
import numpy as np

from delayserver.decisions.group import Group
from delayserver.decisions.imported_keys import ImportedKeys
from delayserver.errors import (
    ConflictError,
    DiskReserveError,
    InputError,
    NotFoundError,
    OverloadedError,
    StoppingError,
    TooLargeError,
)
from delayserver.parts.imports.importer import Verified, VerifyRequest
from delayserver.parts.part import Core
from delayserver.records.content import have_same_content
from delayserver.records.tables import (
    KeyEntry,
)
from delayserver.schedule.expansion import (
    DUPLICATE_DTYPE,
    ImportRecord,
    ImportState,
    import_key,
    unpack_import,
)
from delayserver.server.metrics import Metrics
from delayserver.times import format_duration
from storage.catalog import Table
from storage.errors import StagingError
from storage.frame import seal
from storage.staging import (
    OnConflict,
    manifest_path,
    parse_manifest_path,
)

DECIDE_KEYS = 500
DUPLICATES_MAX = 1_000_000
"""They stand in the record, 20 bytes each."""

Done = Callable[["Import | None", Exception | None], None]


class Stage(StrEnum):
    """How far an import is."""

    WAITING = "waiting"
    """Another one is being adopted."""
    VERIFYING = "verifying"
    COMMITTING = "committing"
    FILING = "filing"
    """It is durable, and on its way into the schedule log."""
    ADOPTED = "adopted"


@dataclass(slots=True)
class Import:
    """One import, as a client that asks sees it."""

    id: str
    stage: Stage
    count: int = 0
    duplicates: int = 0
    conflicts: int = 0
    """Those of the duplicates that have other content than the message that holds the key."""
    first_seq: int = 0
    done: int = 0
    """Rows verified, or filed."""


@dataclass(slots=True)
class _Adoption:
    """An import that a client waits for."""

    shown: Import
    done: list[Done]
    verified: Verified | None = None
    undecided: list[int] = field(default_factory=list)
    taken: dict[int, KeyEntry] = field(default_factory=dict)
    """Which message holds a key, by the key's index."""
    rolled_back_total: int = 0
    """The sequencer's count when the keys were decided."""


class Imports:
    """All imports."""

    not_understood = None
    """They are no definitions."""

    def __init__(self, core: Core) -> None:
        self._settings = core.settings
        self._catalog = core.catalog
        self._sequencer = core.sequencer
        self._groups = core.groups
        self._messages = core.messages
        self._publishing = core.publishing
        self._ports = core.ports
        self._on_decided = core.prune
        """Called when the overlays may forget again."""
        self._waiting: deque[_Adoption] = deque()
        self._current: _Adoption | None = None
        self.decide_keys = DECIDE_KEYS
        self.adopted_total = 0

    def connect(self, verify: Callable[[VerifyRequest], None]) -> None:
        """Have `verify` verify a staged import, and answer with `on_verified`; it does not wait."""
        self._verify = verify

    def add_metrics(self, metrics: Metrics) -> None:
        """Add the counter of imports."""
        metrics.counter("imports", "Imports adopted", lambda: self.adopted_total)

    # ── questions about imports ────────────────────────────────────────────────────────────────

    @property
    def is_deciding(self) -> bool:
        """Whether the overlays must keep their changes."""
        current = self._current
        return current is not None and current.shown.stage in (Stage.VERIFYING, Stage.COMMITTING)

    def begin(self, subjects: list[str]) -> tuple[dict[str, int], Group | None]:
        """The numbers of the subjects of an import, valid once the group is durable.

        Raises OverloadedError, StoppingError, DiskReserveError."""
        self._publishing.refuse_when_disk_is_low()
        self._groups.admit(0)
        self._publishing.admit_subjects(subjects)
        numbers = {name: self._sequencer.subject_id(name) for name in subjects}
        self._groups.wake()
        return numbers, self._groups.not_durable()

    def find(self, import_id: str) -> Import:
        """How far an import is. Raises NotFoundError."""
        for adoption in self._adoptions():
            if adoption.shown.id == import_id:
                return self._with_progress(adoption.shown)
        state = self.state(import_id)
        record = state.record
        duplicates = record.count - record.accepted
        return Import(
            import_id,
            Stage.ADOPTED,
            record.count,
            duplicates,
            record.conflicts,
            state.first_seq,
            record.count,
        )

    def state(self, import_id: str) -> ImportState:
        """The state of an adopted import. Raises NotFoundError."""
        value = self._catalog.get(Table.IMPORTS, import_key(import_id))
        if value is None:
            raise NotFoundError(
                f"no import {import_id!r} was adopted; "
                f"POST /v1/imports with its manifest ({manifest_path(import_id)}) adopts it"
            )
        try:
            return unpack_import(value)
        except (msgspec.DecodeError, ValueError) as error:
            raise ConflictError(
                f"the import {import_id!r} was adopted, and its record is not understood here "
                f"({error}): a newer server may have written it"
            ) from error

    def _with_progress(self, shown: Import) -> Import:
        if shown.stage is Stage.FILING:
            shown.done = max(0, min(self._groups.filed_seq - shown.first_seq + 1, shown.count))
        return shown

    def _adoptions(self) -> list[_Adoption]:
        return [*([self._current] if self._current else []), *self._waiting]

    def adopt(self, path: str, done: Done) -> None:
        """Adopt the import with this manifest; `done` is called once it is durable, or refused.

        An import that was adopted, or is being adopted, is not adopted again: the answer is the
        same. Raises InputError, OverloadedError, StoppingError, DiskReserveError."""
        import_id = parse_manifest_path(path)
        if import_id is None:
            raise InputError(
                f"a manifest is at {manifest_path('ID')}, below the data directory", "/manifest"
            )
        for adoption in self._adoptions():
            if adoption.shown.id == import_id:
                if adoption.shown.stage is Stage.FILING:
                    done(adoption.shown, None)
                else:
                    adoption.done.append(done)
                return
        try:
            done(self.find(import_id), None)
            return
        except NotFoundError:
            pass
        self._publishing.refuse_when_disk_is_low()
        self._groups.admit(0)
        if len(self._waiting) >= self._settings.imports_waiting_max:
            raise OverloadedError("too many imports wait for the one that is being adopted", 5000)
        self._waiting.append(_Adoption(Import(import_id, Stage.WAITING), [done]))
        self._next()

    # ── the way of one import ──────────────────────────────────────────────────────────────────

    def _next(self) -> None:
        if self._current is not None or not self._waiting:
            return
        adoption = self._current = self._waiting.popleft()
        shown = adoption.shown
        shown.stage = Stage.VERIFYING

        def progress(rows: int, count: int) -> None:
            shown.done, shown.count = rows, count
            if self._groups.stopping:
                raise StoppingError("the server is stopping")

        self._verify(VerifyRequest(shown.id, progress))

    def on_verified(self, verified: Verified | None, error: Exception | None) -> None:
        """The importer thread has verified the staged import, or failed with `error`."""
        adoption = self._current
        assert adoption is not None
        if verified is None:
            assert error is not None
            self._refuse(adoption, error)
            return
        try:
            self._check(verified)
        except Exception as refused:
            self._refuse(adoption, refused)
            return
        adoption.verified = verified
        adoption.shown.count = verified.manifest.count
        self._decide_known(adoption, verified)

    def _check(self, verified: Verified) -> None:
        """Whether it may be adopted at all; the keys are looked at later."""
        manifest, settings = verified.manifest, self._settings
        path = manifest_path(manifest.id)
        if manifest.count > settings.import_max_messages:
            raise TooLargeError(
                f"{manifest.count} messages in one import; at most {settings.import_max_messages} "
                "(import_max_messages); load the table in several parts",
                "/manifest",
            )
        if verified.last_due_ms > self._messages.advanced_ms + settings.delay_max_ms:
            limit = format_duration(settings.delay_max_ms)
            raise StagingError(path, f"a message is due later than in {limit} (delay_max_ms)")
        unknown = verified.subject_counts.keys() - self._sequencer.subject_names.keys()
        if unknown:
            raise StagingError(path, f"there are no subjects with the numbers {sorted(unknown)}")
        if self._ports.space_bytes() - manifest.total_bytes < settings.disk_reserve_bytes:
            raise DiskReserveError(
                f"the import needs {manifest.total_bytes} bytes, and then less than "
                f"{settings.disk_reserve_bytes} would be free (disk_reserve_bytes); free some space"
            )

    def _decide_known(self, adoption: _Adoption, verified: Verified) -> None:
        adoption.taken.clear()
        adoption.undecided = sorted(verified.known)
        adoption.rolled_back_total = self._sequencer.rolled_back_total
        self._decide_some()

    def _decide_some(self) -> None:
        adoption = self._current
        assert adoption is not None and adoption.verified is not None
        for index in adoption.undecided[: self.decide_keys]:
            self._decide_key(adoption, adoption.verified.keys, index)
        del adoption.undecided[: self.decide_keys]
        if adoption.undecided:
            self._ports.call_soon(self._decide_some)
        else:
            adoption.shown.stage = Stage.COMMITTING
            self._groups.decide_before_closing(self._decide)

    def _decide_key(self, adoption: _Adoption, keys: ImportedKeys, index: int) -> None:
        entry = self._publishing.holder_of_key(keys.hash_at(index), self._messages.advanced_ms)
        if entry is None:
            adoption.taken.pop(index, None)
        else:
            adoption.taken[index] = entry

    def _decide(self) -> None:
        """The group is about to be closed: decide, and append the record as its last."""
        adoption = self._current
        assert adoption is not None and adoption.verified is not None
        if adoption.rolled_back_total != self._sequencer.rolled_back_total:
            # Something that the decisions were built on has not happened.
            self._decide_known(adoption, adoption.verified)
            return
        try:
            self._groups.admit(0)
            self._publishing.refuse_when_disk_is_low()
            self._decide_changed(adoption, adoption.verified)
            record = self._record(adoption, adoption.verified)
        except Exception as error:
            self._refuse(adoption, error)
            return
        payload = seal(msgspec.msgpack.encode(record))
        keys, shown = adoption.verified.keys, adoption.shown
        self._groups.make_room(len(payload))
        shown.first_seq = self._sequencer.append_import(record.count, payload, keys)
        shown.duplicates = record.count - record.accepted
        shown.conflicts = record.conflicts
        group = self._sequencer.group
        accepted = self._accepted_by_subject(adoption.verified, adoption.taken)

        def durable(error: Exception | None) -> None:
            if error is not None:
                self._refuse(adoption, error)
                return
            shown.stage = Stage.FILING
            for subject_id, count in accepted.items():
                self._publishing.accepted_by_subject[subject_id] += count
            self.adopted_total += 1
            self._answer(adoption, None)
            self._on_decided()

        group.when_durable(durable)

    def _decide_changed(self, adoption: _Adoption, verified: Verified) -> None:
        """Earlier decisions may have changed since; the overlays have all changes."""
        fresh = verified.keys.find(self._sequencer.fresh_keys)
        again = set(fresh[fresh >= 0].tolist())
        has_changed = self._sequencer.has_fresh_change
        again |= {index for index, entry in verified.known.items() if has_changed(entry.seq)}
        for index in sorted(again):
            self._decide_key(adoption, verified.keys, index)

    def _record(self, adoption: _Adoption, verified: Verified) -> ImportRecord:
        """The record of the decisions. Raises ConflictError."""
        keys, repeats, taken = verified.keys, verified.repeats, adoption.taken
        indexes = np.array(sorted(taken), np.int64)
        entries = [taken[index] for index in indexes.tolist()]
        # A row that repeats a key stands for the same message as its first row. The first row's seq
        # is not known yet: it is counted from the import's own, which `seq` 0 says.
        seqs, due_ms = np.zeros(len(keys), np.uint64), keys.due_ms.copy()
        digests = keys.digests.copy()
        seqs[indexes] = np.array([entry.seq for entry in entries], np.uint64)
        due_ms[indexes] = np.array([entry.due_ms for entry in entries], np.int64)
        digests[indexes] = np.array([entry.digest for entry in entries], np.uint64)
        own = seqs[repeats.first] == 0
        duplicates = np.zeros(len(indexes) + len(repeats.rows), DUPLICATE_DTYPE)
        here, rest = duplicates[: len(indexes)], duplicates[len(indexes) :]
        here["row"], here["seq"], here["due_ms"] = (
            keys.rows[indexes],
            seqs[indexes],
            due_ms[indexes],
        )
        first_seq = np.uint64(self._sequencer.next_seq)
        rest["row"] = repeats.rows
        rest["seq"] = np.where(own, first_seq + keys.rows[repeats.first], seqs[repeats.first])
        rest["due_ms"] = due_ms[repeats.first]
        conflicts = int((~have_same_content(digests[indexes], keys.digests[indexes])).sum())
        conflicts += int((~have_same_content(repeats.digests, digests[repeats.first])).sum())
        if conflicts and verified.manifest.on_conflict == OnConflict.REFUSE:
            raise ConflictError(
                f"{conflicts} rows have keys that stand for messages with other content; "
                "nothing was adopted; load with --on-conflict keep to leave those rows out"
            )
        if len(duplicates) > DUPLICATES_MAX:
            raise ConflictError(
                f"{len(duplicates)} rows have keys that are taken, at most {DUPLICATES_MAX} may; "
                "most of the table seems to be there already: leave those rows out"
            )
        keys.leave_out(indexes)
        duplicates.sort(order="row")
        manifest = verified.manifest
        parts = [(part.file, part.bytes, part.count, part.checksum) for part in manifest.parts]
        return ImportRecord(manifest.id, manifest.count, parts, duplicates.tobytes(), conflicts)

    @staticmethod
    def _accepted_by_subject(verified: Verified, taken: dict[int, KeyEntry]) -> Counter[int]:
        subject_ids = verified.keys.subject_ids
        left_out = np.concatenate(
            [subject_ids[np.array(sorted(taken), np.int64)], subject_ids[verified.repeats.first]]
        )
        numbers, counts = np.unique(left_out, return_counts=True)
        return verified.subject_counts - Counter(
            dict(zip(numbers.tolist(), counts.tolist(), strict=True))
        )

    def prune(self, through_seq: int) -> None:
        """The catalog knows everything up to this seq: the next import may begin."""
        current = self._current
        if current is not None and current.shown.stage is Stage.FILING:
            shown = current.shown
            if through_seq >= shown.first_seq + shown.count - 1:
                self._current = None
                self._next()

    def _refuse(self, adoption: _Adoption, error: Exception) -> None:
        self._current = None
        self._answer(adoption, error)
        self._next()
        self._on_decided()

    def _answer(self, adoption: _Adoption, error: Exception | None) -> None:
        waiting, adoption.done = adoption.done, []
        adoption.verified = None
        for done in waiting:
            done(None if error is not None else adoption.shown, error)
