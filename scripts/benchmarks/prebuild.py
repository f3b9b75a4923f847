"""A data directory with many messages that wait, made by the source tree that is on PYTHONPATH.

    PYTHONPATH=TREE:TREE/scripts/benchmarks python -P prebuild.py DOCUMENT

DOCUMENT is JSON: the `directory`, which is empty; the `body` of each message and its `subject`; and
`stretches`, each a count and two moments in ms between which so many messages are due, at random.

A program of its own, since a server of another revision is measured on what its own code writes.
"""

import json
import sys
from pathlib import Path

import numpy as np
from directories import BATCH_ROWS, Maker


def main() -> None:
    """Make it."""
    wanted = json.loads(sys.argv[1])
    maker = Maker(Path(wanted["directory"]), wanted["body"].encode(), (wanted["subject"],))
    maker.define()
    rng = np.random.default_rng(1)
    for count, from_ms, to_ms in wanted["stretches"]:
        for at in range(0, count, BATCH_ROWS):
            maker.publish(rng.integers(from_ms, to_ms, min(BATCH_ROWS, count - at)))
    maker.close()


if __name__ == "__main__":
    main()
