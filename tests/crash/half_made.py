"""Restores that are ended by SIGKILL, on real files: what is left is refused, or whole.

A process of its own restores, and kills itself with SIGKILL in the call to the files that its seed
decides; so each run is the same again. Then the directory is opened as a server opens it.

    python -m tests.crash.half_made --runs 1000

Cost: 30 ms a run. Threads: one.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import random
import shutil
import signal
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Final

from delayserver.backup import restoring
from delayserver.backup.restoring import SKIPPED_SEQS
from delayserver.backup.shipped_log import LATEST_MS
from delayserver.clocks import wall_clock_ms
from delayserver.config import Settings
from delayserver.decisions.new_messages import NewMessage
from delayserver.records.message import Payload
from delayserver.records.tables import read_checkpoint
from delayserver.recovery.check import check_path
from delayserver.server.server import Server
from storage.catalog import MAX_BYTES, LmdbCatalog
from storage.errors import DirectoryKindError
from storage.files import OsFile, OsFiles
from storage.kinds import FRESH_NAMES, SERVED, require, require_servable
from storage.rows import HOUR_MS
from tests.waiting import until

MESSAGES: Final = 40
BEHIND: Final = 10
"""Messages that only the shipped log has."""
CHANGES: Final = ("open", "unlink", "rename", "link", "make_directory", "sync_directory", "lock")
WRITES: Final = ("pwrite", "pwrite_durable", "fdatasync")


def make_backups(directory: Path) -> Path:
    """A directory of backups, with one of them and a log behind it."""
    backups = directory / "backups"

    def fatal(error: BaseException) -> None:
        raise error

    async def main() -> None:
        settings = Settings(
            data_dir=directory / "data",
            disk_reserve_bytes=0,
            segment_bytes=1 << 16,
            backup_dir=backups,
            backup_log_ms=60_000,
        )
        server = Server(settings, fatal=fatal)
        await server.start()
        await publish(server, range(MESSAGES))
        await server.backups.begin("one", is_verified=True)
        await until(lambda: server.backups._making is None)
        await publish(server, range(MESSAGES, MESSAGES + BEHIND))
        await server.stop()

    asyncio.run(main())
    return backups


async def publish(server: Server, numbers: Iterable[int]) -> None:
    for number in numbers:
        payload = Payload(b"{}", key=f"k{number}")
        message = NewMessage("orders", wall_clock_ms() + (1 + number % 7) * HOUR_MS, payload)
        server.calls.publish_one(message, server.clock())
    await server.calls.all_durable()


class Mortal:
    """Ends this process in its call number `at` to the files; 0: it counts them."""

    def __init__(self, at: int) -> None:
        self._at = at
        self._numbers = itertools.count(1)
        self.calls = 0

    def plant(self) -> None:
        for kind, names in ((OsFiles, CHANGES), (OsFile, WRITES)):
            for name in names:
                setattr(kind, name, self._mortal(getattr(kind, name)))

    def _mortal(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            self.calls = next(self._numbers)
            if self.calls == self._at:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*arguments, **named)

        return call


def in_a_process(act: Callable[[], int]) -> int:
    """The number that the act returns; the number of the signal that has ended it, below 0."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(write, str(act()).encode())
        finally:
            os._exit(0)
    os.close(write)
    _, status = os.waitpid(child, 0)
    with open(read, "rb") as pipe:
        text = pipe.read()
    return int(text) if text else -os.WTERMSIG(status)


def restore_in_a_process(backups: Path, target: Path, at: int, until_ms: int | None) -> int:
    """Restore, and die at a call; returns how many calls there were, or the signal."""

    def act() -> int:
        mortal = Mortal(at)
        mortal.plant()
        backup = backups / "one" if until_ms is None else backups
        restoring.restore(backup, target, now_ms=wall_clock_ms(), until_ms=until_ms)
        return mortal.calls

    return in_a_process(act)


def fate_of(target: Path, count: int, checkpoint_seq: int) -> str:
    """The fate of the directory, as a server and every command see it."""
    names = set(os.listdir(target)) if target.is_dir() else set()
    if not names - FRESH_NAMES:
        return "empty"
    try:
        require_servable(str(target))
        require(OsFiles(str(target), readonly=True), SERVED)
    except DirectoryKindError:
        for opener in (check_path,):
            try:
                opener(target, catalog_max_bytes=MAX_BYTES)
            except DirectoryKindError:
                continue
            raise AssertionError("a command takes for whole what a server refuses") from None
        return "refused"
    report = check_path(target, catalog_max_bytes=MAX_BYTES)
    assert report.is_clean, report.damage
    assert report.tables["keys"] == count, report.tables
    catalog = LmdbCatalog(str(target / "catalog"), max_bytes=MAX_BYTES, readonly=True)
    try:
        assert read_checkpoint(catalog) > checkpoint_seq + SKIPPED_SEQS - MESSAGES
    finally:
        catalog.close()
    return "whole"


def killed(backups: Path, scratch: Path, seeds: Iterable[int]) -> Iterator[str]:
    """Kill restores, with and without the log; what became of each. Raises AssertionError."""
    ways = {None: MESSAGES, LATEST_MS: MESSAGES + BEHIND}
    calls = {}
    for until_ms, count in ways.items():
        target = scratch / "whole"
        calls[until_ms] = restore_in_a_process(backups, target, 0, until_ms)
        assert calls[until_ms] > 0 and fate_of(target, count, 0) == "whole"
        shutil.rmtree(target)
    for seed in seeds:
        rng = random.Random(seed)
        until_ms = rng.choice([*ways])
        at = rng.randrange(1, calls[until_ms] + 1)
        target = scratch / f"killed-{seed}"
        ended = restore_in_a_process(backups, target, at, until_ms)
        assert ended == -signal.SIGKILL, (seed, ended)
        yield fate_of(target, ways[until_ms], 0)
        shutil.rmtree(target, ignore_errors=True)


def main() -> None:
    """Kill many, and print what became of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=1000)
    runs = parser.parse_args().runs
    with tempfile.TemporaryDirectory() as made:
        directory = Path(made)
        print(dict(Counter(killed(make_backups(directory), directory, range(runs)))))


if __name__ == "__main__":
    main()
