"""Frames of a file, altered by somebody who knows how to make checksums.

A checksum tells what a disk does to a file. It tells nothing of who rewrites a frame and its
checksums: what is wrong then has to be seen in the rows. So tests read a file into frames, change
rows, and seal them again.

Cost: a copy of the file. Threads: one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from storage.frame import HEADER_BYTES, Header, Rows, decode_header, encode, padded
from storage.rows import DTYPES, LogKind


@dataclass(frozen=True, slots=True)
class OpenFrame:
    """A frame that can be changed."""

    header: Header
    rows: Rows
    payload: bytes

    def sealed(self) -> bytes:
        """Its bytes, with new checksums, counts and seqs."""
        return encode(
            LogKind(self.header.kind),
            self.rows.tobytes(),
            self.payload,
            first_seq=int(self.rows["seq"].min()),
            last_seq=int(self.rows["seq"].max()),
            created_ms=self.header.created_ms,
            stamp=self.header.stamp,
        )


def read_frames(path: Path) -> list[OpenFrame]:
    """The frames of a file, up to the first place where none is."""
    data = path.read_bytes()
    found: list[OpenFrame] = []
    offset = 0
    while header := decode_header(data[offset : offset + HEADER_BYTES], str(path), stamp=None):
        start = offset + HEADER_BYTES
        behind = start + header.rows_bytes
        if behind + header.payload_bytes > len(data):
            break  # A torn tail.
        rows = np.frombuffer(data[start:behind], DTYPES[LogKind(header.kind)]).copy()
        found.append(OpenFrame(header, rows, data[behind : behind + header.payload_bytes]))
        offset = padded(behind + header.payload_bytes)
    return found


def write_frames(path: Path, frames: Sequence[OpenFrame]) -> None:
    """A file with these frames and nothing else; those without rows are left out."""
    path.write_bytes(b"".join(frame.sealed() for frame in frames if len(frame.rows)))


def rewrite(path: Path, change: Callable[[Rows], Rows | None]) -> bool:
    """Give the rows of the first frame that `change` takes in place of them; it says None of those
    that are not for it. Whether there was one."""
    frames = read_frames(path)
    for number, frame in enumerate(frames):
        changed = change(frame.rows)
        if changed is not None:
            frames[number] = replace(frame, rows=changed)
            write_frames(path, frames)
            return True
    return False
