"""The simulated world of several shards: the real code of each, its links, consumers, definitions
and limits, driven by one seed.

    ShardsWorld ── schedules ──▶ ShardsMachine ── shards: each a ShardServer, and its real `Member`,
      │                            │                on a simulated disk, clock and event loop
      │                            └────────────── SimulatedSockets, over which the real links run
      ├── Publishers, Definers, Receivers, ShardConsumers
      └── Promises, and a ledger for each shard

A shard is killed, or loses power, by itself or with all others, and is started again while the
others go on. Then the world quietens down: everything must have arrived, and nothing may be left.

    python -m tests.world --shards 3 --seed 7 --cycles 1000
"""

from tests.world.shards.world import ShardsWorld, run_shards_world

__all__ = ["ShardsWorld", "run_shards_world"]
