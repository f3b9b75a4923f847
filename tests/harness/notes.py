"""The notes of a run: its ledger, its failures, its counts, and a log of the strikes.

Cost: none. Threads: the event loop's.
"""

import time
from collections import Counter
from pathlib import Path
from typing import Any

from tests.harness.ledger import Ledger


class Notes:
    """All that one run writes down; topology, strikes and traffic share it."""

    def __init__(self, directory: Path, ledger: Ledger | None = None) -> None:
        """`directory`: where the run keeps everything, also `strikes.log`."""
        self.directory = directory
        self.ledger = Ledger() if ledger is None else ledger
        self.failures: list[str] = []
        """Broken promises that are not the ledger's: answers that must not be, a server that did
        not start."""
        self.counts: Counter[str] = Counter()
        self.figures: list[dict[str, Any]] = []
        """More of them, for the file."""
        self.doing = "starts"
        """The strike of this moment, for people."""

    def fail(self, failure: str) -> None:
        """Note a failure, once."""
        if failure not in self.failures:
            self.failures.append(failure)
            self.say(f"failure: {failure}")

    def say(self, text: str) -> None:
        """Write a line to the log of the strikes."""
        now_ms = self.ledger.now_ms()
        stamp = time.strftime("%H:%M:%S", time.gmtime(now_ms / 1000))
        with (self.directory / "strikes.log").open("a") as log:
            log.write(f"{stamp}.{now_ms % 1000:03} {now_ms} {text}\n")
