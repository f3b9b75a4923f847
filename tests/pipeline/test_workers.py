"""What Spark's workers are spared."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    "use",
    [
        "from delayserver.pipeline.logs.source import DelayLog; DelayLog({'path': '/'})",
        "from delayserver.pipeline.states.states import DelayState; DelayState({'path': '/'})",
    ],
)
def test_garbage_is_not_looked_for_in_what_was_imported(use: str) -> None:
    script = f"""
import gc
{use}
assert gc.get_freeze_count() > 10_000
assert len(gc.get_objects()) < 1_000
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def test_a_worker_that_reads_columns_imports_no_pandas() -> None:
    script = """
import sys
import numpy as np
import pyarrow as pa
from delayserver.pipeline.logs.columns import LOGS, BatchBuilder, Names, name_table
from delayserver.pipeline.logs.dispatched import DISPATCHED_DTYPE
from storage.rows import DTYPES, LogKind
names = Names(name_table({1: "order.unpaid"}))
for kind, columns in LOGS.items():
    schema = pa.schema(
        [(name, columns.types[name]) for name in (*columns.stored, "hour", "due", "subscription")]
    )
    batches = BatchBuilder(columns, schema, names)
    dtype = DISPATCHED_DTYPE if kind is LogKind.DISPATCH else DTYPES[kind]
    assert not list(batches.add(np.zeros(3, dtype)))
    assert [batch.num_rows for batch in batches.rest()] == [3]
assert "pandas" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], check=True)
