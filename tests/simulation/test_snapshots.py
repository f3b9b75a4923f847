"""A snapshot that is taken at any moment of any history is what the source was at that moment,
however long it takes to be copied."""

from functools import partial
from typing import cast

from delayserver.recovery.incoming import Incoming
from delayserver.recovery.snapshots import HeldSnapshot, Snapshots
from delayserver.server.threads import SnapshotRequest
from delayserver.testing import World
from delayserver.testing.server import SimulatedServer
from storage.check import assert_clean
from storage.directory import open_identity
from storage.errors import StorageError
from storage.testing.catalog import MemoryCatalog
from storage.testing.files import SimulatedFiles
from tests.peers import LocalPeer, content_of, settled_in

WORLDS = 24
LIVES = 3


class Taken:
    """A snapshot, and what the source was when it was taken."""

    def __init__(self, world: World, server: SimulatedServer) -> None:
        self._world = world
        self._server = server
        self.snapshots = Snapshots(world.disk, server.store.identity)
        self.held: HeldSnapshot | None = None
        self.is_refused = False
        self.content: dict[str, object]
        self.settled: set[bytes]
        server.replayer.put(SnapshotRequest(self._take, self._done))

    def _take(self) -> HeldSnapshot:
        held = self.snapshots.take(self._server.store)
        inner = self._world.catalog
        self.content = content_of(self._world.disk, inner)
        self.settled = settled_in(self._world.disk)
        return held

    def _done(self, held: object, error: StorageError | None) -> None:
        assert error is None or self._world.faults.struck
        self.held, self.is_refused = cast("HeldSnapshot | None", held), error is not None


class WorldOfSnapshots(World):
    """Again and again one is taken, and copied some time later."""

    taken: Taken | None = None
    copies = 0

    def _maybe_fail_reads(self) -> None:
        """What cannot be read cannot be compared."""

    def _step(self) -> None:
        super()._step()
        assert self.server is not None
        if (self.taken is None or self.taken.is_refused) and self.rng.random() < 0.02:
            self.taken = Taken(self, self.server)
        elif self.taken is not None and self.taken.held is not None and self.rng.random() < 0.02:
            self._copy(self.taken, self.taken.held)
            self.copies += 1
            self.taken = None

    def _copy(self, taken: Taken, held: HeldSnapshot) -> None:
        files = SimulatedFiles()
        peer = LocalPeer(taken.snapshots, partial(taken.snapshots.complete, held))
        identity = open_identity(self.disk, random_bytes=None)
        Incoming(files, identity, partial(MemoryCatalog.copied, files)).fetch([peer])
        catalog = MemoryCatalog.copied(files, "catalog")
        assert content_of(files, catalog) == taken.content
        assert settled_in(files) >= taken.settled
        assert_clean(files, catalog)

    def live(self, steps: int) -> None:
        self.taken = None  # It ended with the process.
        super().live(steps)


def test_it_is_what_the_source_was() -> None:
    copies = 0
    for seed in range(WORLDS):
        with WorldOfSnapshots(seed) as world:
            for _ in range(LIVES):
                world.live(300)
            copies += world.copies
    assert copies > WORLDS
