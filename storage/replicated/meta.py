"""The cluster and its nodes: a fold over one log that all nodes read.

    {"format": 1, "cluster": …, …}    the settings of the cluster. The first one counts, for good
    {"node": "n1", "zone": "a"}       a node, and where it stands. Its number is the place of its
                                      name among all names in the order of their first records,
                                      from 1. A node that was drained or forgotten does not count
                                      any more. Without a zone it has one of its own
    {"drain": "n1"}                   the node shall own nothing
    {"forget": "n1"}                  the node does not come back: no node waits for its replicas
    {"move": 3, "to": "n2", "epoch": 7}   the owner of that epoch shall give a shard to a node
    {"adopt": 3, "of": "n1", "end": 900, "epoch": 8}
                                      the log of a shard has lost its records from that offset on.
                                      It shall go on in that epoch behind the node's replica

The records are JSON, so that people can read them with the engine's own tools. No node takes a
lock: two nodes that make the cluster at once, or register at once, append both, read the log to its
end, and come to the same result. The log is a few records long, is read as a whole, and is never
compacted or cut: a number that a node once had stays its own.

A record of a kind that this version does not know ends the reading with an error. Skipping a record
that may count would be a verdict of its own (as in `storage.replicated.envelope`).

Cost: 20 µs a record. Threads: none of its own; a `MetaLog` belongs to the thread of its log.

Rejected: numbers that nodes choose for themselves (two may choose the same), and a compacted topic
(it would drop the first of two records with one key).
"""

import json
import re
from collections.abc import Callable
from typing import Annotated, Any, Final, Literal, TypeVar

import msgspec

from storage.errors import (
    ClusterDiffersError,
    ClusterMissingError,
    EngineError,
    EngineSettingsError,
    FormatVersionError,
    NewerRecordError,
    RecordDamageError,
)
from storage.replicated.engine import EngineLog
from storage.replicated.reading import read_to_end
from storage.shards import SHARDS_MAX

META_FORMAT: Final = 1
NODES_MAX: Final = (1 << 16) - 1
"""A record of a shard's log has 16 bits for the number of its node."""
NAME_PATTERN: Final = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z"
"""The names of clusters and nodes: both become parts of names of topics and groups. Zones, too."""
REPLICAS_MIN: Final = 2
ID_SECRET_BYTES: Final = 16
LINK_SECRET_BYTES: Final = 32

NodeName = Annotated[str, msgspec.Meta(pattern=NAME_PATTERN)]
Zone = Annotated[str, msgspec.Meta(pattern=NAME_PATTERN)]
Stamp = Annotated[int, msgspec.Meta(ge=1, lt=1 << 32)]


Kind = TypeVar("Kind", bound=msgspec.Struct)


class ClusterIdentity(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The settings with which a cluster was made. All replicas of a shard take theirs from here, so
    that frames, ids and hashes of keys are the same everywhere."""

    format: Literal[1]
    cluster: str
    shards: Annotated[int, msgspec.Meta(ge=1, le=SHARDS_MAX)]
    durability: Literal["os", "fsync", "fsync-all"]
    """An answer waits for: a quorum's memory; that, and the owner's own disk; every disk."""
    stamps: tuple[Stamp, ...]
    """The stamp of the frames of each shard."""
    id_secret: Annotated[str, msgspec.Meta(pattern=f"^[0-9a-f]{{{2 * ID_SECRET_BYTES}}}\\Z")]
    """The secret with which message ids are made."""
    link_secret: Annotated[str, msgspec.Meta(pattern=f"^[0-9a-f]{{{2 * LINK_SECRET_BYTES}}}\\Z")]
    """The secret that nodes show one another."""
    replicas: Annotated[int, msgspec.Meta(ge=REPLICAS_MIN, le=NODES_MAX)] = NODES_MAX
    """How many nodes have each shard; where nothing is said of it, all of them."""

    def __post_init__(self) -> None:
        if len(self.stamps) != self.shards:
            raise ValueError(f"{len(self.stamps)} stamps for {self.shards} shards")

    @property
    def flushes(self) -> bool:
        """Whether the engine brings each record to every disk before it answers."""
        return self.durability == "fsync-all"


class DrainRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A node that is to own nothing."""

    drain: NodeName


class ForgetRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A node that does not come back."""

    forget: NodeName


class MoveRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A shard that its owner of `epoch` is to give away; it means nothing to another owner."""

    move: Annotated[int, msgspec.Meta(ge=0, lt=SHARDS_MAX)]
    to: NodeName
    epoch: Annotated[int, msgspec.Meta(ge=1)]


class AdoptRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A shard whose log has lost its end, and shall go on behind the replica of a node. The node
    appends an ADOPT of `epoch` at the offset `end` for it."""

    adopt: Annotated[int, msgspec.Meta(ge=0, lt=SHARDS_MAX)]
    of: NodeName
    end: Annotated[int, msgspec.Meta(ge=0)]
    epoch: Annotated[int, msgspec.Meta(ge=1)]


class NodeRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A node of the cluster."""

    node: NodeName
    zone: Zone | None = None
    """The zone in which all nodes may be lost together; None: the node alone."""


def make_identity(
    cluster: str,
    shards: int,
    durability: Literal["os", "fsync", "fsync-all"],
    random_bytes: Callable[[int], bytes],
    replicas: int = NODES_MAX,
) -> ClusterIdentity:
    """A new cluster. Stamps differ, so that a frame is never taken for one of another shard."""
    stamps: dict[int, None] = {}
    while len(stamps) < shards:
        stamps[int.from_bytes(random_bytes(4), "big") or 1] = None
    return ClusterIdentity(
        format=META_FORMAT,
        cluster=cluster,
        shards=shards,
        durability=durability,
        stamps=tuple(stamps),
        id_secret=random_bytes(ID_SECRET_BYTES).hex(),
        link_secret=random_bytes(LINK_SECRET_BYTES).hex(),
        replicas=replicas,
    )


class ClusterMeta:
    """The state that the records up to an offset give."""

    def __init__(self, log: str) -> None:
        """`log` names the log in errors."""
        self.identity: ClusterIdentity | None = None
        self.nodes: dict[str, int] = {}
        """The number of each node, in the order of the numbers."""
        self.zones: dict[str, str] = {}
        """The zone of each node; empty: it has one of its own."""
        self.drained: set[str] = set()
        self.forgotten: set[str] = set()
        self.moves: dict[int, MoveRecord] = {}
        """The last one of each shard."""
        self.adoptions: dict[int, list[AdoptRecord]] = {}
        """All of each shard, also those that came to nothing."""
        self.next_offset = 0
        self._log = log

    def apply(self, offset: int, data: bytes) -> None:
        """Take in the next record.

        Raises NewerRecordError and FormatVersionError where a newer version wrote it, and
        RecordDamageError where it is no record. Nothing is applied then."""
        try:
            document = json.loads(data)
        except ValueError as error:
            raise RecordDamageError(self._log, offset, f"it is no JSON ({error})") from error
        if not isinstance(document, dict):
            raise RecordDamageError(self._log, offset, "it is no JSON object")
        if "format" in document:
            if self.identity is None:
                self.identity = self._identity(offset, document)
        elif "node" in document:
            node = self._converted(offset, document, NodeRecord)
            name = node.node
            if name not in self.nodes and len(self.nodes) == NODES_MAX:
                raise RecordDamageError(self._log, offset, f"there are {NODES_MAX} nodes already")
            self.nodes.setdefault(name, len(self.nodes) + 1)
            self.zones[name] = node.zone or ""
            self.drained.discard(name)
            self.forgotten.discard(name)
        elif "drain" in document:
            self.drained.add(self._converted(offset, document, DrainRecord).drain)
        elif "forget" in document:
            self.forgotten.add(self._converted(offset, document, ForgetRecord).forget)
        elif "move" in document:
            move = self._converted(offset, document, MoveRecord)
            self.moves[move.move] = move
        elif "adopt" in document:
            adoption = self._converted(offset, document, AdoptRecord)
            self.adoptions.setdefault(adoption.adopt, []).append(adoption)
        else:
            what = f"the fields {', '.join(sorted(document)) or 'of nothing'}"
            raise NewerRecordError(self._log, offset, what)
        self.next_offset = offset + 1

    def _identity(self, offset: int, document: dict[str, Any]) -> ClusterIdentity:
        version = document["format"]
        if isinstance(version, int) and version > META_FORMAT:
            where = f"{self._log} at offset {offset}"
            raise FormatVersionError(where, version, META_FORMAT)
        return self._converted(offset, document, ClusterIdentity)

    def _converted(self, offset: int, document: dict[str, Any], kind: type[Kind]) -> Kind:
        unknown = document.keys() - set(kind.__struct_fields__)
        if unknown:
            what = f"the fields {', '.join(sorted(unknown))}"
            raise NewerRecordError(self._log, offset, what)
        try:
            return msgspec.convert(document, kind)
        except msgspec.ValidationError as error:
            raise RecordDamageError(self._log, offset, str(error)) from error


class MetaLog:
    """The log of a cluster's records, read and written."""

    def __init__(self, log: EngineLog) -> None:
        self._log = log
        self._meta = ClusterMeta(log.name)

    def read(self) -> ClusterMeta:
        """The state of the cluster, from the log up to where it ends now.

        Raises EngineError where it cannot be read to there; the errors of `ClusterMeta.apply`."""
        for offset, data in read_to_end(self._log, self._meta.next_offset):
            self._meta.apply(offset, data)
        return self._meta

    def read_cluster(self) -> tuple[ClusterIdentity, dict[str, int]]:
        """The cluster's settings, and the numbers of its nodes. Raises ClusterMissingError, too."""
        meta = self.read()
        if meta.identity is None:
            raise ClusterMissingError(self._log.name)
        return meta.identity, meta.nodes

    def refuse_another(self, identity: ClusterIdentity) -> None:
        """Raise ClusterDiffersError if the cluster was made already, with another number of shards
        or of replicas, or another durability."""
        made = self.read().identity
        if made is None:
            return
        for what in ("shards", "durability", "replicas"):
            was, asked = getattr(made, what), getattr(identity, what)
            # An operator who made it before there was a choice runs the same command again.
            if was != asked and (what, was) != ("replicas", NODES_MAX):
                raise ClusterDiffersError(made.cluster, what, was, asked)

    def create(self, identity: ClusterIdentity) -> tuple[ClusterIdentity, bool]:
        """Make the cluster, unless it was made already. Returns its settings, and whether this call
        made it. A cluster that was made without a number of replicas stays so.

        Raises the same as `refuse_another`."""
        if self.read().identity is None:
            self._append(msgspec.json.encode(identity))
        self.refuse_another(identity)
        made = self._meta.identity
        assert made is not None
        return made, made == identity

    def register(self, name: str, zone: str | None = None) -> int:
        """The number of the node of that name, which is a new one if no node had the name, and
        which stands in that zone from now on.

        Raises ClusterMissingError; EngineSettingsError where one of them is no name; and
        EngineError where the log's answer did not come: the node may be registered then, and asks
        again with a log that it opens anew."""
        for what, word in (("node", name), ("zone", zone)):
            if word is not None and not re.match(NAME_PATTERN, word):
                reason = (
                    "it is not up to 64 letters, digits, '.', '_' and '-', a letter or a digit "
                    "first"
                )
                raise EngineSettingsError(f"the {what} {word!r}", reason, "rename it")
        _, nodes = self.read_cluster()
        meta = self._meta
        is_known = name in nodes and meta.zones[name] == (zone or "")
        if not is_known or name in meta.drained | meta.forgotten:
            self._append(msgspec.json.encode(NodeRecord(name, zone)))
            _, nodes = self.read_cluster()
        return nodes[name]

    def say(self, record: DrainRecord | ForgetRecord | MoveRecord | AdoptRecord) -> None:
        """Append an order to the nodes. Raises EngineError."""
        self._append(msgspec.json.encode(record))

    def _append(self, record: bytes) -> None:
        (offset,) = self._log.append([record])
        if offset is None:
            reason = "no answer came, it may be there or not"
            raise EngineError("append", self._log.name, reason, "look at the brokers, try again")
