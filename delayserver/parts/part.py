"""A part: everything that a feature registers with the core, in one value.

    Feature ── effects, checks, halves ──▶ replay, check, repair     records and tables on the disk
            ── decide ───────────────────▶ Engine, Gauges, Calls     decisions on the event loop
            ── run ──────────────────────▶ Server                    work beside the calls
            ── routes, rules, verbs ─────▶ FastAPI, scopes, Router   the calls of the API

The core is given a tuple of parts as an argument. Nothing registers itself by being imported, so a
server with another tuple is another server: a test adds a part of its own.

A part that is left out of the tuple leaves its tables unread, and they are kept as they are. A
message log that holds records of it can only be served, checked and repaired with the part.

A part brings its record kind and its table by number, from 192 to 255: `RecordKind(192)` and
`Table("part_192")`. `effects` and `checks` say the rest, and nothing in the core changes.

Cost: none; a record of a part costs one look-up in a dictionary. Threads: immutable values.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from storage.catalog import Table
from storage.rows import RecordKind

if TYPE_CHECKING:
    from fastapi import APIRouter

    from delayserver.api.scopes import Rule
    from delayserver.config import Settings
    from delayserver.decisions.groups import Groups
    from delayserver.decisions.publishing import Publishing
    from delayserver.decisions.sequencer import Sequencer
    from delayserver.security.targets import TargetPolicy
    from delayserver.server.metrics import Metrics
    from storage.catalog import Catalog

Write = tuple[Table, bytes, bytes | None]
"""A table, a key, and the value; None deletes the key."""
Effect = Callable[[bytes], Iterable[Write]]
"""The writes to the catalog that the payload of a record means, in their order."""
Check = Callable[[bytes, bytes], None]
"""Checks a key and a value. Raises one of `records.tables.UNREADABLE`."""


class Core(Protocol):
    """The objects of the engine that a part may build on."""

    settings: "Settings"
    catalog: "Catalog"
    sequencer: "Sequencer"
    groups: "Groups"
    publishing: "Publishing"
    not_understood: Callable[[str, str, str], None]
    """Told of a definition that is not understood: its kind, its name and the reason."""


class Decider(Protocol):
    """The object of a part on the event loop, one for each shard."""

    @property
    def not_understood(self) -> Mapping[str, str]:
        """By name, why a definition is not understood here."""
        ...

    def prune(self, through_seq: int) -> None:
        """The catalog knows everything up to this seq: forget it."""
        ...

    def add_metrics(self, metrics: "Metrics") -> None:
        """Add the counters and gauges of the part."""
        ...


class Host(Protocol):
    """The server in which a part runs."""

    clock: Callable[[], int]
    metrics: "Metrics"
    targets: "TargetPolicy"

    def on_fatal(self, error: BaseException) -> None:
        """The server must end (I9)."""
        ...


class Runner(Protocol):
    """The work of a part that goes on beside the calls, such as reading from a broker."""

    def start(self) -> None:
        """Called on the event loop, behind the first tick."""
        ...

    async def stop(self) -> None:
        """Accept nothing more. On return the part makes no more records."""
        ...


@dataclass(frozen=True, slots=True)
class Halves:
    """A kind of definition that has a row in each of two tables, under the same key."""

    definitions: Table
    states: Table
    subject_id: Callable[[bytes], int]
    """The subject in a value of `definitions`. Raises msgspec.DecodeError."""
    lack: str
    """The answer that is missing if there is no state, such as "how far it is"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Feature:
    """A feature. Everything has a default but the name and the decisions."""

    name: str
    """The word for one definition, for logs, reports and metrics."""
    decide: Callable[[Core], Decider]
    effects: Mapping[RecordKind, Effect] = field(default_factory=dict)
    checks: Mapping[Table, Check] = field(default_factory=dict)
    halves: Halves | None = None
    run: Callable[[Any, Host], Runner] | None = None
    """Makes the runner from what `decide` has made. None: nothing runs."""
    routes: "Callable[[], APIRouter] | None" = None
    """Imports FastAPI, so it is called when the first call needs that. None: no routes."""
    rules: "Mapping[tuple[str, str], Rule]" = field(default_factory=dict)
    """By method and path, the scope that a call needs."""
    collection: str = ""
    """The path segment under which its definitions have names, in the plural: `/v1/COLLECTION` is
    the list of all shards, and `/v1/COLLECTION/{name}` is for the shard of the name."""
    verbs: tuple[str, ...] = ()
    """Each `POST /v1/COLLECTION/{name}/VERB` answers with the definition, and its ETag."""
    examples: Mapping[str, list[Any]] = field(default_factory=dict)
    """By the name of a document of the API, examples for OpenAPI."""


Parts = tuple[Feature, ...]


def effects_of(parts: Parts) -> dict[RecordKind, Effect]:
    """The effects of all record kinds of the parts."""
    return {kind: effect for part in parts for kind, effect in part.effects.items()}


def checks_of(parts: Parts) -> dict[Table, Check]:
    """The checks of all tables of the parts."""
    return {table: check for part in parts for table, check in part.checks.items()}
