"""Cancels on the hot path: by id, by key, and many in one call. See `delayserver.api.hot`.

    DELETE /v1/messages/{id}                      one decision, one record
    DELETE /v1/subjects/{subject}/keys/{key}      the same, after a look at the key
    POST   /v1/messages/cancel                    all decided in one step, in columns

An answer never waits for the disk, with one exception: whether a caller who may not do everything
may cancel a message is a question of its subject, which an id does not say. `asks_disk` tells so,
and `subjects_of` reads it; that way goes through ASGI alone.

Cost: 15 µs for one; 6 µs for each of many. Threads: belongs to the event loop.
"""

import re
from collections.abc import Mapping
from itertools import repeat
from typing import Annotated

import msgspec
import numpy as np

from delayserver.api.answers import Answer, Headers, problem_answer
from delayserver.api.conditions import expected_versions
from delayserver.api.documents import CancelledDocument, CancelResultDocument, StateDocument, encode
from delayserver.api.intake import check_utf8
from delayserver.api.problems import UNREADABLE, input_error
from delayserver.cancels import Refusal
from delayserver.errors import (
    AccessError,
    ConflictError,
    InputError,
    NotFoundError,
    OverloadedError,
)
from delayserver.message import State
from delayserver.server import Server
from delayserver.subjects import SUBJECT_PATTERN, is_subject
from delayserver.tokens import Action, Caller
from storage.errors import DamageError

CANCEL_PATH = "/v1/messages/cancel"
MESSAGE_PATH = "/v1/messages/"
"""Before the id."""
CANCELS_MAX = 10_000
_BY_ID = re.compile(r"/v1/messages/([^/]+)")
_BY_KEY = re.compile(r"/v1/subjects/([^/]+)/keys/(.*)", re.DOTALL)
_PUBLISH = (Action.PUBLISH,)

Subjects = Mapping[str, str | Refusal]
"""Of messages, by id; or why it is not known."""


class _Key(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    subject: str
    key: str


class _Cancel(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    ids: Annotated[list[str], msgspec.Meta(max_length=CANCELS_MAX)] = []
    keys: Annotated[list[_Key], msgspec.Meta(max_length=CANCELS_MAX)] = []


_decode = msgspec.json.Decoder(_Cancel).decode


def is_cancel(method: str, path: str) -> bool:
    """Whether the call is one of these; the path without its escapes."""
    if method == "POST":
        return path == CANCEL_PATH
    return method == "DELETE" and bool(_BY_ID.fullmatch(path) or _BY_KEY.fullmatch(path))


def asks_disk(path: str) -> bool:
    """Whether it has to be read what a caller asks for who may not do everything."""
    return path.startswith(MESSAGE_PATH)


class HotCancel:
    """The calls, apart from how they came in."""

    def __init__(self, server: Server) -> None:
        self._server = server

    def answer(
        self,
        path: str,
        data: bytes,
        headers: Headers,
        caller: Caller | None,
        subjects: Subjects | None = None,
    ) -> Answer:
        """Cancel what `path` and `data` say, or tell why not. Without a `caller`, nobody is asked.

        `subjects`: see `subjects_of`; needed where the caller may not do everything."""
        try:
            if subjects is None:
                if caller is not None and not caller.is_admin and asks_disk(path):
                    raise OverloadedError("the token was changed meanwhile: ask again")
                subjects = {}
            if path == CANCEL_PATH:
                return self._many(_read(data), caller, subjects)
            if_match = next((value for name, value in headers if name == b"if-match"), None)
            condition = None if if_match is None else if_match.decode("latin-1")
            if found := _BY_KEY.fullmatch(path):
                return self._by_key(found[1], found[2], condition, caller)
            return self._by_id(path.removeprefix(MESSAGE_PATH), condition, caller, subjects)
        except Exception as error:
            return problem_answer(error)

    async def subjects_of(self, path: str, data: bytes) -> Subjects:
        """The subjects of the messages that a call names by their ids.

        Raises InputError for a call that cannot be read."""
        server, messages = self._server, self._server.engine.messages
        subjects: dict[str, str | Refusal] = {}
        texts = _read(data).ids if path == CANCEL_PATH else [path.removeprefix(MESSAGE_PATH)]
        for text in texts:
            try:
                found = messages.message_id(text)
                subjects[text] = await server.subject_of(found.seq, found.due_ms)
            except (DamageError, NotFoundError) as error:
                subjects[text] = error
        return subjects

    # ── one ────────────────────────────────────────────────────────────────────────────────────

    def _by_id(
        self, text: str, if_match: str | None, caller: Caller | None, subjects: Subjects
    ) -> Answer:
        messages = self._server.engine.messages
        found = messages.message_id(text)
        if caller is not None and not caller.is_admin:
            subject = subjects[text]
            if not isinstance(subject, str):
                raise subject
            caller.require(_PUBLISH, subject)
        group = messages.cancel(found.seq, found.due_ms, expected_versions(if_match))
        return Answer(200, encode(StateDocument(text, State.CANCELLED)), group=group)

    def _by_key(
        self, subject: str, key: str, if_match: str | None, caller: Caller | None
    ) -> Answer:
        if caller is not None:
            caller.require(_PUBLISH, subject)
        if not is_subject(subject):
            raise InputError(f"a subject looks like {SUBJECT_PATTERN}", "/path/subject")
        messages = self._server.engine.messages
        found = messages.by_key(subject, key)
        group = messages.cancel(found.seq, found.due_ms, expected_versions(if_match), subject)
        text = messages.message_id_text(found.seq, found.due_ms)
        return Answer(200, encode(StateDocument(text, State.CANCELLED)), group=group)

    # ── many ───────────────────────────────────────────────────────────────────────────────────

    def _many(self, request: _Cancel, caller: Caller | None, subjects: Subjects) -> Answer:
        engine = self._server.engine
        names, keys = [one.subject for one in request.keys], [one.key for one in request.keys]
        by_ids, by_keys = engine.cancels.by_ids(request.ids), engine.cancels.by_keys(names, keys)
        seqs = np.concatenate([by_ids.seqs, by_keys.seqs])
        dues_ms = np.concatenate([by_ids.dues_ms, by_keys.dues_ms])
        numbers = engine.sequencer.subjects
        subject_ids = np.zeros(len(seqs), np.uint32)
        subject_ids[len(request.ids) :] = [numbers.get(name, 0) for name in names]
        refusals: dict[int, Refusal | AccessError] = {**by_ids.refusals}
        for index, refusal in by_keys.refusals.items():
            refusals[len(request.ids) + index] = refusal
        if caller is not None and not caller.is_admin:
            _refuse(caller, request, subjects, refusals)
        is_wanted = np.ones(len(seqs), np.bool_)
        is_wanted[list(refusals)] = False
        wanted = np.flatnonzero(is_wanted)
        seqs, dues_ms = seqs[wanted], dues_ms[wanted]
        refused = engine.cancels.cancel(seqs, dues_ms, subject_ids[wanted])
        texts: list[str | None] = [*request.ids, *repeat(None, len(names))]
        made = engine.ids.texts(engine.ids.encode_many(dues_ms, seqs))
        if refusals:
            for index, text in zip(wanted.tolist(), made, strict=True):
                texts[index] = text
        else:
            texts = [*made]
        for index, refusal in refused.items():
            refusals[int(wanted[index])] = refusal
        nothing = [None] * len(request.ids)
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
        group = engine.groups.not_durable()
        return Answer(200, encode(CancelledDocument(results)), group=group)


def _read(data: bytes) -> _Cancel:
    """The body of a call that cancels many. Raises InputError."""
    try:
        check_utf8(data)
        return _decode(data)
    except UNREADABLE as error:
        raise input_error(error) from error


def _refuse(
    caller: Caller,
    request: _Cancel,
    subjects: Subjects,
    refusals: dict[int, Refusal | AccessError],
) -> None:
    """Add the reason for each that the caller may not cancel."""
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
