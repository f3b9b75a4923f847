"""What all readers of a shard's log, and all its replicas, have to agree on.

    I15    every reader's verdict on every record is that of one who reads from the beginning
    I16    replicas that have read to the same seq have the same rows, and the same catalog
    I17    what was answered counts: it stands in the log, with these bytes; where that has lost
           its end, in the files of the replica behind which it goes on

Rows are compared, not bytes: each replica files in batches of its own. And each deletes at its own
time, so of an hour one may have less, from its beginning on, if what is missing was settled.

Cost: reads the log and all files of all replicas. Threads: none.
"""

from collections.abc import Sequence
from typing import Any

from storage.buckets import is_day
from storage.catalog import Table
from storage.frame import Frame
from storage.replicated.office import OfficeState
from storage.replicated.reader import RecordReader
from storage.rows import HOUR_MS, LogKind
from tests.world.replicas.ledger import ReplicaLedger
from tests.world.replicas.node import IDENTITY, Cluster, Node
from tests.world.violation import Violation

SAME: tuple[Table, ...] = (Table.SUBJECTS, Table.SUBSCRIPTIONS, Table.DEAD_LETTERS)
"""Of these tables all replicas have the same, key by key."""
OF_HOURS: tuple[Table, ...] = (Table.KEYS, Table.CHANGES)
"""What of these is there twice is the same: some of it goes with its hour."""


def check_log(cluster: Cluster, ledger: ReplicaLedger) -> None:
    """I15, I17. Raises Violation."""
    reader = RecordReader(cluster.log.another(), IDENTITY.stamp, OfficeState())
    frames: dict[int, Frame] = {}
    end = cluster.log.end()
    assert end is not None
    while (offset := reader.office.state.next_offset) < end:
        for at, found in enumerate(reader.read(0), offset):
            known = cluster.verdicts.get(at, found.verdict)
            if known is not found.verdict:
                raise Violation(f"the record at {at}: {found.verdict!r}, not {known!r} (I15)")
            if found.frame is not None:
                frames[found.frame.first_seq] = found.frame
    for first_seq, rows, payload in ledger.frames:
        if first_seq < cluster.adopted_seq:
            continue  # The log has lost it, and the replicas have it: what is filed is compared.
        frame = frames.get(first_seq)
        if frame is None or (frame.rows.tobytes(), frame.payload) != (rows, payload):
            raise Violation(f"the group of {first_seq} was answered, and does not count (I17)")


def check_replicas(nodes: Sequence[Node]) -> None:
    """I16: all of them follow, have read to the end, and have made a checkpoint."""
    first, *others = nodes
    for other in others:
        _compare(first, other)


def _compare(one: Node, other: Node) -> None:
    where = f"{one} and {other}"
    assert one.standby is not None and other.standby is not None
    seqs = one.standby._replay.checkpoint_seq, other.standby._replay.checkpoint_seq
    if seqs[0] != seqs[1]:
        raise Violation(f"{where} have read the same log up to {seqs} (I16)")
    rows, others = _rows(one), _rows(other)
    for hour in rows.keys() | others.keys():
        longer, shorter = sorted((rows.get(hour, []), others.get(hour, [])), key=len, reverse=True)
        if shorter and longer[-len(shorter) :] != shorter:
            raise Violation(f"hour {hour} of {where}: {longer}, {shorter} (I16)")
        if missing := set(longer) - set(shorter):
            _must_have_gone(one, other, hour, missing)
    for table in SAME:
        left, right = _table(one, table), _table(other, table)
        if left != right:
            raise Violation(f"{table} of {where}: {left}, {right} (I16)")
    for table in OF_HOURS:
        left, right = _table(one, table), _table(other, table)
        for key in left.keys() & right.keys():
            if left[key] != right[key]:
                raise Violation(f"{table} of {where}, {key!r}: {left[key]!r}, {right[key]!r} (I16)")


def _must_have_gone(one: Node, other: Node, hour: int, missing: set[Any]) -> None:
    """Rows that one of two replicas lacks: only an hour that is over is deleted."""
    now_ms = one.cluster.clock.latest_ms
    if (hour + 1) * HOUR_MS > now_ms:
        raise Violation(f"hour {hour} is not over, and {one} or {other} lacks {missing} (I16)")


def _rows(node: Node) -> dict[int, list[tuple[Any, ...]]]:
    """All rows of the schedule log, with what they carry, by the hour that they are due in."""
    assert node.standby is not None
    store = node.standby._store
    log = store.hour_log(LogKind.SCHEDULE)
    found: dict[int, list[tuple[Any, ...]]] = {}
    for bucket, state in sorted(store.replay.hours.items()):
        for frame in log.scan(bucket, end=state.length, payload=True):
            if not isinstance(frame, Frame):
                raise Violation(f"{node}, hour {bucket}: {frame} (I16)")
            assert frame.payload is not None
            for row in frame.rows:
                hour = int(row["due_ms"]) // HOUR_MS if is_day(bucket) else bucket
                start, length = int(row["payload_offset"]), int(row["payload_length"])
                columns = {name: row[name].tobytes() for name in row.dtype.names or ()}
                columns["payload_offset"] = frame.payload[start : start + length]
                found.setdefault(hour, []).append(tuple(columns.values()))
    log.close()
    return found


def _table(node: Node, table: Table) -> dict[bytes, bytes]:
    assert node.standby is not None
    return dict(node.standby._store.catalog.scan(table))
