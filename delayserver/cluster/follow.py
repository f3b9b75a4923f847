"""The thread that follows a shard's log for a process of a node, until it holds the office.

    ┌─▶ Standby.step, step, … ── the office ──▶ on_claimed, and it ends
    │      └── cannot go on, or is damaged ──▶ Keeper: made anew, or when people decide
    └── Onlooker.step, step, … as long as no replica is needed here

Where the log has lost its end, and this replica has more, it stops: people decide (`cluster adopt`)
behind which replica the log goes on. It is this one, or one that has the same, or another: then
the old replica is set aside, and a new one copied from there.

Cost: that of `Standby.step`. Threads: it is one; the rest of the process sees `standby` and
`onlooker` as they are just then.
"""

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Final, Protocol

import structlog

from delayserver.recovery.standby import Standby
from storage.errors import (
    LogReplacedError,
    OffsetRangeError,
    OtherHistoryError,
    ReplicatedLogError,
    ShortageError,
)
from storage.replicated.holder import Holder
from storage.replicated.onlooker import Onlooker

STEP_S: Final = 0.1
"""How long a step waits for records."""
SHORTAGE_WAIT_S: Final = 1.0
HEAL_S: Final = 600.0
"""After a damaged replica was made anew, or could not be, it is not tried again for so long."""
REPLACE_MS: Final = 3_600_000
"""A replica that has not kept up for so long is made anew: a copy is written in order, and is as
far as its source."""

log = structlog.get_logger()


class Lifetime(Protocol):
    """The lifetime of a thread that may be told to end."""

    @property
    def is_ending(self) -> bool:
        """It was."""

    def wait(self, seconds: float) -> None:
        """So long, or until it is."""


class Keeper(Protocol):
    """Keeps the replica of the shard in a directory. All raise StorageError."""

    def is_needed(self) -> bool:
        """Whether the node is to have a replica, or has to keep the one that it has."""

    def renew(self, ending: Lifetime, must: bool) -> Standby | None:
        """Make the replica anew from another one, and open it; unless it `must` be, open it as it
        is if nobody gives a copy. None: it is to end, or none is needed any more."""

    def ask_people(
        self, ending: Lifetime, standby: Standby, error: ReplicatedLogError
    ) -> Standby | None:
        """Wait until people have decided how a log goes on that has lost its end, and do it if it
        is with this replica, which is behind a checkpoint; opened anew. None: it is to end."""

    def set_aside(self, seq: int) -> None:
        """The log does not go on with this replica, which has records up to `seq`."""

    def look_on(self) -> Onlooker:
        """Delete the files of a replica, if there are any."""


class Follow(threading.Thread):
    """Moves a standby until it holds the office, or is told to end; where the log or the disk does
    not let it go on, the replica is made anew from another one, or people decide. As long as no
    replica is needed here it looks on."""

    def __init__(
        self,
        standby: Standby | None,
        keeper: Keeper,
        on_owner: Callable[[int, str], None],
        on_claimed: Callable[[Holder], None],
        on_end: Callable[[], None],
        fatal: Callable[[BaseException], None],
    ) -> None:
        """`standby` None: there is nothing to go on with. All are called in this thread: `on_owner`
        when another owns the shard, with the epoch and the address in its claim (empty: no owner is
        known, as far as is known), `on_claimed` when this node does, and `on_end` when the
        directory is closed, however that came."""
        super().__init__(name="delayserver-follow", daemon=True)
        self.standby = standby
        self.onlooker: Onlooker | None = None
        """As long as there is no replica, and none is needed."""
        self._keeper = keeper
        self._on_owner = on_owner
        self._on_claimed = on_claimed
        self._on_end = on_end
        self._fatal = fatal
        self._ending = threading.Event()
        self._heal_s = -HEAL_S
        """The moment of the last try to replace damaged files."""

    def run(self) -> None:
        try:
            self._follow()
            self._on_end()
        except BaseException as error:
            self._fatal(error)

    def _follow(self) -> None:
        known, must_renew = None, False
        while not self.is_ending:
            if not self._keeper.is_needed():
                self._pass_on()
                must_renew = False
                continue
            standby = self.standby
            if standby is None:
                standby = self.standby = self._keeper.renew(self, must_renew)
                known = None
                continue
            try:
                holder = standby.step(STEP_S)
            except OffsetRangeError as error:
                if error.offset >= error.first:
                    self._await_people(standby, error)
                    known = None
                else:
                    log.warning("the log does not reach back so far", error=str(error))
                    self._close()
                    must_renew = True
                continue
            except LogReplacedError as error:
                self._await_people(standby, error)
                known = None
                continue
            except OtherHistoryError as error:
                log.warning("the log goes on behind another replica", error=str(error))
                seq = standby.place.next_seq - 1
                self._close()
                self._keeper.set_aside(seq)
                must_renew = True
                continue
            except ShortageError as error:
                log.error("tried again soon", thread=self.name, error=str(error))
                self._ending.wait(SHORTAGE_WAIT_S)
                continue
            state = standby.state
            if (state.epoch, state.owner) != known:
                known = state.epoch, state.owner
                self._on_owner(state.epoch, standby.owner_address)
            if holder is not None:
                self._on_claimed(holder)
                standby.finish()
                return
            if standby.damage:
                must_renew = False
                self._heal(standby)
            elif standby.stuck_ms >= REPLACE_MS:
                log.error("the replica stays behind, and is made anew", lag_ms=standby.lag_ms)
                must_renew = False
                self._close()
        if self.standby is not None:
            self.standby.checkpoint()
            self.standby.close()

    def _await_people(self, standby: Standby, error: ReplicatedLogError) -> None:
        """The log has lost its end: only this replica may have the lost records, and a copy would
        overwrite them. No owner is known behind that end."""
        try:
            standby.checkpoint()  # Records that were read and not filed may be nowhere else.
        except ShortageError as shortage:
            log.error("tried again soon", thread=self.name, error=str(shortage))
            self._ending.wait(SHORTAGE_WAIT_S)
            return
        self.standby = None
        self._on_owner(standby.state.epoch, "")
        self.standby = self._keeper.ask_people(self, standby, error)

    def _pass_on(self) -> None:
        """There is to be no replica here, for as long as none is needed."""
        if self.standby is not None:
            self._close()
        with contextlib.closing(self._keeper.look_on()) as onlooker:
            self.onlooker = onlooker
            while not self.is_ending and not self._keeper.is_needed():
                if onlooker.step(STEP_S) and onlooker.address is not None:
                    self._on_owner(onlooker.epoch, onlooker.address)
        self.onlooker = None

    def _heal(self, standby: Standby) -> None:
        """Something was found damaged: another replica has it still."""
        for damage in standby.damage:
            log.error("damage found", error=str(damage.error()))
        standby.damage.clear()
        if time.monotonic() - self._heal_s >= HEAL_S:
            self._heal_s = time.monotonic()
            self._close()

    def _close(self) -> None:
        standby, self.standby = self.standby, None
        assert standby is not None
        standby.abandon()

    @property
    def is_ending(self) -> bool:
        """Whether it was told to end."""
        return self._ending.is_set()

    def wait(self, seconds: float) -> None:
        """So long, or until it is told to end."""
        self._ending.wait(seconds)

    def end(self) -> None:
        """Have it end soon."""
        self._ending.set()
