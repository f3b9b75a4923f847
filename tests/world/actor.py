"""Somebody at the running server: clients, operators and subscribers have this in common.

What they are is kept from life to life; the server and the disk below it are new in each. Nobody
here calls another: the world chooses whose turn it is, and all draw from its randomness.

Cost and threads: none of its own.
"""

import random
from collections import Counter

from tests.world.ledger import Ledger
from tests.world.server import SimulatedClock, SimulatedServer
from tests.world.storage.files import SimulatedFiles


class Actor:
    """Somebody who acts on the server of each life."""

    _server: SimulatedServer
    _disk: SimulatedFiles

    def __init__(
        self, rng: random.Random, clock: SimulatedClock, ledger: Ledger, counts: Counter[str]
    ) -> None:
        self._rng = rng
        self._clock = clock
        self._ledger = ledger
        self._counts = counts

    def begin(self, server: SimulatedServer, disk: SimulatedFiles) -> None:
        """A life has begun. `disk` is without the faults that the server meets."""
        self._server = server
        self._disk = disk
