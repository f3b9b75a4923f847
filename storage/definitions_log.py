"""The definitions log: a second copy of all that the catalog holds and no other log knows.

    definitions/<generation, 20 digits>.definitions

An entry is the number of a table, a key and a value, all of them bytes to this module. A frame
holds the changes of one checkpoint. The newest row of each key gives its state. So the catalog is
an index that can be built again, and a damaged part of it can be written again from this log.

    append   the changes since the last checkpoint, one sync         → the place, for the catalog
    rewrite  the live entries alone, when the file is more than twice what it was after the last
             rewriting, and a slack: a file of the next generation, synced, then renamed

`record` does one of the two, and nothing counts before the catalog has committed the place that it
returns: then `committed` deletes the generation before. A crash leaves bytes behind the committed
length, or another generation; `resume` removes both (I7). Without a catalog the newest generation
counts, with all frames that verify.

Cost: of a checkpoint that defines nothing, none; otherwise one write, one fdatasync and 2 µs per
change. A rewriting reads and writes each live entry once, which its growth has paid for. Memory:
200 bytes per live entry while it is being rewritten. Threads: one instance belongs to one thread.
"""

import contextlib
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from storage.errors import DamageError, ShortageError
from storage.files import Buffer, File, Files
from storage.frame import (
    CRC_BYTES,
    Damage,
    Frame,
    encode_parts,
    scan,
    seal,
    sealed_crc,
    unseal,
    with_torn_payload,
)
from storage.rows import DEFINITION_DTYPE, FLAG_REMOVED, LogKind

DIRECTORY = "definitions"
SUFFIX = ".definitions"
NEW_SUFFIX = ".new"
SLACK_BYTES = 1024 * 1024
_FRAME_BYTES = 1024 * 1024
_NAME = re.compile(rf"([0-9]{{20}}){re.escape(SUFFIX)}")


class Definition(NamedTuple):
    """An entry of a table, or (value None) its removal."""

    table: int
    key: bytes
    value: bytes | None


class DefinitionsPlace(NamedTuple):
    """How much of the log a checkpoint covers."""

    generation: int = 0
    """0: there is no file yet."""
    length: int = 0
    base_length: int = 0
    """The length when the generation was written; from there on it has grown."""


State = dict[tuple[int, bytes], bytes]
"""Values by table and key."""


def definitions_path(generation: int) -> str:
    """The path of the file of a generation."""
    return f"{DIRECTORY}/{generation:020d}{SUFFIX}"


def parse_definitions_name(name: str) -> int | None:
    """The generation of a file name, or None if it is not one of this log."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else None


def definition_generations(files: Files) -> list[int]:
    """The generations that have a file, oldest first."""
    numbers = (parse_definitions_name(name) for name in files.list(DIRECTORY))
    return sorted(number for number in numbers if number is not None)


def encode_definitions(
    definitions: Iterable[Definition], *, seq: int, stamp: int
) -> Iterator[tuple[Buffer, ...]]:
    """The frames that hold the definitions, each in pieces that stand one behind the other."""
    batch: list[Definition] = []
    batch_bytes = 0
    for one in definitions:
        batch.append(one)
        batch_bytes += len(one.key) + len(one.value or b"")
        if batch_bytes >= _FRAME_BYTES:
            yield _frame(batch, seq, stamp)
            batch, batch_bytes = [], 0
    if batch:
        yield _frame(batch, seq, stamp)


def _frame(batch: Sequence[Definition], seq: int, stamp: int) -> tuple[Buffer, ...]:
    payloads = [seal(one.key + (one.value or b"")) for one in batch]
    rows = np.zeros(len(batch), DEFINITION_DTYPE)
    rows["seq"] = seq
    rows["table"] = [one.table for one in batch]
    rows["flags"] = [FLAG_REMOVED if one.value is None else 0 for one in batch]
    rows["key_length"] = [len(one.key) for one in batch]
    lengths = np.array([len(payload) for payload in payloads], np.int64)
    rows["payload_offset"] = np.cumsum(lengths) - lengths
    rows["payload_length"] = lengths
    rows["payload_crc"] = [sealed_crc(payload) for payload in payloads]
    return encode_parts(
        LogKind.DEFINITIONS,
        rows.tobytes(),
        b"".join(payloads),
        first_seq=seq,
        last_seq=seq,
        created_ms=0,
        stamp=stamp,
    )


def scan_definitions(file: File, end: int, *, stamp: int) -> Iterator[Frame | Damage]:
    """Frames, with their payloads, and damage up to `end`; a cut within payloads is torn, too."""
    items = scan(file, 0, end, kind=LogKind.DEFINITIONS, stamp=stamp, payload=True)
    return with_torn_payload(items)


def definitions_in(frame: Frame) -> Iterator[Definition]:
    """The definitions in the rows of a frame. Rows with a damaged payload are left out."""
    assert frame.payload is not None
    for _, table, flags, key_length, start, length, _ in frame.rows.tolist():
        data = unseal(frame.payload[start : start + length])
        if data is not None and key_length <= len(data):
            value = None if flags & FLAG_REMOVED else data[key_length:]
            yield Definition(table, data[:key_length], value)


def apply(definitions: Iterable[Definition], state: State) -> None:
    """Bring a state up to date."""
    for table, key, value in definitions:
        if value is None:
            state.pop((table, key), None)
        else:
            state[table, key] = value


class DefinitionsLog:
    """The newest generation, for who writes it. `resume` comes first."""

    def __init__(self, files: Files, *, stamp: int, slack_bytes: int = SLACK_BYTES) -> None:
        self._files = files
        self._stamp = stamp
        self._slack_bytes = slack_bytes
        self._file: File | None = None
        self._committed = self._recorded = DefinitionsPlace()
        """The place that the catalog names; and its place if the last commit took effect."""
        self._source: Callable[[], Iterable[Definition]] | None = None
        self._is_name_durable = False
        """A process that was killed may have left a name that is not durable yet."""
        self._is_next_there = False
        """A generation newer than the recorded one may have its name, and no commit names it."""
        self.damage: Damage | None = None
        """The damage that a rewriting found; then the log goes on in the file that it has."""
        files.make_directory(DIRECTORY)

    def resume(self, place: DefinitionsPlace) -> Damage | None:
        """Go on from a place that the catalog names. Removes all bytes behind it (I7).

        Returns the missing stretch, if there is one: then call `start_over`."""
        self._committed = self._recorded = place
        self._remove_others(place.generation)
        if not place.generation:
            return None
        path, size = definitions_path(place.generation), 0
        with contextlib.suppress(FileNotFoundError):
            self._file = self._files.open(path)
            size = self._file.size()
        if self._file is None or size < place.length:
            reason = f"the file has {size} bytes, the catalog says {place.length}"
            return Damage(path, size, place.length, reason, torn=False)
        if size > place.length:
            self._file.truncate(place.length)
        return None

    def start_over(self, source: Callable[[], Iterable[Definition]]) -> None:
        """Let the next `record` write a new generation, of what `source` yields by then."""
        self._source = source

    # ── a checkpoint ───────────────────────────────────────────────────────────────────────────

    def record(self, changes: Sequence[Definition], seq: int) -> DefinitionsPlace:
        """Make the changes since the last checkpoint durable, for the checkpoint at `seq`.

        If it fails, or the catalog does not commit the place that it returns, call it again, with
        these changes and more. A commit that failed may have taken effect, so the changes that were
        recorded for it stay, and the log goes on behind them. Raises ShortageError, SyncError."""
        if self._source is not None:
            self._rewrite(_latest(self._source(), changes), seq)
        elif changes and not (self._has_grown and self._rewrite_live(changes, seq)):
            self._append(changes, seq)
        return self._recorded

    def committed(self) -> None:
        """The catalog names the place that `record` returned: the generation before may go."""
        before, self._committed = self._committed, self._recorded
        self._source = None
        for generation in range(max(1, before.generation), self._committed.generation):
            with contextlib.suppress(FileNotFoundError):
                self._files.unlink(definitions_path(generation))

    @property
    def _has_grown(self) -> bool:
        _, length, base_length = self._recorded
        return length > 2 * base_length + self._slack_bytes and self.damage is None

    def _append(self, changes: Sequence[Definition], seq: int) -> None:
        generation, length, base_length = self._recorded
        if self._is_next_there:
            # Not recorded in the end. Without a catalog it would count as the newest.
            with contextlib.suppress(FileNotFoundError):
                self._files.unlink(definitions_path(generation + 1))
            self._files.sync_directory(DIRECTORY)
            self._is_next_there = False
        generation = generation or 1
        if self._file is None:
            self._is_name_durable = False
            self._file = self._files.open(definitions_path(generation), create=True)
        if self._file.size() > length:
            self._file.truncate(length)  # Bytes that were written and not recorded.
        for parts in encode_definitions(changes, seq=seq, stamp=self._stamp):
            self._file.pwrite(parts, length)
            length += sum(map(len, parts))
        self._file.fdatasync()
        if not self._is_name_durable:
            self._files.sync_directory(DIRECTORY)
            self._is_name_durable = True
        self._recorded = DefinitionsPlace(generation, length, base_length)

    def _rewrite_live(self, changes: Sequence[Definition], seq: int) -> bool:
        """Write the live entries alone; False if that cannot be: then it is appended to."""
        try:
            self._rewrite(_latest(self._live(), changes), seq)
        except ShortageError:
            return False
        except DamageError as error:
            reason = error.reason
            self.damage = Damage(error.path, error.offset, error.offset, reason, torn=False)
            return False
        return True

    def _rewrite(self, definitions: Iterable[Definition], seq: int) -> None:
        generation, length = self._recorded.generation + 1, 0
        path = definitions_path(generation)
        file = self._files.open(path + NEW_SUFFIX, create=True)
        try:
            file.truncate(0)
            for parts in encode_definitions(definitions, seq=seq, stamp=self._stamp):
                file.pwrite(parts, length)
                length += sum(map(len, parts))
            file.fdatasync()
        except (ShortageError, DamageError):
            self._files.unlink(path + NEW_SUFFIX)  # There may be room for less.
            raise
        finally:
            file.close()
        self._is_next_there = True  # Even if the call fails: it may have had its effect.
        self._files.rename(path + NEW_SUFFIX, path)
        self._files.sync_directory(DIRECTORY)
        self._close_file()
        self._recorded, self._is_next_there = DefinitionsPlace(generation, length, length), False

    def _live(self) -> Iterator[Definition]:
        """The definitions in the file; raises DamageError at the first damaged place."""
        places: dict[tuple[int, bytes], tuple[int, int]] = {}
        file = self._file
        if file is None:
            file = self._file = self._files.open(definitions_path(self._recorded.generation))
        for found in scan_definitions(file, self._recorded.length, stamp=self._stamp):
            if isinstance(found, Damage):
                raise found.error()
            if not found.payload_intact:
                reason = found.unreadable or "the payloads do not match their checksum"
                raise DamageError(file.path, found.payload_start, reason)
            starts = found.payload_start + CRC_BYTES + found.rows["payload_offset"].astype(np.int64)
            for one, start in zip(definitions_in(found), starts.tolist(), strict=True):
                if one.value is None:
                    places.pop((one.table, one.key), None)
                else:
                    places[one.table, one.key] = (start + len(one.key), len(one.value))
        for (table, key), (offset, length) in places.items():
            yield Definition(table, key, file.pread(length, offset))

    # ── files ──────────────────────────────────────────────────────────────────────────────────

    def _remove_others(self, generation: int) -> None:
        """Delete all other generations, and files that were never finished; durably."""
        for name in self._files.list(DIRECTORY):
            other = parse_definitions_name(name.removesuffix(NEW_SUFFIX))
            if other is not None and name != definitions_path(generation).rpartition("/")[2]:
                self._files.unlink(f"{DIRECTORY}/{name}")
        # Also where there was none: an earlier call may have come no further than to here.
        self._files.sync_directory(DIRECTORY)

    def _close_file(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def close(self) -> None:
        """Close the file."""
        self._close_file()


def _latest(
    definitions: Iterable[Definition], changes: Sequence[Definition]
) -> Iterator[Definition]:
    """The entries, with changes applied that are newer."""
    changed = {(one.table, one.key): one for one in changes}
    older = (one for one in definitions if (one.table, one.key) not in changed)
    return itertools.chain(older, (one for one in changed.values() if one.value is not None))
