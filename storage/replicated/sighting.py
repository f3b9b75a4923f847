"""The likely owner of a shard, from a piece of its log that may begin anywhere.

`storage.replicated.office` judges each record, and for that has to begin where the log does, or at
a checkpoint. A process that only wants to show the owner has neither, and the log may be many
gigabytes. Here the last few hundred records are enough, since

    a node that writes anything but a CLAIM has read that its own CLAIM of this epoch counts

so such a record of the highest epoch names the owner. A CLAIM alone names no owner: it may be void.
Nor does an ADOPT: its node claims behind it. Records of lower epochs come from owners that do not
know yet that they are none.

The piece does not tell where the owner is found, unless its CLAIM is in it.

Cost: that of decoding, 3 µs a record. Threads: none of its own.

Rejected: an Office that believes the first record it sees. Where that is a late one of an earlier
owner, all that follow would be void.
"""

from storage.replicated.envelope import NOBODY, Adopt, Claim, LogRecord, Release


class Sighting:
    """The office as a piece of a shard's log shows it; not for deciding anything."""

    def __init__(self) -> None:
        self.epoch = 0
        """The highest epoch in which an owner was seen; 0: no owner was seen."""
        self.owner = NOBODY
        """The number of the node; NOBODY: it has left, or no owner was seen."""
        self.clock_ms = 0
        """The wall clock of the owner when it wrote the last record that was seen of it."""
        self._addresses: dict[tuple[int, int], str] = {}
        self._place = (0, NOBODY)

    @property
    def address(self) -> str | None:
        """Where the owner can be found, if its CLAIM was seen."""
        return None if self.owner == NOBODY else self._addresses.get(self._place)

    def see(self, record: LogRecord) -> None:
        """Take in the next record."""
        if record.epoch < self.epoch:
            return
        place = (record.epoch, record.node)
        if isinstance(record, Adopt):
            return
        if isinstance(record, Claim):
            # The first one counts, if one of this node does. A process that died may have written
            # it, but only the one whose CLAIM counts goes on in its epoch.
            self._addresses.setdefault(place, record.address)
            return
        self._place = place
        self.epoch = record.epoch
        self.owner = NOBODY if isinstance(record, Release) else record.node
        self.clock_ms = record.clock_ms
