"""A node's rights to answer, deliver and claim now: R1, R2, R3 and R7 of a shard's replicated log.

    R1  An owner answers for a record only if the log gave it the offset that follows the last one
        the owner knows: by having written it, or by having read what others have written between
        (`storage.replicated.holder`). Then no claim that it does not know stands between, and it
        counts. All else is unknown: no request is answered, and the owner's time is over.
    R2  An owner delivers only within LEASE_MS - MARGIN_MS after it *sent* its last record that
        counts.
    R3  Others claim when they have *read* nothing that counts for LEASE_MS, and RANK_MS more for
        each that goes before them, if the log ends where they stand. A node that has never heard
        the last owner itself waits OWNER_MS for it, where its disk counts (R8).
    R7  A node whose clock is not that of the last owner does not claim, nor does one whose clock is
        behind the last record: its tenure would begin there, and would stand still until then.

Why no two nodes have a lease at one time (I14): a claim that counts names the last record that
counts (`storage.replicated.office`), so the claimant has read it. It was read after it was sent;
and the claimant's LEASE_MS from there end after the owner's LEASE_MS - MARGIN_MS, unless the one
stopwatch runs 6/5 as fast as the other. Clocks need not agree, only run at about the same rate.
Where an owner has left of its own accord its lease had ended before it said so.

The condition that the log ends where the claimant stands is not needed for that. But a claim that
is bound to be void takes an offset which the owner does not expect: the owner has to read, and
answers later.

All times are arguments. `now_ms` is a stopwatch that nothing sets and that goes on while the
machine sleeps (CLOCK_BOOTTIME); `wall_ms` is the clock, in ms since 1970.

Cost: a comparison or two. Threads: `Tenure.holds` may be asked from any thread, all else belongs to
the thread that reads the log and writes to it.

The source of the lease: Gray and Cheriton, "Leases", SOSP 1989; here the grant of the lease is a
record in the log instead of an answer of a server.
"""

from collections import deque
from typing import Final, Self

from storage.replicated.envelope import NOBODY, Adopt, LogRecord
from storage.replicated.office import Office, OfficeState, RecordDecision

LEASE_MS: Final = 3000
"""How long nothing may be read that counts before others claim."""
MARGIN_MS: Final = 500
"""How much sooner the owner stops."""
BEAT_MS: Final = 500
"""After which an owner that has nothing to say says so."""
RANK_MS: Final = 300
"""How much longer than the one before each in the order of replicas waits."""
OWNER_MS: Final = 60_000
"""After all servers of the engine, and all nodes, have lost power: how long the others wait for the
last owner, whose disk holds records that the engine may have lost."""
CLOCKS_MS: Final = 1000
"""By how much the clocks of two nodes may differ."""

_COMPARISONS_MIN = 4
_COMPARISONS_MAX = 16


class Tenure:
    """A node's time in office, from its CLAIM that counts: the records it answers, its lease."""

    def __init__(self, office: Office, sent_ms: int) -> None:
        """The owner in `office` is this node, and its CLAIM was sent at `sent_ms`."""
        self._office = office
        self._claim_offset = office.state.claim_offset
        self._has_ended = False
        self._sent_ms = sent_ms

    @classmethod
    def of(cls, office: Office, claim_offset: int, sent_ms: int) -> Self | None:
        """The tenure of the CLAIM that was sent at `sent_ms` and got `claim_offset`; None if it
        does not count, or not any more.

        The office has read up to the claim by then. A claim is known by its offset and not by node
        and epoch, since an earlier process of the node may have claimed the same epoch: others
        have waited since *that* claim, and not since `sent_ms`."""
        assert office.state.next_offset > claim_offset, (office.state, claim_offset)
        tenure = cls(office, sent_ms)
        return None if tenure.is_over or office.state.claim_offset != claim_offset else tenure

    @property
    def is_over(self) -> bool:
        """Whether the node has to leave the office; it may come back with a new claim."""
        state = self._office.state
        is_another = state.claim_offset != self._claim_offset or state.owner == NOBODY
        return self._has_ended or is_another

    @property
    def beat_due_ms(self) -> int:
        """When the next BEAT has to be sent, if nothing else is."""
        return self._sent_ms + BEAT_MS

    def holds(self, now_ms: int) -> bool:
        """R2: whether the node may deliver."""
        return now_ms < self._sent_ms + LEASE_MS - MARGIN_MS and not self.is_over

    def appended(self, record: LogRecord, offset: int | None, sent_ms: int) -> bool:
        """R1: the log has answered the append of the owner's next record, which was sent at
        `sent_ms`, with `offset` (None: with an error, or not in time). Returns whether it counts,
        so that the callers that wait for it may be answered.

        If not, it may count all the same, and the tenure is over. Answers are taken in the order in
        which their records were sent. Records of other nodes may be read (`Office.apply`) while no
        append is under way: they are expected then."""
        if self.is_over or offset != self._office.state.next_offset:
            self._has_ended = True
            return False
        if self._office.apply(offset, record) is RecordDecision.VOID:
            # A record that was read in between has cut its frame in two, or was the same record,
            # sent twice.
            self._has_ended = True
            return False
        assert sent_ms >= self._sent_ms, (sent_ms, self._sent_ms)
        self._sent_ms = sent_ms
        return True

    def end(self) -> None:
        """Deliver and answer nothing from now on. It comes before a RELEASE is sent: others claim
        as soon as they have read it."""
        self._has_ended = True


class Follower:
    """A node that reads the log, and claims the office when it hears no owner there."""

    def __init__(self, node: int, rank: int, now_ms: int, *, waits_for_owner: bool = False) -> None:
        """`rank`: how many replicas of the shard go before this one.

        `waits_for_owner`: the last owner's disk may hold records that the log has lost (R8), so an
        owner that this node has never heard gets OWNER_MS to come back."""
        assert node != NOBODY
        self._node = node
        self.rank = rank
        """May be set by any thread."""
        self._heard_ms = now_ms
        self._owner_has_more = self._waits_for_owner = waits_for_owner
        self._all_read_ms = now_ms - BEAT_MS - 1
        self._compared_ms = now_ms - BEAT_MS
        self._aheads_ms: deque[int] = deque(maxlen=_COMPARISONS_MAX)

    def read(self, record: LogRecord, verdict: RecordDecision, now_ms: int, wall_ms: int) -> None:
        """A record was read from the log, and the office has judged it."""
        if verdict is not RecordDecision.VOID:
            self._heard_ms = now_ms
            is_fresh = now_ms - self._all_read_ms <= BEAT_MS
            self._waits_for_owner &= not is_fresh
            if isinstance(record, Adopt):
                # The owner's disk holds the records that it has answered behind its last
                # checkpoint.
                self._waits_for_owner = self._owner_has_more
            if is_fresh and now_ms - self._compared_ms >= BEAT_MS:
                self._compared_ms = now_ms
                self._aheads_ms.append(wall_ms - record.clock_ms)

    def read_all(self, asked_ms: int) -> None:
        """There was nothing more to read when the log was asked, at `asked_ms`. Records that are
        read from now on came into the log later than that."""
        self._all_read_ms = asked_ms

    def could_not_ask(self, now_ms: int) -> None:
        """The log did not say where it ends. An owner could not be heard either: it gets its whole
        time once more."""
        self._heard_ms = now_ms

    def is_due(self, state: OfficeState, now_ms: int) -> bool:
        """Whether the silence has been long enough to ask where the log ends."""
        return now_ms - self._heard_ms >= self._silence_ms(state)

    def clock_differs(self, state: OfficeState, wall_ms: int) -> bool:
        """R7: whether the clock of this node, which shows `wall_ms`, is not that of the last owner.
        The node claims nothing then, and has to say so to people.

        The last record says that the owner's time had come so far. A clock that is behind that by
        more than CLOCKS_MS is another one, also at a node that was not there to compare.

        A clock seems to be ahead of the one in a record by its real lead plus the time that the
        record was on its way. So the least of several differences counts. Only records are compared
        that came into the log while this node was reading it: a record that it finds there at its
        start may have been written long ago. And only one in BEAT_MS is compared, because records
        that were held up together would count as many."""
        if state.clock_ms - wall_ms > CLOCKS_MS:
            return True
        if len(self._aheads_ms) < _COMPARISONS_MIN:
            return False
        return abs(min(self._aheads_ms)) > CLOCKS_MS

    def may_claim(self, state: OfficeState, end: int | None, now_ms: int, wall_ms: int) -> bool:
        """R3, R7: whether to send a CLAIM at once. `state` is that of the office as this node has
        read it, and `end` the offset behind the last record, as the log has just said (None: it
        could not)."""
        if end is None:
            self.could_not_ask(now_ms)
        may = end == state.next_offset and self.is_due(state, now_ms)
        return may and not self.clock_differs(state, wall_ms)

    def _silence_ms(self, state: OfficeState) -> int:
        """How long to wait since a record was heard that counts.

        In a vacant office no node has a lease. The wanted successor comes first, then all others by
        rank. If it does not come, the office is open to them."""
        rank = self.rank
        if state.owner != NOBODY:
            if self._waits_for_owner and state.owner != self._node:
                return OWNER_MS
            return LEASE_MS + RANK_MS * rank
        if state.successor == NOBODY:
            return RANK_MS * rank
        return 0 if state.successor == self._node else RANK_MS * (rank + 1)
