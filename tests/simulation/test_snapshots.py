"""A snapshot that is taken at any moment of any history is what the source was at that moment,
however long it takes to be copied."""

from collections.abc import Iterable
from functools import partial
from typing import cast

import numpy as np

from delayserver.recovery.incoming import Incoming
from delayserver.recovery.snapshots import HeldSnapshot, Snapshots, measure_settled
from delayserver.server.filer import SnapshotRequest
from storage.check import assert_clean
from storage.directory import open_identity
from storage.errors import StorageError
from storage.rows import DISPATCH_DTYPE
from tests.depth import every, least
from tests.peers import LocalPeer, content_of, settled_in
from tests.world import World
from tests.world.server import SimulatedServer
from tests.world.storage.catalog import MemoryCatalog
from tests.world.storage.files import SimulatedFiles

WORLDS = 24
LIVES = 3


class Taken:
    """A snapshot, and what the source was when it was taken.

    `is_of_a_backup`: what is settled is measured before the checkpoint."""

    def __init__(
        self, world: World, server: SimulatedServer, *, is_of_a_backup: bool = False
    ) -> None:
        self._world = world
        self._server = server
        self.snapshots = Snapshots(world.disk, server.store.identity)
        self.held: HeldSnapshot | None = None
        self.is_refused = False
        self.content: dict[str, object]
        self.settled: set[bytes]
        self.measured: dict[str, int] | None = None
        if is_of_a_backup:
            self.measured, self.settled = measure_settled(world.disk), settled_in(world.disk)
        server.replayer.put(SnapshotRequest(self._take, self._done))

    def _take(self) -> HeldSnapshot:
        held = self.snapshots.take(self._server.store, self.measured)
        inner = self._world.catalog
        self.content = content_of(self._world.disk, inner)
        if self.measured is None:
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
            self.taken = self._take(self.server)
        elif self.taken is not None and self.taken.held is not None and self.rng.random() < 0.02:
            self._copy(self.taken, self.taken.held)
            self.copies += 1
            self.taken = None

    def _take(self, server: SimulatedServer) -> Taken:
        return Taken(self, server)

    def _copy(self, taken: Taken, held: HeldSnapshot) -> None:
        files = SimulatedFiles()
        peer = LocalPeer(taken.snapshots, partial(taken.snapshots.complete, held))
        identity = open_identity(self.disk, random_bytes=None)
        Incoming(files, identity, partial(MemoryCatalog.copied, files)).fetch([peer])
        catalog = MemoryCatalog.copied(files, "catalog")
        assert content_of(files, catalog) == taken.content
        assert settled_in(files) >= taken.settled
        assert_clean(files, catalog)
        self._look_at(files, held)

    def _look_at(self, files: SimulatedFiles, held: HeldSnapshot) -> None:
        """The copy."""

    def live(self, steps: int) -> None:
        self.taken = None  # It ended with the process.
        super().live(steps)


def test_it_is_what_the_source_was() -> None:
    copies = 0
    for seed in every(4, range(WORLDS)):
        with WorldOfSnapshots(seed) as world:
            for _ in range(LIVES):
                world.live(300)
            copies += world.copies
    assert copies >= least(WORLDS + 1)


class WorldOfBackups(WorldOfSnapshots):
    """The same for backups: whoever restores one gives the seqs behind its checkpoint to other
    messages, so it must not have that they are settled."""

    is_measured = True
    ahead = 0
    """Rows that settle what is not in the copy."""

    def _take(self, server: SimulatedServer) -> Taken:
        return Taken(self, server, is_of_a_backup=self.is_measured)

    def _look_at(self, files: SimulatedFiles, held: HeldSnapshot) -> None:
        for row in settled_in(files):
            seq = int(np.frombuffer(row, DISPATCH_DTYPE)["seq"][0])
            self.ahead += seq > held.manifest.checkpoint_seq


AHEAD_SEEDS = (70, 78, 94, 109, 115)
"""Of the first 150, those in which what is settled gets ahead of what is filed."""


def ahead_in(world: type[WorldOfBackups], seeds: Iterable[int]) -> int:
    ahead = 0
    for seed in seeds:
        with world(seed) as one:
            for _ in range(LIVES):
                one.live(300)
            ahead += one.ahead
    return ahead


def test_a_backup_settles_nothing_that_is_not_in_it() -> None:
    assert ahead_in(WorldOfBackups, every(4, (*AHEAD_SEEDS, *range(6)))) == 0


def test_what_is_settled_has_to_be_measured_before_the_checkpoint() -> None:
    class Unmeasured(WorldOfBackups):
        is_measured = False

    assert any(ahead_in(Unmeasured, [seed]) for seed in AHEAD_SEEDS)
