"""Definitions under names, each with a state that moves on: made, changed and ended by records.

    put, pause, resume, delete ──▶ decided ──▶ a record of the kind, in the open group ──▶ durable
                                        └────▶ overlays ──▶ (a checkpoint) ──▶ two tables
    find, page ──▶ overlays, then those tables

Several parts have such definitions. Each kind writes its own steps, as time passes or as records
come, into the same records (`_record`, `_show`), so each change is undone in the same way if it
cannot be written. Both parts stay packed until a caller asks for them.

A definition that is not understood here (`records.understanding`) is found with its `problem`, and
stands still. Pausing it changes its state alone, deleting needs neither part, and a put replaces
it. `not_understood` has the names of those that were looked at.

Cost: that of a record; 2 µs to find one; a page reads as many entries as it has. Threads: belongs
to the event loop.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from itertools import islice
from typing import Final, Generic, NamedTuple, Protocol, TypeVar

import msgspec

from delayserver.decisions.group import Group
from delayserver.decisions.messages import Versions
from delayserver.decisions.overlay import Overlay
from delayserver.errors import ConflictError, NotFoundError, OverloadedError, PreconditionError
from delayserver.parts.part import Core
from delayserver.records.named import D, Known, S
from delayserver.records.tables import named_key
from delayserver.records.understanding import Understanding, reason_of
from storage.catalog import Table
from storage.frame import seal
from storage.rows import RecordKind

_GONE: Final = b""
"""In the overlays: there is none."""


class WantedDefinition(Protocol):
    """A client's wish for the definition under a name."""

    @property
    def name(self) -> str:
        """Its name."""

    @property
    def subject(self) -> str:
        """The subject to which it shall publish."""


W = TypeVar("W", bound=WantedDefinition)


class DefinitionKind(NamedTuple, Generic[D, S]):
    """A kind of definition, and how it is written."""

    word: str
    """The word for one of them."""
    record: RecordKind
    definitions: Table
    states: Table
    pack_definition: Callable[[D], bytes]
    definition: Understanding[D]
    pack_state: Callable[[S, bytes], bytes]
    """From the state and the bytes behind it (`Known.tail`)."""
    read_state: Callable[[bytes], tuple[S, bytes | None, str]]
    """Its inverse, and why the state is not understood. Never raises."""
    pack_change: Callable[[str, bytes | None, bytes | None], bytes]
    """The payload of its record: name, new definition (None: as before), state. None of both: it
    has ended."""


class Defining(ABC, Generic[W, D, S]):
    """All of one kind."""

    def __init__(self, kind: DefinitionKind[D, S], core: Core, most: int) -> None:
        """`most`: how many there may be, which the setting says that ends in `_max`."""
        self._kind = kind
        self._settings = core.settings
        self._catalog = core.catalog
        self._sequencer = core.sequencer
        self._groups = core.groups
        self._publishing = core.publishing
        self._most = most
        self._definitions: Overlay[str, bytes] = Overlay()
        self._states: Overlay[str, bytes] = Overlay()
        self.not_understood: dict[str, str] = {}
        """By name, why; of those that were looked at."""
        self._on_not_understood = core.not_understood

    def prune(self, through_seq: int) -> None:
        """The catalog holds everything up to `through_seq`."""
        self._definitions.prune(through_seq)
        self._states.prune(through_seq)

    # ── the parts of a kind ────────────────────────────────────────────────────────────────────

    @abstractmethod
    def __len__(self) -> int:
        """How many there are."""

    @abstractmethod
    def _define(self, wanted: W, before: Known[D, S] | None, now_ms: int) -> Known[D, S]:
        """The definition under a name as of the next record. Raises InputError, OverloadedError,
        DiskReserveError, StoppingError."""

    @abstractmethod
    def _stands(self, name: str, known: Known[D, S] | None) -> None:
        """This is under a name now, since that was decided, or was before and is again."""

    @abstractmethod
    def pause(
        self, name: str, now_ms: int, *, expected: Versions = None
    ) -> tuple[Known[D, S], Group | None]:
        """Have it do nothing until it is resumed. Raises as `delete`."""

    @abstractmethod
    def resume(
        self, name: str, now_ms: int, *, expected: Versions = None
    ) -> tuple[Known[D, S], Group | None]:
        """Have it go on. Raises as `delete`."""

    def _check_new(self, known: Known[D, S], now_ms: int) -> None:
        """Raises InputError where a client's definition could never do anything."""

    def _put_again(self, known: Known[D, S], now_ms: int) -> S | None:
        """Returns the state with which a repeated put goes on; None: as it stands."""
        return None

    # ── requests of clients ────────────────────────────────────────────────────────────────────

    def put(
        self, wanted: W, now_ms: int, *, expected: Versions = None, only_new: bool = False
    ) -> tuple[Known[D, S], bool, Group | None]:
        """Make one, or change it. Returns its new content, whether it is new, and the group after
        which that may be told.

        Raises PreconditionError, InputError, OverloadedError, DiskReserveError, StoppingError."""
        before = self.find(wanted.name)
        self._check(before, wanted.name, expected, only_new=only_new)
        if before is None and len(self) >= self._most:
            plural = f"{self._kind.word}s"
            raise OverloadedError(
                f"there are {len(self)} {plural}, the limit ({plural}_max)", 60_000
            )
        known = self._define(wanted, before, now_ms)
        is_same = before is not None and known.definition == before.definition
        if before is not None and is_same and not before.problem:
            state = self._put_again(before, now_ms)
            if state is None:
                return before, False, self._groups.group_of(before.state.seq)
            return self._changed(before._replace(state=state)), False, self._sequencer.group
        self._check_new(known, now_ms)
        return self._changed(known, is_new_definition=True), before is None, self._sequencer.group

    def find(self, name: str) -> Known[D, S] | None:
        """The definition under a name, if there is one."""
        kind, key = self._kind, named_key(name)
        state = self._states.get(name)
        if state is None:
            state = self._catalog.get(kind.states, key)
        if not state:
            return None
        definition = self._definitions.get(name)
        if definition is None:
            definition = self._catalog.get(kind.definitions, key)
        return self._understood(name, definition or b"", state)

    def _understood(self, name: str, definition: bytes, state: bytes) -> Known[D, S]:
        """The one place where stored definitions are read."""
        is_defined, problem = self._kind.definition.read(definition, name=name)
        stands, tail, of_state = self._kind.read_state(state)
        problem = problem or of_state
        if not problem and is_defined.name != name:
            problem = f"it says that its name is {is_defined.name!r}"
        if not problem and is_defined.subject_id not in self._sequencer.subject_names:
            problem = "the name of its subject is lost"
        return Known(is_defined, stands, problem, tail)

    def bare(self, name: str, error: Exception) -> Known[D, S]:
        """One that cannot even be shown, as nothing but its name and why."""
        stands, tail, _ = self._kind.read_state(b"")
        return Known(self._kind.definition.stand_in(b"", name=name), stands, reason_of(error), tail)

    def _note(self, name: str, known: Known[D, S] | None) -> None:
        """Keep in mind, and say once, whether one is understood."""
        problem = "" if known is None else known.problem
        if problem and self.not_understood.get(name) != problem:
            self.not_understood[name] = problem
            self._on_not_understood(self._kind.word, name, problem)
        elif not problem:
            self.not_understood.pop(name, None)

    def get(self, name: str) -> Known[D, S]:
        """The definition that has this name, with its state. Raises NotFoundError."""
        found = self.find(name)
        if found is None:
            raise NotFoundError(f"there is no {self._kind.word} {name!r}")
        return found

    def page(self, after: str, most: int) -> tuple[list[Known[D, S]], str | None]:
        """The first ones behind that name, in the order of their names; and the name to go on
        behind (None: these were the last)."""
        fresh = {name for name in self._definitions if name > after}
        first = after.encode() + b"\0" if after else b""
        keys = (key for key, _ in self._catalog.scan(self._kind.definitions, first))
        stored = [key.decode() for key in islice(keys, most + len(fresh) + 1)]
        names = sorted({*stored, *fresh})
        if len(stored) > most + len(fresh):
            names = [name for name in names if name <= stored[-1]]
        found = [one for one in map(self.find, names) if one is not None]
        if len(found) <= most:
            return found, None
        return found[:most], found[most - 1].definition.name

    def delete(self, name: str, *, expected: Versions = None) -> Group:
        """End it: once the group is durable it publishes nothing more. Its messages stay.

        Raises NotFoundError, PreconditionError, OverloadedError, StoppingError."""
        self._groups.admit(0)
        self._check(self.get(name), name, expected)
        change = self._kind.pack_change(name, None, None)
        seq = self._sequencer.append(self._kind.record, payload=seal(change))
        self._show(seq, name, _GONE, _GONE)
        self._note(name, None)
        self._stands(name, None)
        self._groups.wake()
        return self._sequencer.group

    def _change(
        self, name: str, expected: Versions, wanted: Mapping[str, bool], **also: int
    ) -> tuple[Known[D, S], Group | None]:
        """Make the state as `wanted`, and then also as `also`. Raises as `delete`."""
        self._groups.admit(0)
        known = self.get(name)
        self._check(known, name, expected)
        if known.tail is None:
            raise ConflictError(
                f"where the {self._kind.word} {name!r} stands is not understood here "
                f"({known.problem}), so it stands still: put it again, or delete it"
            )
        if all(getattr(known.state, field) == value for field, value in wanted.items()):
            return known, self._groups.group_of(known.state.seq)
        seq = self._sequencer.next_seq
        state = msgspec.structs.replace(known.state, seq=seq, version=seq, **wanted, **also)
        return self._changed(known._replace(state=state)), self._sequencer.group

    def _check(
        self,
        known: Known[D, S] | None,
        name: str,
        expected: Versions,
        *,
        only_new: bool = False,
    ) -> None:
        word = self._kind.word
        if only_new and known is not None:
            raise PreconditionError(f"there is a {word} {name!r}", known.version)
        if expected is None:
            return
        if known is None:
            raise PreconditionError(f"there is no {word} {name!r}", "")
        if known.version not in expected:
            raise PreconditionError(
                f"the {word} has changed since; look it up, and decide again", known.version
            )

    # ── records and overlays ───────────────────────────────────────────────────────────────────

    def _changed(self, known: Known[D, S], *, is_new_definition: bool = False) -> Known[D, S]:
        """The definition after a change by a client."""
        self._record(known, is_new_definition=is_new_definition)
        self._note(known.definition.name, known)
        self._stands(known.definition.name, known)
        self._groups.wake()
        return known

    def _record(
        self, known: Known[D, S], *, is_new_definition: bool = False, has_room: bool = False
    ) -> None:
        """Put the record of a change that publishes nothing into the open group. `has_room`: it
        must go into the group that is open now."""
        assert known.tail is not None, known
        name, state = known.definition.name, self._kind.pack_state(known.state, known.tail)
        definition = self._kind.pack_definition(known.definition) if is_new_definition else None
        payload = seal(self._kind.pack_change(name, definition, state))
        if not has_room:
            self._groups.make_room(len(payload))
        seq = self._sequencer.append(self._kind.record, payload=payload)
        assert seq == known.state.seq
        self._show(seq, name, definition, state)

    def _show(self, seq: int, name: str, definition: bytes | None, state: bytes) -> None:
        """Record `seq` of the open group has brought it this far. `definition`: if that is new."""
        undo = self._sequencer.group.undo
        undo.append(partial(self._look_again, name))  # called last: behind those of the overlays
        undo.append(self._states.put(seq, name, state))
        if definition is not None:
            undo.append(self._definitions.put(seq, name, definition))

    def _look_again(self, name: str) -> None:
        """The last decision could not be written: the definition is as it was."""
        known = self.find(name)
        self._note(name, known)
        self._stands(name, known)
