"""The process of one shard: `python -m delayserver.serve.shard`, as a supervisor starts it.

    supervisor ── a line of JSON, `order` ──▶ standard input of `main` ──▶ delayserver.serve.process

Behind that line come reports about the cluster's other nodes, for as long as the supervisor lives.

Cost: that of a server's imports. As in the command `serve`, the collector does not look at the
modules that it loads: they live until the end, and `delayserver.serve.process` turns the collector
on again. Threads: the server's own.
"""

import gc
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from delayserver.cluster.membership import Membership
    from delayserver.config import Settings
    from delayserver.shards.place import ShardPlace


def order(settings: "Settings", place: "ShardPlace", membership: "Membership | None") -> bytes:
    """The line that says which shard to serve, and how."""
    document = {
        "settings": settings.model_dump(mode="json"),
        "shard": place.shard,
        "count": place.count,
        "data_dir": str(place.data_dir),
        "sockets": str(place.sockets),
        "membership": None if membership is None else membership.to_document(),
    }
    return json.dumps(document).encode() + b"\n"


def main() -> int:
    """Serve one shard, as the line says."""
    gc.disable()
    from delayserver.cluster.membership import Membership
    from delayserver.config import Settings
    from delayserver.serve.process import serve
    from delayserver.serve.reporting import EXIT_REFUSED
    from delayserver.shards.place import ShardPlace

    # In a cluster, reports about the owners may follow at once.
    line = os.read(sys.stdin.fileno(), 1 << 20)
    if not line:
        return EXIT_REFUSED  # It has ended already.
    line, _, rest = line.partition(b"\n")
    document = json.loads(line)
    place = ShardPlace(
        document["shard"],
        document["count"],
        Path(document["data_dir"]),
        Path(document["sockets"]),
    )
    member = document["membership"]
    membership = None if member is None else Membership.from_document(member)
    return serve(Settings(**document["settings"]), place, membership, rest)


if __name__ == "__main__":
    sys.exit(main())
