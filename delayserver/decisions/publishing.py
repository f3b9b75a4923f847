"""Publishing: which messages become records of the message log, under which seq and key.

    admit ──▶ is its key taken? ──no──▶ record, key, express way ──▶ the open group
                     └──yes──▶ the same content: its first answer again; else ConflictError

A request is accepted as a whole and in order, or not at all. A message whose key is taken is a
repeat: with the same content it gets the first answer again, with other content it is refused.
Neither writes a record.

There are two ways, with the same effect: one message as an object (`publish_one`), many as columns
(`publish_batch`; `publish_new` for messages of several connections, where all keys are new).
Columns cost more for up to four messages and a fifth for a thousand: docs/decisions/0024-lanes.md.

Cost: 3 µs, with a key 6 µs; as one of many 1 µs and 2 µs. Threads: belongs to the event loop.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import msgspec

from delayserver.config import Settings
from delayserver.decisions.group import Group
from delayserver.decisions.groups import Groups
from delayserver.decisions.messages import Messages, Versions
from delayserver.decisions.new_messages import (
    NewMessage,
    PublishBatch,
    SealedBatch,
    stored,
    with_traces,
)
from delayserver.decisions.packing import MESSAGE_ROW, Publishes
from delayserver.decisions.sequencer import Sequencer
from delayserver.decisions.watches import Watches
from delayserver.errors import (
    DiskReserveError,
    InputError,
    InputErrors,
    KeyConflictError,
    OverloadedError,
)
from delayserver.records.content import content_digest, has_content
from delayserver.records.ids import IdCodec, KeyHasher
from delayserver.records.message import (
    Payload,
    ScheduleEntry,
    State,
    encode_payload,
    option_flags,
    row_flags,
)
from delayserver.records.message_id import ID_BYTES
from delayserver.records.message_state import own_row
from delayserver.records.tables import KeyEntry, pack_key_values
from delayserver.schedule.wheel_rows import route_of
from delayserver.slices import Work, at_once
from storage.frame import seal
from storage.rows import FLAG_WATCHES, NO_KEY, RecordKind

NAMED_AT_ONCE: Final = 1000
"""If a batch has more new subjects, each is recorded on its own, between other works."""


class Accepted(msgspec.Struct):
    """The result of a publish. It may be told once `group` is durable (None: it is)."""

    message_id: str
    due_ms: int
    duplicate: bool
    group: Group | None
    seq: int


class AcceptedBatch(msgspec.Struct):
    """The results of a batch. They may be told once `group` is durable (None: it is)."""

    ids: bytes
    """The ids of all messages, ID_BYTES each."""
    duplicates: dict[int, Accepted]
    """The messages that were there already, by index."""
    group: Group | None
    last_seq: int
    """The highest of its messages."""


class Publishing:
    """How messages come in."""

    def __init__(
        self,
        settings: Settings,
        sequencer: Sequencer,
        groups: Groups,
        messages: Messages,
        watches: Watches,
        ids: IdCodec,
        key_hasher: KeyHasher,
    ) -> None:
        self._settings = settings
        self._sequencer = sequencer
        self._groups = groups
        self._messages = messages
        self._watches = watches
        self._ids = ids
        self._key_hasher = key_hasher
        self.disk_is_low = False
        self._naming = _Naming(sequencer, groups, settings.subjects_max)
        self.admit_subjects = self._naming.admit
        self.accepted_by_subject: defaultdict[int, int] = defaultdict(int)
        """How many since the start, by subject id."""

    @property
    def accepted_total(self) -> int:
        """Messages accepted since the start."""
        return sum(self.accepted_by_subject.values())

    def publish_one(self, message: NewMessage, now_ms: int) -> Accepted:
        """Accept a message.

        Raises KeyConflictError with the state of the message that holds its key, OverloadedError,
        DiskReserveError, StoppingError."""
        self.refuse_when_disk_is_low()
        sealed = encode_payload(message.payload)
        self._groups.admit(len(sealed))
        sequencer = self._sequencer
        subject_id = sequencer.subjects.get(message.subject)
        outcome_subjects = message.outcome_subjects()
        if subject_id is None or outcome_subjects:
            self.admit_subjects({message.subject, *outcome_subjects})
            subject_id = sequencer.subject_id(message.subject)
            self._number(outcome_subjects)
        key = message.payload.key
        if key is None:
            return self._accept(message, subject_id, NO_KEY, sealed)
        key_hash = self._key_hasher(subject_id, key)
        known = self.holder_of_key(key_hash, now_ms)
        if known is None:
            return self._accept(message, subject_id, key_hash, sealed)
        # Before anything is appended: a refusal leaves no trace in the group that others fill.
        if not has_content(known.digest, content_digest(message.payload, sealed), sealed):
            state = self._messages.locate(known.seq, known.due_ms).state
            raise KeyConflictError(_conflict(message.subject, key), state)
        return self._duplicate(known)

    def publish_batch(self, batch: PublishBatch, now_ms: int) -> AcceptedBatch:
        """As `publishing_batch`, at once."""
        return at_once(self.publishing_batch(batch, now_ms))

    def publishing_batch(self, batch: PublishBatch, now_ms: int) -> Work[AcceptedBatch]:
        """Accept all messages or none, in order. A long batch is made ready in slices, and decided
        at the moment behind them.

        Raises KeyConflictError (one message) or InputErrors (several) for keys that stand for other
        content, OverloadedError, DiskReserveError, StoppingError."""
        if len(batch) == 1:
            # Its conflict has a form of its own.
            one = self.publish_one(batch.message(0), now_ms)
            duplicates = {0: one} if one.duplicate else {}
            return AcceptedBatch(bytes.fromhex(one.message_id), duplicates, one.group, one.seq)
        self.refuse_when_disk_is_low()
        new = yield from SealedBatch.sealing(batch)
        self._admit(new)
        if (yield from self._naming.record(batch)):
            # The records of its own subjects are no sign of a slow disk.
            self._groups.make_room(new.total_bytes)
            self._admit(new)
        taken = {} if self._are_new_keys(new) else self._look_up_keys(batch, new, now_ms)
        return self._accept_some(new, taken) if taken else self._accept_all(new)

    def publish_new(self, batch: PublishBatch) -> AcceptedBatch | None:
        """Accept the messages of several requests at once, if all of their keys are new.

        None if one key may be taken: nothing was decided then. The caller asks for each request
        alone, so that none is refused for another's sake. Raises OverloadedError, DiskReserveError,
        StoppingError: nothing was decided either."""
        new = SealedBatch(batch)
        self._admit(new)
        return self._accept_all(new) if self._are_new_keys(new) else None

    def _admit(self, new: SealedBatch) -> None:
        """Refuse messages that something but their keys speaks against."""
        self.refuse_when_disk_is_low()
        self._groups.admit(new.total_bytes)
        self.admit_subjects({*new.batch.subjects, *new.batch.outcome_subjects()})

    def admit(self, subject: str, total_bytes: int) -> int:
        """Refuse a publish that cannot be accepted now; returns the number of the subject.

        The subject may be new. Raises OverloadedError, DiskReserveError, StoppingError."""
        self.refuse_when_disk_is_low()
        self._groups.admit(total_bytes)
        self.admit_subjects([subject])
        return self._sequencer.subject_id(subject)

    def publish_sealed(self, subject_id: int, sealed: bytes, now_ms: int) -> int:
        """Accept a message whose payload was made before, due now; returns its seq."""
        message = NewMessage("", now_ms, Payload(b""))
        return self._accept(message, subject_id, NO_KEY, sealed).seq

    def publish_run(self, subject_id: int, payload: Payload, due_ms: int) -> Accepted:
        """Accept a message that a schedule has made, under its key, whatever holds that."""
        sealed = encode_payload(payload)
        self._groups.make_room(len(sealed))
        key_hash = self._messages.key_hash(subject_id, payload.key)
        message = NewMessage("", due_ms, payload)
        return self._accept(message, subject_id, key_hash, sealed, RecordKind.RUN)

    def publish_outcome(
        self, subject: str, payload: Payload, sealed: bytes, now_ms: int
    ) -> Group | None:
        """Accept a message with the outcome of another, due now, unless there is one under its key.
        Nothing is refused; the caller has made room. Returns the group with which it is durable;
        None: it is."""
        subject_id = self._sequencer.subject_id(subject)
        key_hash = self._messages.key_hash(subject_id, payload.key)
        known = self._sequencer.key(key_hash)
        if known is not None:
            return self._groups.group_of(known.seq)
        return self._accept(
            NewMessage(subject, now_ms, payload), subject_id, key_hash, sealed
        ).group

    def _number(self, outcome_subjects: set[str]) -> None:
        """Give the subjects of messages with an outcome their numbers now: when there is an
        outcome, its subject cannot be refused for being one too many."""
        for name in sorted(outcome_subjects):
            self._sequencer.subject_id(name)

    def publish_taken(
        self, subject_id: int, messages: Sequence[NewMessage], more_bytes: int
    ) -> None:
        """Accept messages that a source has made, each under its key, whatever holds that.

        `more_bytes`: of a record that the caller puts behind them, into the same group. Raises
        OverloadedError, DiskReserveError, StoppingError: nothing was accepted then."""
        self.refuse_when_disk_is_low()
        sealed = [encode_payload(message.payload) for message in messages]
        rows_bytes = (len(sealed) + 1) * MESSAGE_ROW.size
        self._groups.admit(rows_bytes + sum(map(len, sealed)) + more_bytes)
        for message, payload in zip(messages, sealed, strict=True):
            key = message.payload.key
            key_hash = NO_KEY if key is None else self._key_hasher(subject_id, key)
            self._accept(message, subject_id, key_hash, payload)

    def refuse_when_disk_is_low(self) -> None:
        """Raise DiskReserveError while less than `disk_reserve_bytes` of the disk are free."""
        if self.disk_is_low:
            raise DiskReserveError(
                f"the disk of the data directory has less than "
                f"{self._settings.disk_reserve_bytes} bytes free (disk_reserve_bytes); "
                "free some space; what is stored is still being delivered"
            )

    def _are_new_keys(self, new: SealedBatch) -> bool:
        """Whether it is plain that no key of a batch is taken, or that there are no keys."""
        subjects, batch = self._sequencer.subjects, new.batch
        if not any(batch.keys):
            return True
        numbers = {name: subjects.get(name, 0) for name in set(batch.subjects)}
        if not all(numbers.values()):
            return False
        subject_ids = _numbers(numbers, batch.subjects)
        hashes = new.key_hashes = self._key_hasher.many(subject_ids, batch.keys)
        keyed = [one for one in hashes if one is not NO_KEY] if None in batch.keys else hashes
        return len(set(keyed)) == len(keyed) and not self._sequencer.has_any_key(keyed)

    def _look_up_keys(
        self, batch: PublishBatch, new: SealedBatch, now_ms: int
    ) -> dict[int, KeyEntry | int]:
        """The owners of the keys of a batch, by the index of the message that asks for the key: the
        entry of a message that is there, or the index of an earlier one of the batch.

        Raises InputErrors if a key stands for other content. Nothing was decided by then."""
        subjects = self._sequencer.subjects
        digests = new.digests()
        conflicts: list[InputError] = []
        taken: dict[int, KeyEntry | int] = {}
        first_of: dict[tuple[str, str], int] = {}
        for index, (subject, key) in enumerate(zip(batch.subjects, batch.keys, strict=True)):
            if key is None:
                continue
            first = first_of.setdefault((subject, key), index)
            if first != index:
                known = taken.get(first, first)
            elif (subject_id := subjects.get(subject)) is None:
                continue  # under a new subject no key is taken
            elif entry := self.holder_of_key(self._key_hasher(subject_id, key), now_ms):
                known = entry
            else:
                continue
            digest = known.digest if isinstance(known, KeyEntry) else digests[known]
            if not has_content(digest, digests[index], seal(new.payloads[index])):
                conflicts.append(InputError(_conflict(subject, key), f"/{index}/key"))
            taken[index] = known
        if conflicts:
            raise InputErrors(f"{len(conflicts)} keys stand for other content", conflicts)
        return taken

    def _accept_some(self, new: SealedBatch, taken: dict[int, KeyEntry | int]) -> AcceptedBatch:
        """Accept the new messages of a batch, and answer the others with the existing entries."""
        count = len(new.batch)
        fresh = [index for index in range(count) if index not in taken]
        ids = [b""] * count
        groups: list[Group] = []
        last_seq, place = 0, dict(zip(fresh, range(len(fresh)), strict=True))
        if fresh:
            accepted = self._accept_all(new.select(fresh))
            last_seq, groups = accepted.last_seq, [self._sequencer.group]
            for index, message_id in zip(fresh, _split(accepted.ids), strict=True):
                ids[index] = message_id
        first_seq = last_seq - len(fresh) + 1
        duplicates = {}
        for index, known in taken.items():
            if isinstance(known, KeyEntry):
                one = self._duplicate(known)
            else:
                due_ms, seq = new.batch.dues_ms[known], first_seq + place[known]
                one = Accepted(ids[known].hex(), due_ms, True, self._sequencer.group, seq)
            ids[index] = bytes.fromhex(one.message_id)
            duplicates[index] = one
            last_seq = max(last_seq, one.seq)
            groups += [one.group] if one.group is not None else []
        # Groups become durable in order: the last one that is not is the one to wait for.
        last = max(groups, key=lambda group: group.first_seq, default=None)
        return AcceptedBatch(b"".join(ids), duplicates, last, last_seq)

    def _accept_all(self, new: SealedBatch) -> AcceptedBatch:
        """Put records of all messages, which are new, into the open group."""
        sequencer, batch = self._sequencer, new.batch
        dues_ms, keys = batch.dues_ms, batch.keys
        if not dues_ms:
            return AcceptedBatch(b"", {}, None, 0)
        count = len(dues_ms)
        numbers = {name: sequencer.subject_id(name) for name in dict.fromkeys(batch.subjects)}
        self._number(batch.outcome_subjects())
        subject_ids = _numbers(numbers, batch.subjects)
        for subject_id, of_subject in Counter(subject_ids).items():
            self.accepted_by_subject[subject_id] += of_subject
        has_keys, has_watches = any(keys), any(batch.watches)
        hashes = new.key_hashes
        if has_keys and not hashes:
            hashes = self._key_hasher.many(subject_ids, keys)
        digests = new.digests() if has_keys else []
        publishes = Publishes(
            dues_ms,
            subject_ids,
            new.payloads,
            new.crcs,
            hashes,
            digests if has_keys else 0,
            flags=_flags(batch) if has_watches or batch.options else 0,
            subscription_ids=_direct_ids(batch),
        )
        if any(batch.traces):
            publishes = with_traces(new, publishes)
        first_seq = sequencer.append_publishes(publishes)
        last_seq = first_seq + count - 1
        seqs = range(first_seq, last_seq + 1)
        if has_keys:
            values = pack_key_values(seqs, dues_ms, digests)
            pairs = dict(zip(hashes, values, strict=True))
            pairs.pop(NO_KEY, None)
            sequencer.put_keys(last_seq, pairs)
        group = sequencer.group
        if has_watches:
            self._watches.add_many(group, zip(seqs, dues_ms, batch.watches, strict=True))
        routes = subject_ids
        if publishes.subscription_ids:
            routes = list(map(route_of, subject_ids, publishes.subscription_ids))
        self._messages.schedule_many(first_seq, dues_ms, routes, publishes.flags)
        return AcceptedBatch(self._ids.encode_many(dues_ms, seqs), {}, group, last_seq)

    def _duplicate(self, known: KeyEntry) -> Accepted:
        """The answer to a message that is there already."""
        due_ms = self._due_ms(known)
        # The due time may come from a move that is not durable yet. If the answer left before, and
        # the move were rolled back, the client would wait for a moment at which nothing fires.
        group = self._messages.group_of_change(known.seq) or self._groups.group_of(known.seq)
        message_id = self._ids.encode(known.due_ms, known.seq)
        return Accepted(message_id, due_ms, True, group, known.seq)

    def _accept(
        self,
        message: NewMessage,
        subject_id: int,
        key_hash: bytes,
        sealed: bytes,
        kind: RecordKind = RecordKind.PUBLISH,
    ) -> Accepted:
        """Put the record of a message, which is new, into the open group."""
        sequencer, due_ms, watch = self._sequencer, message.due_ms, message.payload.watch
        digest = 0 if key_hash is NO_KEY else content_digest(message.payload, sealed)
        flags, direct_id = row_flags(message.payload), message.payload.direct_id
        seq = sequencer.append(
            kind,
            due_ms=due_ms,
            key_hash=key_hash,
            subject_id=subject_id,
            subscription_id=direct_id,
            payload=stored(message, sealed),
            target_due_ms=digest,
            flags=flags,
        )
        if watch is not None:
            self._watches.add(sequencer.group, seq, due_ms, watch)
        if key_hash is not NO_KEY:
            sequencer.put_key(seq, key_hash, KeyEntry(seq, due_ms, digest))
        self._messages.schedule(seq, due_ms, route_of(subject_id, direct_id), flags)
        self.accepted_by_subject[subject_id] += 1
        return Accepted(self._ids.encode(due_ms, seq), due_ms, False, sequencer.group, seq)

    def holder_of_key(self, key_hash: bytes, now_ms: int) -> KeyEntry | None:
        """The message that holds a key, or None if a new message may have it.

        A message holds its key until the dedupe window after its due time, and as long as it waits
        or is being delivered. So does a message that was cancelled: a publish that a network or a
        node has held up may come behind the cancel, and must not fire (I5). A client that publishes
        again on purpose is told that it is cancelled, and replaces it (`replace`)."""
        entry = self._sequencer.key(key_hash)
        if entry is None:
            return None
        if self._due_ms(entry) + self._settings.dedupe_window_ms > now_ms:
            return entry
        located = self._messages.locate(entry.seq, entry.due_ms)
        return entry if located.state in (State.SCHEDULED, State.DELIVERING) else None

    def _due_ms(self, entry: KeyEntry) -> int:
        """When the message that a key stands for is due, or was."""
        first = ScheduleEntry(entry.seq, entry.due_ms)
        return own_row(first, self._sequencer.changes(entry.seq)).due_ms

    def replace(
        self,
        message: NewMessage,
        now_ms: int,
        *,
        expected: Versions = None,
        only_new: bool = False,
        leaves_due: bool = False,
    ) -> tuple[Accepted, bool]:
        """Publish a message under its key, in place of the one that waits under it, if one does.

        Both happen or neither. Returns the published message, and whether one was replaced. With
        `expected` one must wait, and be that version; with `only_new` none may wait or be on its
        way. With `leaves_due` one whose time has come is on its way, though it has not left yet:
        else replacements that are due at once, and come quicker than one of them can leave, would
        keep all of them from leaving. Raises PreconditionError, ConflictError with the state."""
        self.refuse_when_disk_is_low()
        key = message.payload.key
        assert key is not None
        if expected is not None or only_new:
            self._messages.check_under_key(message.subject, key, expected, only_new)
        sealed = encode_payload(message.payload)
        self._groups.admit(len(sealed))
        outcome_subjects = message.outcome_subjects()
        self.admit_subjects({message.subject, *outcome_subjects})
        subject_id = self._sequencer.subject_id(message.subject)
        self._number(outcome_subjects)
        key_hash = self._key_hasher(subject_id, key)
        entry = self._sequencer.key(key_hash)
        replaced = False
        due_after_ms = now_ms if leaves_due and expected is None else None
        if entry is not None and self._messages.is_cancellable(entry, due_after_ms):
            # In the group of the publish: after a crash both have happened, or neither.
            self._messages.cancel(entry.seq, entry.due_ms, subject=message.subject)
            replaced = True
        return self._accept(message, subject_id, key_hash, sealed), replaced


class _Naming:
    """Which new subjects are recorded, and that they do not become too many."""

    def __init__(self, sequencer: Sequencer, groups: Groups, subjects_max: int) -> None:
        self._sequencer = sequencer
        self._groups = groups
        self._subjects_max = subjects_max
        self._to_record = 0
        """Names that admitted batches will still add to the subjects."""

    def admit(self, names: Iterable[str]) -> None:
        """Raise OverloadedError if these subjects would be more than `subjects_max`."""
        known = self._sequencer.subjects
        new = {name for name in names if name not in known}
        if new and len(known) + self._to_record + len(new) > self._subjects_max:
            raise OverloadedError(
                f"there are {len(known)} subjects, and the limit is {self._subjects_max} "
                "(subjects_max); put what varies into the key or the body, not into the subject",
                60_000,
            )

    def record(self, batch: PublishBatch) -> Work[bool]:
        """Record the new subjects of a batch in slices, where they are many: that is as much work
        as the messages. Returns whether it took a while. A subject without messages costs nobody
        anything, if the batch is refused after all."""
        known = self._sequencer.subjects
        new = [name for name in dict.fromkeys(batch.subjects) if name not in known]
        if len(new) <= NAMED_AT_ONCE:
            return False
        left = len(new)
        self._to_record += left
        try:
            for name in new:
                if not self._groups.stopping:  # Else the caller refuses the batch.
                    self._sequencer.subject_id(name)
                self._to_record -= 1
                left -= 1
                yield 1
        finally:
            self._to_record -= left
        self._groups.wake()
        return True


def _numbers(numbers: Mapping[str, int], names: Sequence[str]) -> list[int]:
    """The number of each name; most batches are of one subject."""
    if len(numbers) == 1:
        return [*numbers.values()] * len(names)
    return [numbers[name] for name in names]


def _flags(batch: PublishBatch) -> list[int]:
    """The flags of each message's record."""
    flags = [FLAG_WATCHES * (watch is not None) for watch in batch.watches]
    if batch.options:
        for index, options in enumerate(batch.options):
            if options is not None:
                flags[index] |= option_flags(options)
    return flags


def _direct_ids(batch: PublishBatch) -> list[int]:
    """The receiver of each message (`Payload.direct_id`); empty where none names its address."""
    chosen = [None if options is None else options.to for options in batch.options]
    return [0 if to is None else to.subscription_id for to in chosen] if any(chosen) else []


def _split(ids: bytes) -> Iterable[bytes]:
    return (ids[at : at + ID_BYTES] for at in range(0, len(ids), ID_BYTES))


def _conflict(subject: str, key: str) -> str:
    return (
        f"the key {key!r} of subject {subject} stands for a message with other content; to publish "
        "in its place, replace it with PUT"
    )
