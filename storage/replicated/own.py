"""The owner's own log: groups on its own disk beside the quorum's memory (R8).

A quorum of the engine's servers has the answered groups in the memory of several machines. If all
of them lose power before they have written them, the owner's disk still has them. When the same
node claims the office again, and no other node has held it meanwhile, it appends the groups that
the log lacks, with the same seqs.

    DIR/messages/    a message log as of a server alone, of the epoch that
    DIR/OWN          says (JSON)

A group of an earlier epoch may contradict a later decision of another owner, so it is thrown away.
The groups that the node itself has written in the tenure before stay: a quorum's memory may still
be all that the log has of them.

It goes back to the last checkpoint and no further. Where the log has lost more than that, the
replica stands behind its end, and stops (OffsetRangeError). Its files then hold the groups that
were answered before, and when people have named it the log goes on behind them
(`storage.replicated.adoption`): the own log is appended there as ever.

Cost: a durable write per group, beside the engine's; a file more at each claim.
Threads: all here runs before the first append; then it is a `MessageLog`.
"""

import json
from collections.abc import Callable, Iterator
from typing import Final

from storage.errors import DamageError
from storage.files import Files, replace_file
from storage.frame import Damage, Frame
from storage.message_log import DIRECTORY, MessageLog, parse_segment_name
from storage.replicated.office import OfficeState

OWN_FILE: Final = "OWN"
_FILE_MAX_BYTES: Final = 4096


class OwnLog:
    """The directory of an own log, and the message log in it once it was begun."""

    def __init__(self, files: Files, make: Callable[[], MessageLog]) -> None:
        """`make` opens the message log that is in `files`."""
        self._files = files
        self._make = make

    def continues(self, claimed: OfficeState) -> bool:
        """Whether the own log may continue the log, which is as at the claim: no other node has
        decided anything since. (Another node may have claimed, and this node, too, and ended before
        a frame was written.) Raises StorageError."""
        epoch = self._read_epoch()
        return epoch is not None and epoch >= claimed.frame_epoch

    def resume(self, next_seq: int) -> tuple[MessageLog, list[Frame], int] | None:
        """Go on with the own log, where the log goes up to `next_seq`. Returns the message log, the
        frames that continue the log, and the first seq that is not there. None where that cannot
        be, since there is damage: then begin anew, and `lacking` tells which frames can be saved.

        Raises StorageError."""
        own = self._make()
        first_seq, behind = own.first_seq(), 0
        frames: list[Frame] = []
        is_whole = True
        for found in own.read(next_seq if first_seq is None else first_seq):
            if isinstance(found, Damage) or not found.payload_intact:
                is_whole = False
                continue
            behind = found.last_seq + 1
            if found.last_seq >= next_seq:
                frames.append(found)
        if not is_whole or (frames and frames[0].first_seq != next_seq):
            return None
        return own, frames, behind

    def reach(self, place: OfficeState) -> int:
        """The last seq that this node can bring back, if its files have all records before `place`.

        Raises StorageError."""
        reached = place.next_seq - 1
        if self.continues(place):
            for frame in self.lacking(place.next_seq):
                reached = frame.last_seq
        return reached

    def lacking(self, next_seq: int) -> Iterator[Frame]:
        """The frames that continue the log, which goes up to `next_seq`. Raises StorageError.

        Frames behind a damaged one are not returned: they do not continue the log."""
        is_whole = True
        for found in self._make().read(next_seq):
            is_whole &= isinstance(found, Frame) and found.payload_intact
            if is_whole and found.first_seq == next_seq:
                assert isinstance(found, Frame)
                yield found
                next_seq = found.last_seq + 1
            else:
                is_whole = False

    def take_over(self, epoch: int) -> None:
        """From now on the groups in the own log count as those of `epoch`. Called before any of
        them is appended, so that a crash in the middle loses none of the rest."""
        replace_file(self._files, OWN_FILE, json.dumps({"epoch": epoch}).encode() + b"\n")

    def begin(self) -> MessageLog:
        """Throw the own log away, and begin anew."""
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
