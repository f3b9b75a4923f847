"""The owner's own log: groups on its own disk beside the quorum's memory (R8).

A quorum of the engine's servers has what was answered in the memory of several machines. If all of
them lose power before they have written it, the owner's disk still has it; so when the same node
claims the office again, and nobody else has held it meanwhile, it appends what the log lacks, with
the same seqs.

    DIR/messages/    a message log as of a server alone, of the epoch that
    DIR/OWN          says (JSON)

What a group of an earlier epoch says may contradict what another owner has decided since, so it is
thrown away. So is everything once it stands in the log under the new epoch.

Cost: a durable write per group, beside the engine's; a file more at each claim.
Threads: `resume` runs before the first append; then it is a `MessageLog`.
"""

import json
from collections.abc import Callable, Iterator
from typing import Final

from storage.errors import DamageError
from storage.files import Files, replace_file
from storage.frame import Damage, Frame
from storage.message_log import DIRECTORY, MessageLog, parse_segment_name

OWN_FILE: Final = "OWN"
_FILE_MAX_BYTES: Final = 4096


class OwnLog:
    """The directory of an own log, and the message log in it once it was begun."""

    def __init__(self, files: Files, make: Callable[[], MessageLog]) -> None:
        """`make` opens the message log that is in `files`."""
        self._files = files
        self._make = make

    def lacking(self, epoch: int, next_seq: int) -> Iterator[Frame]:
        """The frames that continue the log, which goes up to `next_seq`, as it was before the claim
        of `epoch`. Nothing where others were in office since. Raises StorageError.

        What is behind a damaged frame is not returned: it does not continue the log."""
        if self._read_epoch() != epoch - 1:
            return
        for found in self._make().read(next_seq):
            if isinstance(found, Damage) or found.first_seq != next_seq or not found.payload_intact:
                return
            yield found
            next_seq = found.last_seq + 1

    def take_over(self, epoch: int) -> None:
        """What is there counts as that of `epoch` from now on: before any of it is appended, so
        that a crash in the middle loses nothing of the rest."""
        replace_file(self._files, OWN_FILE, json.dumps({"epoch": epoch}).encode() + b"\n")

    def begin(self) -> MessageLog:
        """Throw away what is there, and begin anew."""
        self._files.make_directory(DIRECTORY)
        for name in self._files.list(DIRECTORY):
            if parse_segment_name(name) is not None:
                self._files.unlink(f"{DIRECTORY}/{name}")
        self._files.sync_directory(DIRECTORY)
        return self._make()

    def _read_epoch(self) -> int | None:
        try:
            file = self._files.open(OWN_FILE)
        except FileNotFoundError:
            return None
        try:
            text = file.pread(_FILE_MAX_BYTES, 0)
        finally:
            file.close()
        try:
            return int(json.loads(text)["epoch"])
        except (ValueError, KeyError, TypeError) as error:
            raise DamageError(OWN_FILE, 0, f"not a file of an epoch ({error})") from error
