"""Definitions under names, each with a state that moves on: the base of several parts.

Definition and state are two values, since a state changes with each step and a definition hardly
ever.

Cost: none. Threads: immutable values.
"""

from typing import Generic, NamedTuple, TypeVar

import msgspec


class NamedDefinition(msgspec.Struct, array_like=True, frozen=True):
    """The first fields of a definition that a client has put."""

    name: str
    subject_id: int
    """The subject to which it publishes."""


class NamedState(msgspec.Struct, frozen=True):
    """The first fields of where it stands."""

    seq: int
    """The record that made it."""
    version: int
    """The record of the last change by a client, or by an error."""
    changed_ms: int
    """When that was."""


D = TypeVar("D", bound=NamedDefinition)
S = TypeVar("S", bound=NamedState)


class Known(NamedTuple, Generic[D, S]):
    """One of them, and how far it is."""

    definition: D
    state: S
    problem: str = ""
    """Why it is not understood here; empty: it is. Both are stand-ins then, as far as they cannot
    be read (`records.understanding`), and it stands still."""
    tail: bytes | None = b""
    """Bytes that a newer server has written behind the fields of the state; they are kept. None:
    the state is a stand-in, and a change would lose what is stored."""

    @property
    def version(self) -> str:
        """Changes whenever a client changes, pauses or resumes it; not with its steps."""
        return str(self.state.version)
