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
from collections.abc import Mapping, Sequence
from typing import Annotated

import msgspec

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
from delayserver.message_id import MessageId
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
        found: list[MessageId | Refusal | AccessError]
        found = [*engine.cancels.by_ids(request.ids)]
        found += engine.cancels.by_keys([(one.subject, one.key) for one in request.keys])
        if caller is not None and not caller.is_admin:
            _refuse(caller, request, subjects, found)
        numbers = engine.sequencer.subjects
        subject_ids = [0] * len(request.ids)
        subject_ids += [numbers.get(one.subject, 0) for one in request.keys]
        wanted = [index for index, one in enumerate(found) if type(one) is MessageId]
        targets = [one for one in found if type(one) is MessageId]
        refusals = engine.cancels.cancel(targets, [subject_ids[index] for index in wanted])
        results = [CancelResultDocument(text) for text in request.ids]
        results += [CancelResultDocument(None, one.subject, one.key) for one in request.keys]
        for index, text, refusal in zip(
            wanted, engine.ids.encode_each(targets), refusals, strict=True
        ):
            result = results[index]
            result.id = text
            if refusal is None:
                result.state = "cancelled"
            else:
                found[index] = refusal
        if len(targets) != len(found) or any(refusals):
            _tell(found, results)
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
    found: list[MessageId | Refusal | AccessError],
) -> None:
    """Put the reason in the place of what the caller may not cancel."""
    names: list[str | Refusal] = [subjects[text] for text in request.ids]
    names += [one.subject for one in request.keys]
    for index, subject in enumerate(names):
        if not isinstance(subject, str):
            found[index] = subject
            continue
        try:
            caller.require(_PUBLISH, subject)
        except AccessError as error:
            found[index] = error


def _tell(
    found: Sequence[MessageId | Refusal | AccessError], results: Sequence[CancelResultDocument]
) -> None:
    """Write down why some were not cancelled."""
    for one, result in zip(found, results, strict=True):
        if type(one) is not MessageId:
            result.error = str(one)
            if isinstance(one, ConflictError):
                result.state = one.state
