"""The way of a group: open → committing → durable → filed → behind a checkpoint.

    Sequencer.group ─flush─▶ committer ─on_committed─▶ replay ─on_filed─▶ ─on_checkpoint─▶ forgotten

No timer closes a group. On a disk that syncs quickly, the event loop closes a small group and
commits it itself: a thread would cost more, there and back (Redis does the same before it answers).
Before that the group stays open for one turn more, for requests that are on their way: a client
that gets an answer sends the next request, and a group costs as much as ten messages in it. On any
other disk the committer's thread syncs one group while the next one fills; that one is closed when
the sync has come back. So one sync answers all requests that came meanwhile.
Records that are accepted and not filed yet are bounded: at the bound, a publish is answered with an
error. A record that the server itself has to make (a retry, a death) is not refused. If a group has
no room for it, the group is closed and waits, and the records go on in the next one.

Cost: O(1) per group. Threads: belongs to the event loop.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from operator import attrgetter
from typing import Final, Protocol

from delayserver.config import Settings
from delayserver.decisions.group import Group
from delayserver.decisions.sequencer import Sequencer
from delayserver.errors import OverloadedError, StoppingError

SLOW_MS: Final = 10_000
"""Many records that have not been filed for so long show that the disk does not keep up."""


class GroupPorts(Protocol):
    """The parts that take a group on. No call waits."""

    def wake(self) -> None:
        """Call `Groups.flush` soon: at the end of this turn of the event loop."""

    def is_quick(self) -> bool:
        """Whether groups are made durable sooner than handed over."""

    def commit(self, group: Group, *, at_once: bool) -> None:
        """Make a group durable; answer with `on_committed` or `on_commit_failed`.

        `at_once`: the answer may come before this returns."""

    def file(self, group: Group) -> None:
        """File a durable group; answer with `on_filed`."""


class Groups:
    """The groups that are on their way."""

    def __init__(
        self,
        settings: Settings,
        sequencer: Sequencer,
        ports: GroupPorts,
        holds_office: Callable[[], bool] = lambda: True,
    ) -> None:
        """`holds_office`: whether nobody else can own the shard by now. Nothing is logged that
        could not be."""
        self._settings = settings
        self._sequencer = sequencer
        self._ports = ports
        self._committing: Group | None = None
        self._full: deque[Group] = deque()
        """Closed groups that wait for the committer, before the open one."""
        self._unfiled: list[Group] = []
        self._unfiled_bytes = 0
        self._wake_asked = False
        self._is_last_turn = False
        """The gathered records have had their one turn more."""
        self.durable_seq = self.filed_seq = self.checkpoint_seq = sequencer.next_seq - 1
        self._gathered: list[Callable[[], object]] = []
        self._urgent: list[Callable[[], object]] = []
        self._imports: deque[Callable[[], None]] = deque()
        self._import_seq = 0
        self.stopping = False
        self._holds_office = holds_office
        self.committed_total = 0

    # ── the door ───────────────────────────────────────────────────────────────────────────────

    def admit(self, total_bytes: int) -> None:
        """Refuse a request that cannot be accepted now; every command that logs asks first.

        Raises OverloadedError, StoppingError."""
        if self.stopping:
            raise StoppingError("the server is stopping")
        if not self._holds_office():
            raise OverloadedError("the log of the shard does not answer", 1000)
        open_bytes = self._sequencer.group.total_bytes
        if open_bytes and open_bytes + total_bytes > self._settings.group_max_bytes:
            raise OverloadedError("the disk does not keep up with what is published", 1000)
        self.admit_retries()

    def admit_retries(self) -> None:
        """Refuse to record deliveries again, of any length, as long as too much is not filed yet.

        Raises OverloadedError."""
        if self.unfiled_bytes > self._settings.unfiled_max_bytes:
            raise OverloadedError("too much is accepted and not filed yet", 1000)

    def make_room(self, total_bytes: int) -> None:
        """Make sure that so many bytes fit into the open group, or are alone in it.

        Code that logs without asking `admit` calls this before: no frame may be longer than is
        possible. Records that have to happen together are one call."""
        group = self._sequencer.group
        if group.count and group.total_bytes + total_bytes > self._settings.group_max_bytes:
            self._full.append(self._sequencer.close_group(0))
            self.wake()

    def wake(self) -> None:
        """The open group has records: have it written as soon as the committer is free."""
        if self._committing is None:
            self._ask()

    def _ask(self) -> None:
        if not self._wake_asked:
            self._wake_asked = True
            self._ports.wake()

    def decide_when_free(self, decide: Callable[[], object]) -> None:
        """Call `decide` as soon as the committer is free, just before the open group is closed.

        All requests that come while a group is being synced are decided together then. It costs
        less than decisions in the pieces in which they came."""
        self._gathered.append(decide)
        self.wake()

    def decide_this_turn(self, decide: Callable[[], object]) -> None:
        """Call `decide` at the end of this turn of the event loop, also while a group is synced.

        Requests that come in one turn are decided together, and none waits longer than that."""
        self._urgent.append(decide)
        self._ask()

    def decide_before_closing(self, decide: Callable[[], None]) -> None:
        """Call `decide`, which may append an import, just before a group is closed.

        This is the hook of the part `imports`: an import is the last record of its group, so only
        the code that closes the group can place it."""
        self._imports.append(decide)
        self.wake()

    # ── committing ─────────────────────────────────────────────────────────────────────────────

    def flush(self, now_ms: int, *, at_once: bool = False) -> None:
        """Hand the open group to the committer, unless it is busy.

        `at_once`: it may be durable, and its waiters told, on return."""
        self._decide_and_commit(now_ms, at_once=at_once)
        # A decision may leave no record, and an answer may bring the next request of its client.
        # Requests that are left get a turn of their own: no commit may come that would wake them.
        if self._urgent:
            self._ask()
        elif self._gathered or self._imports:
            self.wake()

    def _decide_and_commit(self, now_ms: int, *, at_once: bool) -> None:
        self._wake_asked = True  # a decision here needs no other call
        urgent, self._urgent = self._urgent, []
        for decide in urgent:
            decide()
        self._wake_asked = False
        if self._committing is not None:
            return
        if self._full:
            self._commit_next(now_ms, at_once=at_once)
            return
        self._is_last_turn = at_once and bool(self._gathered) and not self._is_last_turn
        if self._is_last_turn:
            return
        self._wake_asked = True
        gathered, self._gathered = self._gathered, []
        for decide in gathered:
            decide()
        if self._imports:
            # An import is the last record of its group: nothing comes between it and the closing.
            self._imports.popleft()()
            self._import_seq = max(self._import_seq, self._sequencer.group.import_last_seq)
        self._wake_asked = False
        if self._sequencer.group.count:
            self._full.append(self._sequencer.close_group(now_ms))
        if self._full:
            self._commit_next(now_ms, at_once=at_once)

    def _commit_next(self, now_ms: int, *, at_once: bool) -> None:
        group = self._committing = self._full.popleft()
        group.created_ms = now_ms
        self._ports.commit(group, at_once=at_once)

    def resume(self) -> None:
        """The committer is free: have it write the records that have come meanwhile."""
        if self._sequencer.group.count or self._full or self._gathered or self._imports:
            self.wake()

    def on_committed(self) -> Group:
        """The group that was being committed is durable; returns it.

        The caller applies its effects first, since every later decision has to see them. Then it
        tells the waiters, and calls `flush` before that or `resume` after it."""
        group = self._committing
        assert group is not None
        self._committing = None
        self.durable_seq = group.last_seq
        self.committed_total += 1
        self._unfiled.append(group)
        self._unfiled_bytes += group.total_bytes
        self._ports.file(group)
        return group

    def on_commit_failed(self, error: Exception) -> None:
        """The group could not be written (the disk is full): roll it back, and tell its waiters.

        Decisions that were made on top of it are rolled back, too."""
        failed = self._committing
        assert failed is not None
        groups = [failed, *self._full, self._sequencer.group]
        self._committing = None
        self._full.clear()
        self._sequencer.roll_back(groups)
        if self._import_seq > self.durable_seq:
            self._import_seq = 0
        for group in groups:
            group.tell_waiters(error)
        self.resume()

    # ── filing ─────────────────────────────────────────────────────────────────────────────────

    def on_filed(self, last_seq: int) -> None:
        """Everything up to `last_seq` is in its hour's file."""
        self.filed_seq = last_seq
        count = bisect_right(self._unfiled, last_seq, key=_last_seq)
        for group in self._unfiled[:count]:
            self._unfiled_bytes -= group.total_bytes
        del self._unfiled[:count]

    def on_checkpoint(self, seq: int) -> None:
        """Every effect up to `seq` is durable."""
        self.checkpoint_seq = seq

    # ── questions ──────────────────────────────────────────────────────────────────────────────

    @property
    def unfiled_bytes(self) -> int:
        """Bytes that are accepted and not filed."""
        total_bytes = self._unfiled_bytes + self._sequencer.group.total_bytes
        if self._full:
            total_bytes += sum(group.total_bytes for group in self._full)
        return total_bytes

    @property
    def oldest_unfiled_ms(self) -> int | None:
        """When the oldest group that is not filed was closed; None if all is filed."""
        return self._unfiled[0].created_ms if self._unfiled else None

    def files_slowly(self, now_ms: int) -> bool:
        """Whether the disk does not keep up with filing: half of the allowed bytes are not filed,
        and have waited for SLOW_MS."""
        oldest_ms, max_bytes = self.oldest_unfiled_ms, self._settings.unfiled_max_bytes
        is_old = oldest_ms is not None and now_ms - oldest_ms >= SLOW_MS
        return is_old and self.unfiled_bytes >= max_bytes // 2

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits to be committed."""
        undecided = self._full or self._gathered or self._urgent or self._imports
        is_open = bool(self._sequencer.group.count or undecided)
        return self._committing is None and not is_open

    @property
    def is_importing(self) -> bool:
        """Whether an import is not filed yet: records that are accepted now are filed after it."""
        return self._import_seq > self.filed_seq

    def not_durable(self) -> Group | None:
        """The newest group that is not durable yet, if there is one."""
        group = self._sequencer.group
        if group.count:
            return group
        return self._full[-1] if self._full else self._committing

    def group_of(self, seq: int) -> Group | None:
        """The group that record `seq` is in, unless it is durable."""
        if seq <= self.durable_seq:
            return None
        committing = self._committing
        if committing is not None and seq <= committing.last_seq:
            return committing
        for full in self._full:
            if seq <= full.last_seq:
                return full
        return self._sequencer.group

    def is_in_memory(self, seq: int) -> bool:
        """Whether record `seq` is neither filed nor in the wheel by the express way."""
        if seq > self.durable_seq:
            return True
        return seq > self.filed_seq and not self._unfiled_group(seq).is_express(seq)

    def payload(self, seq: int) -> tuple[bytes, int] | None:
        """Sealed payload and subject id of a record that is not in its hour's file yet."""
        if seq <= self.filed_seq:
            return None
        group = self.group_of(seq)
        if group is None:
            group = self._unfiled_group(seq)
        return group.payload(seq)

    def _unfiled_group(self, seq: int) -> Group:
        return self._unfiled[bisect_right(self._unfiled, seq, key=_first_seq) - 1]


_first_seq: Callable[[Group], int] = attrgetter("first_seq")
_last_seq: Callable[[Group], int] = attrgetter("last_seq")
