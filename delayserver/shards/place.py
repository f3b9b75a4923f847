"""Where a process stands among others. A server alone is the only shard of one.

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
    """The directory of all shards together."""
    sockets: Path | None
    """The directory of the sockets by which those of one machine find each other; None: nobody
    looks for this one."""

    @classmethod
    def alone(cls, data_dir: Path) -> "ShardPlace":
        """The place of a server that no supervisor has started."""
        return cls(0, 1, data_dir, None)

    @property
    def is_alone(self) -> bool:
        """Whether it is such a server: its directory is the shard's own, and its port too."""
        return self.sockets is None
