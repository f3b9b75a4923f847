"""A part: everything that a feature registers with the core, in one value.

    Feature ── effects, checks, halves ──▶ replay, check, repair     records and tables on the disk
            ── decide ───────────────────▶ Engine, Gauges, Calls     decisions on the event loop
                                                                     (a TimedDecider: by the clock)
            ── run, work ────────────────▶ Server, Shard             work beside the calls
            ── keep ─────────────────────▶ Replay                    hours that must not go yet
            ── routes, rules, verbs, ────▶ FastAPI, scopes, Router   the calls of the API
               keyed, hot ───────────────▶ Router, Hot               … with keys; … that are hot

The core is given a tuple of parts as an argument. Nothing registers itself by being imported, so a
server with another tuple is another server: a test adds a part of its own.

A part that is left out of the tuple leaves its tables unread, and they are kept as they are. A
message log that holds records of it can only be served, checked and repaired with the part.

A part brings its record kind and its table by number, from 192 to 255: `RecordKind(192)` and
`Table("part_192")`. `effects` and `checks` say the rest, and nothing in the core changes.

Cost: none; a record of a part costs one look-up in a dictionary. Threads: immutable values.
"""

from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

from storage.catalog import Table
from storage.rows import RecordKind

if TYPE_CHECKING:
    from fastapi import APIRouter

    from delayserver.api.hot.answers import Answer
    from delayserver.api.intake import Intake
    from delayserver.api.scopes import Rule
    from delayserver.config import Settings
    from delayserver.decisions.groups import Groups
    from delayserver.decisions.messages import Messages
    from delayserver.decisions.publishing import Publishing
    from delayserver.decisions.sequencer import Sequencer
    from delayserver.security.targets import TargetPolicy
    from delayserver.security.tokens import Caller
    from delayserver.server.calls import Calls
    from delayserver.server.metrics import Metrics
    from delayserver.server.shard import Shard
    from delayserver.server.threads import Worker
    from delayserver.shards.all_shards import AllShards
    from delayserver.shards.merged_lists import MergedLists
    from delayserver.timers.timeouts import Timeouts
    from storage.catalog import Catalog
    from storage.check import Report
    from storage.files import Files
    from storage.frame import Frame

Write = tuple[Table, bytes, bytes | None]
"""A table, a key, and the value; None deletes the key."""
Effect = Callable[[bytes], Iterable[Write]]
"""The writes to the catalog that the payload of a record means, in their order."""
HotPut = Callable[[str, bytes, "Caller | None"], "Answer"]
"""The answer to a key, a body and a caller; without a caller, all is allowed. Raises
DelayServerError."""
Check = Callable[[bytes, bytes], None]
"""Checks a key and a value. Raises one of `records.tables.UNREADABLE`."""


Serve = Callable[..., Any]
"""Takes a call of several shards and the values in its path; see `delayserver.shards.router`."""
Route = tuple[str, str, Serve]
"""Methods with spaces between them, the pattern of a path, and what serves it."""


class CorePorts(Protocol):
    """Work that is done elsewhere. No call waits."""

    def call_soon(self, function: Callable[[], None]) -> None:
        """Call a function in the next turn of the event loop."""

    def space_bytes(self) -> int:
        """The free bytes on the device of the data directory."""


class Core(Protocol):
    """The objects of the engine that a part may build on."""

    settings: "Settings"
    catalog: "Catalog"
    sequencer: "Sequencer"
    groups: "Groups"
    messages: "Messages"
    publishing: "Publishing"
    timeouts: "Timeouts"
    """With the stopwatch: lengths of time are counted on it."""
    random: Callable[[], float]
    """Numbers from 0 to before 1."""
    ports: CorePorts

    @property
    def is_reading(self) -> bool:
        """No length of time ends in this turn: the event loop has stood still, and first reads the
        requests that came meanwhile."""

    not_understood: Callable[[str, str, str], None]
    """Told of a definition that is not understood: its kind, its name and the reason."""

    def prune(self) -> None:
        """Have all parts forget what the catalog knows, unless one of them `holds` it."""


class Decider(Protocol):
    """The object of a part on the event loop, one for each shard."""

    @property
    def not_understood(self) -> Mapping[str, str] | None:
        """By name, why a definition is not understood here. None: the part has no definitions."""

    def prune(self, through_seq: int) -> None:
        """The catalog knows everything up to this seq: forget it."""

    def add_metrics(self, metrics: "Metrics") -> None:
        """Add the counters and gauges of the part."""


@runtime_checkable
class TimedDecider(Protocol):
    """A decider that has more methods: some of its work is due by the clock."""

    def run_due(self, now_ms: int) -> bool:
        """Do the work that is due and fits into a turn of the event loop; True: there is more."""

    def wait_ms(self, now_ms: int) -> int:
        """How long to wait for the next call of `run_due` at most."""

    def look_again(self) -> None:
        """The clock was set, or the files of time zones have changed."""

    def on_stand_still(self, stood_ms: int) -> None:
        """The event loop has stood still for so long until now."""


class NoDecisions:
    """The decider of a part that decides nothing: it only reads, or asks the core."""

    not_understood = None

    def prune(self, through_seq: int) -> None:
        """Nothing is held in memory."""

    def add_metrics(self, metrics: "Metrics") -> None:
        """There are none."""


class Host(Protocol):
    """The server in which a part runs."""

    clock: Callable[[], int]
    metrics: "Metrics"
    targets: "TargetPolicy"

    def on_fatal(self, error: BaseException) -> None:
        """The server must end (I9)."""


class Runner(Protocol):
    """The work of a part that goes on beside the calls, such as reading from a broker."""

    def start(self) -> None:
        """Called on the event loop, behind the first tick."""

    async def stop(self) -> None:
        """Accept nothing more. On return the part makes no more records."""


class HourKeeper(Protocol):
    """The object of a part on the replay thread that may keep hours past their retention."""

    def lets_go(self, hour: int) -> bool:
        """Whether a settled hour may be deleted."""

    def remove(self, hour: int) -> None:
        """The hour is deleted with the next checkpoint."""


class Inspector(Protocol):
    """The look of a part at a data directory that is checked."""

    def visit(self, frame: "Frame") -> None:
        """Take in a frame of the message log that verified."""

    def compare(self, report: "Report") -> None:
        """Add the disagreements, after all files were visited."""


@dataclass(frozen=True, slots=True)
class Halves:
    """A kind of definition, which may have a row in each of two tables, under the same key."""

    definitions: Table
    subject_id: Callable[[bytes], int]
    """The subject in a value of `definitions`; 0: it has none. Raises msgspec.DecodeError."""
    states: Table | None = None
    """None: the definition is all there is."""
    state_seq: Callable[[bytes], int] = lambda value: 0
    """The seq of the record that made a value of `states`; 0: it cannot be read."""
    lack: str = ""
    """The answer that is missing if there is no state, such as "how far it is"."""


class KeyedCalls(NamedTuple):
    """Calls whose path ends with a key, in which slashes may stand."""

    methods: str
    """With spaces between them."""
    path: str
    """Ends with `{key}`."""
    sums: tuple[str, ...] = ()
    """All shards are asked, and these fields of their answers are added up. Empty: the call is for
    the shard of the key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Feature:
    """A feature. Everything has a default but the name."""

    name: str
    """The word for one definition, for logs, reports and metrics."""
    decide: Callable[[Core], Decider] = lambda core: NoDecisions()
    effects: Mapping[RecordKind, Effect] = field(default_factory=dict)
    checks: Mapping[Table, Check] = field(default_factory=dict)
    halves: Halves | None = None
    run: Callable[[Any, Host], Runner] | None = None
    """Makes the runner from what `decide` has made. None: nothing runs."""
    work: "Callable[[Any, Shard], Worker[Any]] | None" = None
    """Makes a thread of the part from what `decide` has made. None: it needs none."""
    holds: Callable[[Any], bool] | None = None
    """Whether the overlays must keep changes that the catalog knows, since what `decide` has made
    decides from an older look-up. Once it does not any more, it calls `Core.prune`."""
    keep: Callable[..., HourKeeper] | None = None
    """Makes a keeper of settings, catalog, hours, dispatch log, effects, and the function that
    makes a checkpoint. None: an hour goes when its retention is over."""
    inspect: "Callable[[Files, Catalog], Inspector] | None" = None
    """Begins a check of more than the tables. None: there is no more."""
    look: "Callable[[Any, Calls], Awaitable[None]] | None" = None
    """Brings the numbers of what `decide` has made up to date, before they are shown."""
    stats: Callable[[Any], dict[str, object]] = lambda decider: {}
    """The fields of `/v1/stats` that are those of the part."""
    routes: "Callable[[], APIRouter] | None" = None
    """Imports FastAPI, so it is called when the first call needs that. None: no routes."""
    rules: "Mapping[tuple[str, str], Rule]" = field(default_factory=dict)
    """By method and path, the scope that a call needs."""
    collection: str = ""
    """The path segment under which its definitions have names, in the plural: `/v1/COLLECTION` is
    the list of all shards, and `/v1/COLLECTION/{name}` is for the shard of the name."""
    keyed: tuple[KeyedCalls, ...] = ()
    """Calls beside those of the collection, and whose they are."""
    hot: "Mapping[str, Callable[[Calls, Intake], HotPut]]" = field(default_factory=dict)
    """By the path before a key, as `delayserver.api.hot.paths` has it: makes the function that
    answers a PUT there."""
    verbs: tuple[str, ...] = ()
    """Each `POST /v1/COLLECTION/{name}/VERB` answers with the definition and its ETag, or with 201
    and the message that it has published."""
    shard_routes: "Callable[[AllShards, MergedLists], list[Route]] | None" = None
    """Its other calls where there are several shards; each may be for one shard alone."""
    examples: Mapping[str, list[Any]] = field(default_factory=dict)
    """By the name of a document of the API, examples for OpenAPI."""


Parts = tuple[Feature, ...]


def effects_of(parts: Parts) -> dict[RecordKind, Effect]:
    """The effects of all record kinds of the parts."""
    return {kind: effect for part in parts for kind, effect in part.effects.items()}


def checks_of(parts: Parts) -> dict[Table, Check]:
    """The checks of all tables of the parts."""
    return {table: check for part in parts for table, check in part.checks.items()}
