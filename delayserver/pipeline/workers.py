"""Spark's Python workers: processes that plan a read, read, or stage, one task after the other.

After every task a worker collects garbage in full, which looks at everything that was imported:
some 60,000 objects, 40 ms of a processor, as long as it takes to read two million rows.

Cost: none. Threads: any.
"""

import functools
import gc


@functools.cache
def spare_imports() -> None:
    """Leave the objects that exist in this process now out of all later collections; once."""
    gc.freeze()
