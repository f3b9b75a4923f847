"""Verdicts that are kept: an hour that is settled and was found sound is not judged again.

    DIR/shard-0-5f3a9c01/2026-11-20T15.verdict    the facts of an hour, sealed, below a signature

A verdict counts as long as its signature matches. The signature covers the lengths of the two files
of the hour, the times when they were changed last, and the headers of all their frames, each of
which has the checksum of its rows. It also covers the catalog's entry for the hour, the stamp of
the directory, and the version of this software. If the signature differs, or the file of the
verdict is damaged or is none, the hour is judged again.

Only hours that are retired, clean and completely filed are kept; an accusation is worked out anew
each time. A verdict is about rows. `delayserver check` is the command that finds a byte of them
that a disk has lost since, without a sign.

Rejected: one file of all verdicts. A new hour would write those of a year again, and one bad byte
would cost all of them.

Cost: a header is 0.6 µs where frames are short, else 7; some 100 µs for each file. Threads: the
caller's.
"""

import contextlib
import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from delayserver import __version__
from delayserver.errors import PipelineError
from delayserver.pipeline.audits.facts import COUNT_DTYPE, HourFacts, unpack_facts
from delayserver.pipeline.states.entry_states import SETTLED_DTYPE
from delayserver.records.direct import DIRECT_FIRST_ID
from storage.buckets import bucket_name, bucket_path
from storage.files import size_of
from storage.frame import seal, unseal
from storage.frame_runs import scan_heads
from storage.rows import LogKind

if TYPE_CHECKING:
    from delayserver.pipeline.audits.plan import HourTask, ShardBasis

_SIGNATURE_BYTES = 16
_SUFFIXES = {False: ".verdict", True: ".bodies.verdict"}


class VerdictsError(PipelineError):
    """Verdicts cannot be kept in their directory."""

    def __init__(self, error: OSError) -> None:
        super().__init__(
            f"verdicts cannot be kept in {error.filename}: {error.strerror}; give --verdicts a "
            "directory that can be written"
        )


@dataclass(slots=True)
class Verdicts:
    """A directory of verdicts. Raises VerdictsError if it cannot be made."""

    root: Path
    _signatures: dict[tuple[int, int], bytes] = field(default_factory=dict)
    """By shard and hour: signatures that were looked up, and that sign the facts once judged."""

    def __post_init__(self) -> None:
        with _writing():
            self.root.mkdir(parents=True, exist_ok=True)

    def find(self, basis: "ShardBasis", task: "HourTask") -> HourFacts | None:
        """The facts of an hour as it is now; None: it must be judged."""
        is_open = not task.retired_through_seq
        # Rows stay in the message log until their segment is full; below the checkpoint they are
        # filed.
        if is_open or (task.unfiled["seq"] > basis.snapshot.checkpoint_seq).any():
            return None
        signature = _signature(basis, task)
        self._signatures[task.shard, task.hour] = signature
        try:
            found = unseal(self._path(basis, task).read_bytes())
        except OSError:
            return None
        if found is None or found[:_SIGNATURE_BYTES] != signature:
            return None
        try:
            facts = unpack_facts(found[_SIGNATURE_BYTES:])
        except (msgspec.DecodeError, ValueError):
            return None
        return facts if _are_named(facts, basis) else None

    def keep(self, basis: "ShardBasis", task: "HourTask", facts: HourFacts) -> None:
        """Keep the facts of a whole hour. Raises VerdictsError."""
        signature = self._signatures.pop((task.shard, task.hour), None)
        if signature is None or facts.damage or facts.problems.any():
            return
        path = self._path(basis, task)
        with _writing():
            path.parent.mkdir(exist_ok=True)
            # Not synced: a file that a crash leaves incomplete does not match its checksum.
            path.write_bytes(seal(signature + facts.pack()))

    def tidy(self, basis: "ShardBasis") -> None:
        """Delete the verdicts of hours that the server has deleted. Raises VerdictsError."""
        names = {
            bucket_name(hour) + suffix
            for hour in basis.snapshot.hours
            for suffix in _SUFFIXES.values()
        }
        with _writing(), contextlib.suppress(FileNotFoundError):
            for path in self._directory(basis).iterdir():
                if path.name not in names and path.suffix == ".verdict":
                    path.unlink()

    def _path(self, basis: "ShardBasis", task: "HourTask") -> Path:
        return self._directory(basis) / (bucket_name(task.hour) + _SUFFIXES[task.with_bodies])

    def _directory(self, basis: "ShardBasis") -> Path:
        return self.root / f"shard-{basis.directory.shard}-{basis.directory.stamp:08x}"


@contextlib.contextmanager
def _writing() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise VerdictsError(error) from error


def _signature(basis: "ShardBasis", task: "HourTask") -> bytes:
    """A digest of everything that a verdict rests on."""
    directory, files = basis.directory, basis.directory.files
    digest = hashlib.blake2b(digest_size=_SIGNATURE_BYTES)
    known = (
        *(__version__, COUNT_DTYPE.descr, SETTLED_DTYPE.descr),
        *(directory.stamp, directory.shard, directory.moment != ""),
        *(task.hour, task.state.pack(), task.retired_through_seq, task.with_bodies),
    )
    digest.update(repr(known).encode())
    for kind in (LogKind.SCHEDULE, LogKind.DISPATCH):
        path = bucket_path(kind, task.hour)
        size = size_of(files, path)
        digest.update(f"{path} {size} {_changed_ns(directory.root, path)}".encode())
        if not size:
            continue
        try:
            file = files.open(path)
        except FileNotFoundError:
            continue
        with contextlib.closing(file):
            for heads in scan_heads(file, 0, size, kind=kind, stamp=directory.stamp):
                digest.update(heads.headers.tobytes())
    return digest.digest()


def _changed_ns(root: str, path: str) -> int:
    """When a file was changed last; 0: it is an object of an export, which never changes."""
    try:
        return os.stat(os.path.join(root, path)).st_mtime_ns
    except OSError:
        return 0


def _are_named(facts: HourFacts, basis: "ShardBasis") -> bool:
    """Whether the names of all subjects and subscriptions of an hour are known."""
    snapshot = basis.snapshot
    subjects = set(facts.counts["subject_id"].tolist())
    subscriptions = set(facts.counts["subscription_id"].tolist()) - {0, DIRECT_FIRST_ID}
    return subjects <= snapshot.subjects.keys() and subscriptions <= snapshot.subscriptions.keys()
