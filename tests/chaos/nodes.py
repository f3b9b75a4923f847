"""A node of the cluster: a supervisor with a process for each shard, struck as a whole or in parts.

As everywhere in these runs only a child of the supervisor is signalled, through a handle.

Cost: a start is one of Python for each shard, and one more. Threads: the methods block, one at a
time.
"""

import contextlib
import os
import shutil
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

from delayserver.cli.demo.sharded import ShardedServer
from tests.chaos.stage import Stage
from tests.waiting import Looks

PORT = 8080


class ClusterNode(ShardedServer):
    """`delayserver serve --cluster`. None of its processes outlives its block."""

    def __init__(
        self,
        name: str,
        directory: Path,
        stage: Stage,
        *,
        cluster: str,
        shards: int,
        token: str,
        port: int,
    ) -> None:
        data_dir = directory / name
        super().__init__(data_dir, count=shards, port=port, log_path=directory / f"{name}.log")
        self.name = name
        self.host = stage.host_of(name)
        self.within = stage.within(name)
        self.offset_ms = 0
        """What its clock is set off by at the next start."""
        self.fixed_options = (
            f"--cluster={cluster}",
            f"--node={name}",
            f"--advertise={self.url}",
            f"--token={token}",
            f"--webhook-targets={stage.host}",
            "--checkpoint-ms=500",
            "--disk-reserve-bytes=1048576",
            "--log-json",
        )
        self._stopped: list[int] = []

    def start(self) -> None:
        """Start the supervisor, which starts the shards; none is ready yet."""
        self.options = [f"--clock-offset-ms={self.offset_ms}"] if self.offset_ms else []
        super().start()

    def has_all(self) -> bool:
        """Whether it runs, with a process of each shard."""
        return self.is_running and len(self.shards()) == self.count

    def wipe(self) -> None:
        """Remove its data, while it is down."""
        assert not self.is_running
        # The directory itself may be where a disk is mounted.
        for entry in self.data_dir.iterdir():
            if entry.is_dir():
                shutil.rmtree(entry)
            else:
                entry.unlink()

    # ── processes ──────────────────────────────────────────────────────────────────────────────

    def kill_shard(self, shard: int) -> bool:
        """SIGKILL for the process of a shard; False: there is none just now."""
        pid = self.shards().get(shard)
        return pid is not None and bool(self.kill_shards([pid]))

    def stop_shard(self, shard: int) -> None:
        """SIGSTOP for the process of a shard, if there is one."""
        if (pid := self.shards().get(shard)) is not None:
            self._freeze([pid])

    def stop_all(self) -> None:
        """SIGSTOP for the supervisor and all processes of shards."""
        os.kill(self.pid, signal.SIGSTOP)
        self._freeze(self.children())
        self._stopped.append(os.pidfd_open(self.pid))

    def go_on(self) -> None:
        """SIGCONT for all that were stopped."""
        for handle in self._stopped:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(handle, signal.SIGCONT)
            os.close(handle)
        self._stopped.clear()

    def _freeze(self, pids: Sequence[int]) -> None:
        for handle in self._opened(pids).values():
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(handle, signal.SIGSTOP)
            self._stopped.append(handle)

    def kill(self) -> None:
        super().kill()
        self.go_on()  # closes the handles


@contextlib.contextmanager
def full_disk(directory: Path, left_bytes: int) -> Iterator[int]:
    """Leave no more than so much on the file system of a directory; yields what was taken."""
    filling = directory / "filling"
    status = os.statvfs(directory)
    size = max(0, status.f_bavail * status.f_frsize - left_bytes)
    with filling.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, size)
    try:
        yield size
    finally:
        filling.unlink()


def wait_gone(node: ClusterNode, timeout_s: float) -> bool:
    """Whether its supervisor ends within that time."""
    return any(not node.is_running for _ in Looks(timeout_s))
