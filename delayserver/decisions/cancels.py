"""Cancels of many messages: the same decisions as one by one, in columns.

    ids, keys ──▶ seqs, due times ──▶ plain? ──yes─▶ rows out of the wheel, one array of records
                                             ──no──▶ Messages.cancel, one by one, in slices

A message is plain if it never changed, and its row waits for all subscriptions: in an hour that is
not loaded, not filed yet, or in the wheel. Those are nearly all. A message that was moved, is on
its way or has ended, or that stands in the request twice, is decided by `Messages`, so that every
answer is as definite as there (I5).

All plain messages are cancelled, or none. A server that is stopping, or whose disk does not keep
up, may refuse others after them: the answer names the result of each message.

Cost: 0.6 µs for each of 500, 1 µs more in a loaded hour and 2 µs more by key; 0.1 ms for a few
(one by one 11 µs, 25 µs in a loaded hour).
Threads: belongs to the event loop.
"""

from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from delayserver.decisions.groups import Groups
from delayserver.decisions.messages import Messages
from delayserver.decisions.packing import MESSAGE_ROW
from delayserver.decisions.sequencer import Sequencer
from delayserver.errors import ConflictError, DelayServerError, NotFoundError
from delayserver.records.ids import COLUMNS_MIN, IdCodec, KeyHasher
from delayserver.schedule.hours import Hours
from delayserver.schedule.wheel import Wheel
from delayserver.schedule.wheel_rows import ROUTE_NUMBER
from delayserver.slices import Work, at_once
from storage.errors import DamageError, StorageError
from storage.rows import HOUR_MS

HELD_MIN = 8
"""If more messages than this remain, the queues are asked once which of them they hold."""
OTHERS_TURN = 500
"""So many messages that are not plain are decided in one step."""
Refusal = ConflictError | DamageError | NotFoundError
"""Why there is no message to be cancelled."""
Refused = DelayServerError | StorageError
"""Why one of many messages was not cancelled."""


class FoundMessages(NamedTuple):
    """Messages that were asked for, as columns."""

    seqs: NDArray[np.uint64]
    """0: there is none."""
    dues_ms: NDArray[np.int64]
    """When it was due at publish."""
    refusals: dict[int, Refusal]
    """Why there is none, by index."""


def _nothing() -> FoundMessages:
    return FoundMessages(np.zeros(0, np.uint64), np.zeros(0, np.int64), {})


class Cancels:
    """Finds and cancels many messages."""

    def __init__(
        self,
        sequencer: Sequencer,
        groups: Groups,
        wheel: Wheel,
        hours: Hours,
        messages: Messages,
        ids: IdCodec,
        key_hasher: KeyHasher,
    ) -> None:
        self._sequencer = sequencer
        self._groups = groups
        self._wheel = wheel
        self._hours = hours
        self._messages = messages
        self._ids = ids
        self._key_hasher = key_hasher
        self.columns_min = COLUMNS_MIN

    def by_ids(self, texts: Sequence[str]) -> FoundMessages:
        """The messages that ids name."""
        if not texts:
            return _nothing()
        seqs, dues_ms = self._ids.decode_many(texts)
        seqs[seqs >= self._sequencer.next_seq] = 0
        refusals: dict[int, Refusal] = {
            index: NotFoundError(f"there is no message {texts[index][:64]!r}")
            for index in np.flatnonzero(seqs == 0).tolist()
        }
        return FoundMessages(seqs, dues_ms, refusals)

    def by_keys(self, subjects: Sequence[str], keys: Sequence[str]) -> FoundMessages:
        """The messages that keys of subjects stand for."""
        if not keys:
            return _nothing()
        numbers = self._sequencer.subjects
        # No message has subject 0, so nothing is found under its keys.
        subject_ids = [numbers.get(subject, 0) for subject in subjects]
        try:
            seqs, dues_ms = self._sequencer.under_keys(self._key_hasher.many(subject_ids, keys))
        except DamageError:
            # One of them is damaged: each is looked up alone.
            seqs, dues_ms = np.zeros(len(keys), np.uint64), np.zeros(len(keys), np.int64)
        refusals: dict[int, Refusal] = {}
        for index in np.flatnonzero(seqs == 0).tolist():
            try:
                _, dues_ms[index], seqs[index] = self._messages.by_key(subjects[index], keys[index])
            except (DamageError, NotFoundError) as error:
                refusals[index] = error
        return FoundMessages(seqs, dues_ms, refusals)

    def cancel(
        self,
        seqs: NDArray[np.uint64],
        dues_ms: NDArray[np.int64],
        subject_ids: NDArray[np.uint32],
    ) -> dict[int, Refused]:
        """As `cancelling`, without a pause."""
        return at_once(self.cancelling(seqs, dues_ms, subject_ids))

    def cancelling(
        self,
        seqs: NDArray[np.uint64],
        dues_ms: NDArray[np.int64],
        subject_ids: NDArray[np.uint32],
    ) -> Work[dict[int, Refused]]:
        """Cancel messages; why not, by index, if so. Those that are plain are cancelled in one
        step, then the others in slices, in order. None fires once the group that is open now, or
        the last one that is not, is durable (`Groups.not_durable`).

        `subject_ids`: for each its subject, 0 where the caller does not know it. Raises
        OverloadedError, StoppingError, StorageError: then none was cancelled. Once one was, such an
        error is that of the messages that it concerns."""
        refusals: dict[int, Refused] = {}
        lost: dict[int, Refused] = {}
        others = np.arange(len(seqs))
        kept: list[int] = []
        if len(seqs) >= self.columns_min:
            is_done = self._cancel_plain(seqs, dues_ms, subject_ids)
            others = np.flatnonzero(~is_done)
            if not len(others):
                return refusals
            kept = np.flatnonzero(is_done).tolist()
            self._when_lost(kept, lost)
        names = self._sequencer.subject_names
        has_begun = bool(kept)
        for start in range(0, len(others), OTHERS_TURN):
            if start or len(seqs) > OTHERS_TURN:
                yield OTHERS_TURN
            some, kept = others[start : start + OTHERS_TURN].tolist(), []
            held = None
            if len(some) > HELD_MIN:
                held = self._messages.held(seqs[some].tolist())
            for index in some:
                subject = names.get(int(subject_ids[index]), "")
                seq, due_ms = int(seqs[index]), int(dues_ms[index])
                try:
                    self._messages.cancel(seq, due_ms, subject=subject, held=held)
                except (ConflictError, DamageError, NotFoundError) as error:
                    refusals[index] = error
                except (DelayServerError, StorageError) as error:
                    if not has_begun:
                        raise
                    refusals[index] = error
                else:
                    has_begun = True
                    kept.append(index)
            if len(others) > OTHERS_TURN:
                self._when_lost(kept, lost)
        if lost and len(refusals) + len(lost) == len(seqs):
            raise next(iter(lost.values()))
        refusals.update(lost)
        return refusals

    def _when_lost(self, indexes: list[int], lost: dict[int, Refused]) -> None:
        """Add these to `lost`, with the error, if their group cannot be written: it is rolled back,
        and the decisions that come later are in another one."""
        group = self._groups.not_durable()
        if group is None or not indexes:
            return

        def told(error: Exception | None) -> None:
            if error is not None:
                assert isinstance(error, DelayServerError | StorageError), error
                lost.update(dict.fromkeys(indexes, error))

        group.when_durable(told)

    def _cancel_plain(
        self,
        all_seqs: NDArray[np.uint64],
        all_dues_ms: NDArray[np.int64],
        subject_ids: NDArray[np.uint32],
    ) -> NDArray[np.bool_]:
        """Cancel those that are plain; which of them that was."""
        is_done = np.zeros(len(all_seqs), np.bool_)
        # The first of each, as `np.unique` tells it, which takes its time also for a few.
        order = np.argsort(all_seqs, kind="stable")
        seqs = all_seqs[order]
        is_first = np.append(True, seqs[1:] != seqs[:-1])
        seqs, first = seqs[is_first], order[is_first]
        # A moved or retried message waits somewhere else than its id says. If it were taken for
        # plain, its cancel would be answered, and its newer row would fire (I5).
        unchanged = self._sequencer.unchanged(seqs)
        seqs, first = seqs[unchanged], first[unchanged]
        if not len(seqs):
            return is_done
        self._groups.admit(len(seqs) * MESSAGE_ROW.size)
        dues_ms, subjects = all_dues_ms[first], subject_ids[first]
        waits = self._take_out(seqs, dues_ms, subjects)
        if waits.any():
            self._sequencer.append_cancels(seqs[waits], dues_ms[waits])
            self._groups.wake()
            for subject_id, count in Counter(subjects[waits].tolist()).items():
                self._messages.cancelled_by_subject[subject_id] += count
        is_done[first[waits]] = True
        return is_done

    def _take_out(
        self,
        seqs: NDArray[np.uint64],
        dues_ms: NDArray[np.int64],
        subjects: NDArray[np.uint32],
    ) -> NDArray[np.bool_]:
        """Remove rows from the wheel, and put them back on a roll-back. Returns which of `seqs`,
        which are ascending, waited there or elsewhere. `subjects` that are 0 are filled in from
        their rows."""
        group = self._sequencer.group
        waits = np.zeros(len(seqs), np.bool_)
        hours = dues_ms // HOUR_MS
        for hour in sorted(set(hours.tolist())):
            mine = np.flatnonzero(hours == hour)
            if not self._hours.is_live(hour):
                waits[mine] = True
                continue
            rows, which = self._wheel.remove_many(hour, seqs[mine], dues_ms[mine])
            if len(rows):
                # Rolled back, they fire; durable, they count no longer: as in `Messages.cancel`.
                group.undo.append(partial(self._wheel.insert, hour, rows))
                group.effects.append(partial(self._hours.add, hour, -len(rows)))
                here = mine[which]
                waits[here] = True
                routes = rows["route"] & ROUTE_NUMBER
                subjects[here] = np.where(subjects[here], subjects[here], routes)
            for index in mine[~waits[mine]].tolist():
                waits[index] = self._groups.is_in_memory(int(seqs[index]))
        return waits
