"""Where a process stands among others.

Cost: none. Threads: values.
"""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class ShardPlace:
    """Where a shard stands among the others."""

    shard: int
    count: int
    data_dir: Path
    """The directory of all shards."""
    sockets: Path
    """The directory of the sockets by which those of one machine find each other."""
