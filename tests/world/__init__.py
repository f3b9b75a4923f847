"""The simulated world: the real server without threads, network, disk and clock, driven by a seed.

    World ── schedules ──▶ SimulatedServer ── the real Engine, Replay, Loader, Settler, Reader,
      │                        │              recover, and the real workers, called step by step
      │                        ▼
      │                    SimulatedFiles, MemoryCatalog, Faults        (tests.world.storage)
      ├── Clients, Operators, Subscribers, and a clock that jumps both ways. What the API awaits
      │   (Calls) runs on a SimulatedLoop, among all the rest
      └── Ledger: what was promised, what is durable, what was received; every promise is checked

A world lives many lives. Each begins with a recovery and ends with a stop, a kill, a power loss, or
a crash in the middle of a file call; the disk may refuse or fail on the way. Then the world
quietens down: everything that was accepted must have arrived or be a dead letter, every hour must
retire, and nothing may be left over. The seed decides everything, so a seed that fails fails again:

    python -m tests.world --seed 7 --cycles 1000

Rejected: comparing with a second implementation of the server. The ledger is built from the records
that the message log made durable and from the answers that were given; both are few and simple.
"""

from tests.world.ledger import Ledger
from tests.world.server import Observer, SimulatedClock, SimulatedServer
from tests.world.violation import Violation
from tests.world.world import World, run_world

__all__ = [
    "Ledger",
    "Observer",
    "SimulatedClock",
    "SimulatedServer",
    "Violation",
    "World",
    "run_world",
]
