"""What Spark's workers are spared."""

import subprocess
import sys
from pathlib import Path

import pytest

from storage.rows import HOUR_MS
from tests.pipeline.store import Store


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


def test_a_worker_that_reads_tables_imports_neither_pandas_nor_settings(tmp_path: Path) -> None:
    """Half a second of a processor, and a quarter; a source is asked by several processes each time
    that a table is read."""
    store = Store(tmp_path)
    store.subscribe("mail", "order.*")
    store.publish("order.unpaid", [1000, 2000])
    store.run(HOUR_MS + 3000)
    store.checkpoint()
    store.kill()
    script = f"""
import sys
from delayserver.pipeline.archive import source
from delayserver.pipeline.logs.source import DelayLog
from delayserver.pipeline.publish import publish
from delayserver.pipeline.states.history import TYPES, DelayHistory
from delayserver.pipeline.states.states import COLUMNS, DelayState
from tests.pipeline.reading import read_table

payload = ("key", "headers", "body", "subject", "subscription", "due", "hour", "shard")
assert read_table(DelayLog, {store.root!r}, *payload).num_rows == 2
assert read_table(DelayLog, {store.root!r}, log="dispatch").num_rows == 2
assert read_table(DelayState, {store.root!r}, *COLUMNS.types).num_rows == 2
assert set(read_table(DelayHistory, {store.root!r}, *TYPES)["state"].to_pylist()) == {{"delivered"}}
imported = {{"pandas", "pydantic", "delayserver.config"}} & sys.modules.keys()
assert not imported, imported
"""
    subprocess.run([sys.executable, "-c", script], check=True, cwd=Path(__file__).parents[2])
