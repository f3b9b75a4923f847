"""Data directories to tamper with: what the real server code leaves on a disk after some lives.

A world as in the simulation, with crashes and all. But hours are kept when they are settled, and
before the last life ends some hours pass in which whoever subscribed takes, refuses or forgets what
comes, so that some are retired and others are open. Then what is in memory is copied to a disk.

Two things are left out that no audit forgives. A clock that is set back below the due time of what
is on its way makes a delivery look early; and a bad sector is damage.

Cost: some 40 ms for a world of five lives. Threads: none.
"""

import random
from dataclasses import dataclass
from pathlib import Path

import msgspec

from delayserver.records.subscriptions import Subscription
from storage.catalog import LmdbCatalog, Table
from storage.directory import CATALOG_DIRECTORY, LOG_DIRECTORIES
from storage.rows import HOUR_MS
from tests.world.server import SimulatedClock
from tests.world.storage.faults import Faults
from tests.world.world import World

LIVES = 3
STEPS = 60
MOMENTS_MAX = 50
"""At the most, how often the last life jumps to where something is due or an hour ends."""
CATALOG_BYTES = 1 << 23
KEPT_MS = 10_000 * HOUR_MS
"""For how long hours are kept that are settled."""


class ForwardClock(SimulatedClock):
    """A clock that nobody sets back."""

    def set(self, by_ms: int) -> None:
        super().set(max(0, by_ms))


class VictimWorld(World):
    """A world whose files are to be tampered with."""

    make_clock = ForwardClock
    bad_sectors_share = 0.0

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self._end_luck = random.Random(f"victim {seed}")
        kept = {"retention_ms": KEPT_MS, "archive": False}
        self.settings = self.settings.model_copy(update=kept)
        self.ledger.archive = False

    def end(self) -> None:
        """The last life: hours pass, and it ends in any way."""
        luck = self._end_luck
        self.ledger.new_life()
        self.abandon()
        self.faults = Faults()
        self.catalog.faults = None
        self.disk.on_sync = lambda: None
        self._start()
        server = self._running
        if luck.random() < 0.7:
            self._take_everything()
        for _ in range(luck.randrange(MOMENTS_MAX)):
            self.subscribers.is_patient = luck.random() < 0.7
            self._serve()
            self._jump_to_next()
        if luck.random() < 0.5:
            server.rest()
        match luck.choice(("stop", "kill", "power loss")):
            case "stop":
                server.stop()
                self.disk = self.disk.kill()
            case "kill":
                self.disk = self.disk.kill()
            case _:
                self.disk = self.disk.crash()
        self.catalog = self.catalog.crash()

    def _take_everything(self) -> None:
        """Somebody subscribes to all that nobody else wants, so that hours can be settled."""
        registry = self._running.engine.registry
        for subscription in list(registry):
            self.operators.put(msgspec.structs.replace(subscription, paused=False))
        everything = Subscription(
            id=registry.next_id(),
            name="everything",
            subject="*",
            type="webhook",
            created_ms=self.clock.now_ms,
        )
        self.operators.put(everything)
        self._running.rest()

    def _serve(self) -> None:
        server, subscribers = self._running, self.subscribers
        server.rest()
        while server.out():
            subscribers.answer_webhook()
            server.rest()
        subscribers.pull_all()
        while subscribers.leases:
            subscribers.consume()
        server.rest()


@dataclass(frozen=True, slots=True)
class Victim:
    """A data directory, and what is known of it from outside."""

    root: Path
    now_ms: int
    accepted: int
    """How many messages were made durable."""


def make_victim(seed: int, root: Path, *, lives: int = LIVES, steps: int = STEPS) -> Victim:
    """The directory of a seed, below `root`, which is empty. Raises Violation, as any world."""
    with VictimWorld(seed) as world:
        for _ in range(lives):
            world.live(steps)
        world.end()
    for directory in (*LOG_DIRECTORIES, CATALOG_DIRECTORY):
        (root / directory).mkdir()
    for path, content in world.disk.contents().items():
        file = root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
    catalog = LmdbCatalog(str(root / CATALOG_DIRECTORY), max_bytes=CATALOG_BYTES)
    catalog.commit({table: list(world.catalog.scan(table)) for table in Table})
    catalog.close()
    return Victim(root, world.clock.latest_ms, len(world.ledger.messages))
