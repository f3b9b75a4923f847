"""A server of several shards: a supervisor and its processes, which can be killed one by one.

Only a child of the supervisor is ever signalled. Its handle (pidfd) is opened first, then the
supervisor is asked again for its children. The handle stays that of the same process even if its
number is given to another. To kill all of them, the demo stops the supervisor first, so that it
starts none meanwhile.

Cost: a start is one of Python for each shard. Threads: the methods block, and may be called from
any thread, one at a time.
"""

import contextlib
import os
import select
import signal
import ssl
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from delayserver.cli.demo.process import (
    POLL_S,
    READY_TIMEOUT_S,
    STOP_TIMEOUT_S,
    ServerFailed,
    ServerProcess,
)


class ShardedServer(ServerProcess):
    """`delayserver serve --shards` on loopback. None of its processes outlives its block."""

    ready_path = "/v1/stats"
    """Answered when each shard gives its part."""

    def __init__(
        self,
        data_dir: Path,
        *,
        count: int,
        port: int,
        log_path: Path,
        options: Sequence[str] = (),
        tls: ssl.SSLContext | None = None,
    ) -> None:
        super().__init__(data_dir, port=port, log_path=log_path, options=options, tls=tls)
        self.count = count
        self.fixed_options = (f"--shards={count}",)
        self.is_meant_to_run = False
        """Whether it was started, and neither killed nor stopped."""
        self._left: dict[int, int] = {}
        """Shards that were left without a supervisor, and may still run: number and handle."""

    def start(self) -> None:
        """Start the supervisor, which starts the shards; none is ready yet."""
        assert not self._left, "shards of the supervisor before run still"
        super().start()
        self.is_meant_to_run = True

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        self.is_meant_to_run = False
        return super().stop(number)

    # ── the processes ──────────────────────────────────────────────────────────────────────────

    def children(self) -> list[int]:
        """Process ids of the shards that run, the oldest first; none without a supervisor."""
        if not self.is_running:
            return []
        path = Path(f"/proc/{self.pid}/task/{self.pid}/children")
        return [int(pid) for pid in path.read_text().split()]

    def shard_of(self, pid: int) -> int | None:
        """The shard that a child serves; None while it has opened nothing of its directory."""
        from storage.shards import parse_shard_directory

        root = self.data_dir.resolve()
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            for name in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(FileNotFoundError):
                    path = Path(os.readlink(f"/proc/{pid}/fd/{name}"))
                    if path.is_relative_to(root) and path != root:
                        return parse_shard_directory(path.relative_to(root).parts[0])
        return None

    def shards(self) -> dict[int, int]:
        """The process of each shard that is known to run."""
        found = ((self.shard_of(pid), pid) for pid in self.children())
        return {shard: pid for shard, pid in found if shard is not None}

    def wait_started(self, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Wait until each shard has a process again, ready or not. Raises ServerFailed."""
        deadline_s = time.monotonic() + timeout_s
        while len(self.children()) < self.count and self.is_running:
            if time.monotonic() > deadline_s:
                raise ServerFailed(f"a shard was not started again in {timeout_s:g} s")
            time.sleep(POLL_S)

    # ── kills ──────────────────────────────────────────────────────────────────────────────────

    def kill_shards(self, pids: Collection[int]) -> list[int]:
        """Kill these children at once, and wait until they are gone; returns the killed ones."""
        with self._handles(pids) as handles:
            met = [pid for pid, handle in handles.items() if _signal(handle)]
            for handle in handles.values():
                _wait(handle, STOP_TIMEOUT_S)
        return met

    def kill_supervisor(self) -> None:
        """Kill the supervisor alone; its shards must end by themselves."""
        self.is_meant_to_run = False
        self._stop_supervisor()
        self._left |= self._opened(self.children())
        super().kill()

    def wait_left(self, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """Wait until the shards without a supervisor have ended. If they do not end, this kills
        them and raises ServerFailed."""
        deadline_s = time.monotonic() + timeout_s
        for pid, handle in self._left.items():
            if not _wait(handle, max(0.0, deadline_s - time.monotonic())):
                self.kill()
                raise ServerFailed(
                    f"shard process {pid} ran for {timeout_s:g} s without a supervisor"
                )
        self._forget_left()

    def kill(self) -> None:
        """Kill all at once, and wait until they are gone."""
        self.is_meant_to_run = False
        if self.is_running:
            self._stop_supervisor()
            self._left |= self._opened(self.children())
            # The supervisor is stopped first, so that it does not see that a shard has ended.
            os.kill(self.pid, signal.SIGKILL)
        for handle in self._left.values():
            _signal(handle)
        super().kill()
        for handle in self._left.values():
            _wait(handle, STOP_TIMEOUT_S)
        self._forget_left()

    def _stop_supervisor(self) -> None:
        """Stop the supervisor, so that it starts nothing from now on."""
        os.kill(self.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def _opened(self, pids: Collection[int]) -> dict[int, int]:
        """Handles of those processes that really are children."""
        handles: dict[int, int] = {}
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                handles[pid] = os.pidfd_open(pid)
        for pid in handles.keys() - set(self.children()):
            os.close(handles.pop(pid))
        return handles

    @contextlib.contextmanager
    def _handles(self, pids: Collection[int]) -> Iterator[dict[int, int]]:
        handles = self._opened(pids)
        try:
            yield handles
        finally:
            for handle in handles.values():
                os.close(handle)

    def _forget_left(self) -> None:
        for handle in self._left.values():
            os.close(handle)
        self._left.clear()


def _signal(handle: int) -> bool:
    """Kill; returns False if the process has ended already."""
    try:
        signal.pidfd_send_signal(handle, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def _wait(handle: int, timeout_s: float) -> bool:
    """Whether a process ends within that time."""
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    return bool(poll.poll(round(timeout_s * 1000)))
