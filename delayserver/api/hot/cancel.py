"""Cancels on the hot path: by id, by key, and many in one call. See `delayserver.api.hot.publish`.

    DELETE /v1/messages/{id}                      one decision, one record
    DELETE /v1/subjects/{subject}/keys/{key}      the same, after a look at the key
    POST   /v1/messages/cancel                    looked up in slices, decided in columns

Cancels of one that come in one turn of the event loop are decided together, as the columns of a
call that cancels many, and each is answered as if it had come alone.

An answer never waits for the disk, with one exception: whether a caller who may not do everything
may cancel a message is a question of its subject, which an id does not say. `asks_disk` tells so,
and `subjects_of` reads it; that way goes through ASGI alone.

Cost: 12 µs for one, 5 µs where 64 come together; of many in a call 3 µs each by key, 1 µs by id.
Threads: belongs to the event loop.
"""

from collections.abc import Mapping, Sequence
from itertools import repeat
from typing import cast

import numpy as np
from numpy.typing import NDArray

from delayserver.api.conditions import expected_versions
from delayserver.api.documents import encode
from delayserver.api.hot.answers import (
    Answer,
    ForwardedClient,
    Headers,
    Responder,
    problem_answer,
    wire_of,
)
from delayserver.api.hot.belonging import Shards, shard_of_cancel
from delayserver.api.hot.paths import asks_disk, one_of
from delayserver.decisions.cancels import Refusal
from delayserver.errors import (
    AccessError,
    ConflictError,
    DelayServerError,
    InputError,
    NotFoundError,
    OverloadedError,
)
from delayserver.records.ids import COLUMNS_MIN
from delayserver.records.message import State
from delayserver.records.message_id import ID_DIGITS
from delayserver.records.subjects import is_subject
from delayserver.security.tokens import Action, Caller
from delayserver.server.calls import Calls
from delayserver.slices import Work, at_once
from delayserver.wire.fields import SUBJECT_PATTERN
from delayserver.wire.messages import (
    CancelBody,
    CancelledDocument,
    CancelResultDocument,
    StateDocument,
)
from delayserver.wire.reading import read
from storage.errors import DamageError, StorageError

CANCELS_TURN = 500
"""A call that cancels many messages looks so many up in one step."""
PLAIN_PER_ITEM = 10
"""Messages that are decided in columns, as `slices` counts."""
_PUBLISH = (Action.PUBLISH,)

Subjects = Mapping[str, str | Refusal]
"""The subjects of messages, by id; or why a subject is not known."""


def _cancelled(message_id: str) -> StateDocument:
    return StateDocument(message_id, State.CANCELLED)


_CANCELLED = Answer(200, encode(_cancelled("0" * ID_DIGITS)))
"""The answer of `_by_id` and `_by_key`, which is as long for every message."""
_Gathered = tuple[Responder, str | None, str, Caller | None]
"""A cancel that waits to be decided together with others: who asked; subject and key, or None and
the id."""


class HotCancel:
    """The calls, apart from how they came in."""

    def __init__(self, calls: Calls, shards: Shards) -> None:
        self._calls = calls
        self._shards = shards
        self._gathered: list[_Gathered] = []
        self.gather = self._gather_routed if shards.count > 1 else self.gather_own
        """Cancels a message where it belongs, as `gather_own` does it here."""

    def answer(
        self,
        path: str,
        headers: Headers,
        caller: Caller | None,
        subjects: Subjects | None = None,
    ) -> Answer:
        """Cancel the message that `path` names, or tell why not. Without a `caller`, no right is
        checked.

        `subjects`: see `subjects_of`; needed where the caller may not do everything."""
        try:
            if subjects is None:
                if caller is not None and not caller.is_admin and asks_disk(path):
                    raise OverloadedError("the token was changed meanwhile: ask again")
                subjects = {}
            if_match = next((value for name, value in headers if name == b"if-match"), None)
            condition = None if if_match is None else if_match.decode("latin-1")
            subject, text = one_of(path)
            if subject is not None:
                return self._by_key(subject, text, condition, caller)
            return self._by_id(text, condition, caller, subjects)
        except Exception as error:
            return problem_answer(error)

    def answering(
        self, data: bytes, caller: Caller | None, subjects: Subjects | None = None
    ) -> Work[Answer]:
        """As `answer`, of a call that cancels many, in slices. If the answer is an error, none was
        cancelled: once one is cancelled, the answer has a result for each."""
        try:
            if subjects is None:
                if caller is not None and not caller.is_admin:
                    raise OverloadedError("the token was changed meanwhile: ask again")
                subjects = {}
            return (yield from self._many(read(data, CancelBody), caller, subjects))
        except Exception as error:
            return problem_answer(error)

    async def subjects_of(self, texts: Sequence[str]) -> Subjects:
        """The subjects of the messages with these ids."""
        calls = self._calls
        subjects: dict[str, str | Refusal] = {}
        for text in texts:
            try:
                found = calls.message_id(text)
                subjects[text] = await calls.subject_of(found.seq, found.due_ms)
            except (DamageError, NotFoundError) as error:
                subjects[text] = error
        return subjects

    # ── cancels of one that come in together ───────────────────────────────────────────────────

    def _gather_routed(
        self, responder: Responder, subject: str | None, text: str, caller: Caller | None
    ) -> None:
        shard = shard_of_cancel(subject, text, self._shards)
        if shard == self._shards.own:
            self.gather_own(responder, subject, text, caller)
            return
        client = cast(ForwardedClient, responder)
        client.go_elsewhere()
        self._shards.cancel(shard, subject, text, caller, client.come_back)

    def gather_own(
        self, responder: Responder, subject: str | None, text: str, caller: Caller | None
    ) -> None:
        """Cancel one message, without a condition, together with others that come in this turn of
        the event loop: a cancel that waits for longer may come too late. `responder` is given the
        result that `answer` would return.

        `text`: the key, where there is a `subject`; else the id, which a `caller` has to be an
        administrator for."""
        assert subject is not None or caller is None or caller.is_admin
        if not self._gathered:
            self._calls.decide_this_turn(self.decide)
        self._gathered.append((responder, subject, text, caller))

    def decide(self) -> None:
        """Answer the cancels that have been gathered."""
        gathered, self._gathered = self._gathered, []
        if len(gathered) >= COLUMNS_MIN and self._decide_together(gathered):
            return
        for responder, subject, text, caller in gathered:
            try:
                if subject is None:
                    answer = self._by_id(text, None, caller, {})
                else:
                    answer = self._by_key(subject, text, None, caller)
            except Exception as error:
                answer = problem_answer(error)
            responder.respond(wire_of(answer), answer.group)

    def _decide_together(self, gathered: list[_Gathered]) -> bool:
        """Column by column; False: they have to be asked for one by one."""
        gathered.sort(key=_is_by_key)
        ids = [text for _, subject, text, _ in gathered if subject is None]
        names = [subject for _, subject, _, _ in gathered if subject is not None]
        keys = [text for _, subject, text, _ in gathered if subject is not None]
        bad = {name for name in set(names) if not is_subject(name)}
        refusals: dict[int, Exception] = {}
        for index, (_, subject, _, caller) in enumerate(gathered):
            try:
                if caller is not None and subject is not None:
                    caller.require(_PUBLISH, subject)
            except AccessError as error:
                refusals[index] = error
            else:
                if subject in bad:
                    refusals[index] = _not_a_subject()
        try:
            texts = at_once(self._cancelling(ids, names, keys, refusals))
        except (DelayServerError, StorageError):
            # Each one gets its own answer. Messages that were cancelled by then stay cancelled.
            return False
        except Exception as error:
            refusals, texts = dict.fromkeys(range(len(gathered)), error), [""] * len(gathered)
        group = self._calls.not_durable()
        head = wire_of(_CANCELLED).partition(b"{")[0]
        for index, (responder, subject, text, _) in enumerate(gathered):
            if index in refusals:
                responder.respond(wire_of(problem_answer(refusals[index])), None)
            else:
                message_id = text if subject is None else str(texts[index])
                responder.respond(head + encode(_cancelled(message_id)), group)
        return True

    # ── one ────────────────────────────────────────────────────────────────────────────────────

    def _by_id(
        self, text: str, if_match: str | None, caller: Caller | None, subjects: Subjects
    ) -> Answer:
        found = self._calls.message_id(text)
        if caller is not None and not caller.is_admin:
            subject = subjects[text]
            if not isinstance(subject, str):
                raise subject
            caller.require(_PUBLISH, subject)
        group = self._calls.cancel(found.seq, found.due_ms, expected_versions(if_match))
        return Answer(200, encode(_cancelled(text)), group=group)

    def _by_key(
        self, subject: str, key: str, if_match: str | None, caller: Caller | None
    ) -> Answer:
        if caller is not None:
            caller.require(_PUBLISH, subject)
        if not is_subject(subject):
            raise _not_a_subject()
        calls = self._calls
        found = calls.by_key(subject, key)
        group = calls.cancel(found.seq, found.due_ms, expected_versions(if_match), subject)
        text = calls.encode_id(found.due_ms, found.seq)
        return Answer(200, encode(_cancelled(text)), group=group)

    # ── many ───────────────────────────────────────────────────────────────────────────────────

    def _many(self, request: CancelBody, caller: Caller | None, subjects: Subjects) -> Work[Answer]:
        ids = request.ids
        names, keys = [one.subject for one in request.keys], [one.key for one in request.keys]
        refusals: dict[int, Exception] = {}
        if caller is not None and not caller.is_admin:
            refusals = _refusals(caller, request, subjects)
        texts = yield from self._cancelling(ids, names, keys, refusals)
        # Groups become durable in order, so this one is behind all that was cancelled here. If it
        # fails while the answer is made, the answer is told so.
        group = self._calls.not_durable()
        count = len(texts)
        if count > CANCELS_TURN:
            yield max(CANCELS_TURN, count // PLAIN_PER_ITEM)
        nothing = [None] * len(ids)
        results = list(
            map(
                CancelResultDocument,
                texts,
                [*nothing, *names],
                [*nothing, *keys],
                repeat(State.CANCELLED.value),
            )
        )
        for index, error in refusals.items():
            result = results[index]
            result.error = str(error)
            result.state = error.state if isinstance(error, ConflictError) else None
        if count > CANCELS_TURN:
            yield CANCELS_TURN
        return Answer(200, encode(CancelledDocument(results)), group=group)

    def _cancelling(
        self,
        ids: Sequence[str],
        names: Sequence[str],
        keys: Sequence[str],
        refusals: dict[int, Exception],
    ) -> Work[Sequence[str | None]]:
        """Cancel messages by their ids, and behind them by keys of the subjects `names`, but for
        those that are refused already, by index; others are added. Returns their ids, as they were
        asked for where there is no such message, and None under a key that stands for none.

        They are looked up in slices before anything is decided. Raises OverloadedError,
        StoppingError, StorageError: then none was cancelled."""
        calls = self._calls
        count = len(ids) + len(names)
        seqs, dues_ms = self._find(ids[:CANCELS_TURN], names, keys, 0, refusals)
        for start in range(CANCELS_TURN, count, CANCELS_TURN):
            yield CANCELS_TURN
            more = ids[start : start + CANCELS_TURN]
            behind = max(0, start - len(ids))
            found = self._find(more, names[behind:], keys[behind:], start, refusals)
            seqs, dues_ms = np.append(seqs, found[0]), np.append(dues_ms, found[1])
        if count > CANCELS_TURN:
            yield CANCELS_TURN
        is_wanted = np.ones(count, np.bool_)
        is_wanted[list(refusals)] = False
        wanted = np.flatnonzero(is_wanted)
        seqs, dues_ms = seqs[wanted], dues_ms[wanted]
        texts: Sequence[str | None] = calls.encode_ids(dues_ms, seqs)
        if refusals:
            made, texts = texts, [*ids, *repeat(None, len(names))]
            for index, text in zip(wanted.tolist(), made, strict=True):
                texts[index] = text
        numbers = calls.subjects
        subject_ids = np.zeros(count, np.uint32)
        subject_ids[len(ids) :] = [numbers.get(name, 0) for name in names]
        if count > CANCELS_TURN:
            yield CANCELS_TURN
        refused = yield from calls.cancel_many(seqs, dues_ms, subject_ids[wanted])
        refusals.update((int(wanted[index]), why) for index, why in refused.items())
        return texts

    def _find(
        self,
        ids: Sequence[str],
        names: Sequence[str],
        keys: Sequence[str],
        first: int,
        refusals: dict[int, Exception],
    ) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
        """The seqs and due times of a slice: of these ids, and of as many of the keys as it has
        room for. `first`: the index of the first one."""
        calls = self._calls
        room = CANCELS_TURN - len(ids)
        by_ids, by_keys = calls.find_by_ids(ids), calls.find_by_keys(names[:room], keys[:room])
        for found, begin in (by_ids, first), (by_keys, first + len(ids)):
            for index, why in found.refusals.items():
                refusals.setdefault(begin + index, why)
        seqs = np.concatenate([by_ids.seqs, by_keys.seqs])
        return seqs, np.concatenate([by_ids.dues_ms, by_keys.dues_ms])


def ids_in(data: bytes) -> Sequence[str]:
    """The ids that a call names which cancels many. Raises InputError if it cannot be read."""
    return read(data, CancelBody).ids


def _is_by_key(one: _Gathered) -> bool:
    return one[1] is not None


def _not_a_subject() -> InputError:
    return InputError(f"a subject looks like {SUBJECT_PATTERN}", "/path/subject")


def _refusals(caller: Caller, request: CancelBody, subjects: Subjects) -> dict[int, Exception]:
    """The reason for each that the caller may not cancel, by index."""
    refusals: dict[int, Exception] = {}
    names: list[str | Refusal] = [subjects[text] for text in request.ids]
    names += [one.subject for one in request.keys]
    for index, subject in enumerate(names):
        if not isinstance(subject, str):
            refusals[index] = subject
            continue
        try:
            caller.require(_PUBLISH, subject)
        except AccessError as error:
            refusals[index] = error
    return refusals
