"""The check after every test finds what it is there for."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from storage.files import OsFiles
from tests.stores import SIMULATED_MAX, Stores
from tests.unit.fakes import START_MS, Disk, Log
from tests.world.storage.catalog import MemoryCatalog
from tests.world.storage.faults import Faults, FaultyFiles
from tests.world.storage.files import SimulatedFiles

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests/golden/v1"

pytestmark = pytest.mark.unchecked("they are checked by the tests themselves")


def written(damaged: bool) -> tuple[SimulatedFiles, MemoryCatalog]:
    files, log = SimulatedFiles(), Log()
    disk = Disk(files)
    log.publish(START_MS)
    disk.file(log.close())
    disk.replay.checkpoint()
    if damaged:
        [name] = files.list("schedule")
        files.open(f"schedule/{name}").pwrite([b"\xff"], 70)
    return files, disk.catalog


def test_damage_is_found_once() -> None:
    stores = Stores()
    stores.add(*written(damaged=False))
    assert stores.take() == []
    files, catalog = written(damaged=True)
    stores.add(FaultyFiles(files, Faults()), catalog)
    [found] = stores.take()
    assert "the rows do not match their checksum" in found
    assert stores.take() == []


def test_it_is_so_if_many_were_written() -> None:
    stores = Stores()
    stores.add(*written(damaged=True))
    for _ in range(SIMULATED_MAX + 1):
        stores.add(*written(damaged=False))
    assert len(stores.take()) == 1


def test_a_machine_that_is_off_is_not_looked_at() -> None:
    stores = Stores()
    files, catalog = written(damaged=True)
    stores.add(files, catalog)
    files.kill()
    assert stores.take() == []


def test_a_real_directory_is_checked_once_nobody_has_it(tmp_path: Path) -> None:
    stores = Stores()
    root = tmp_path / "some" / "data"
    shutil.copytree(GOLDEN, root)
    stores.add_below(tmp_path, depth=1)
    assert stores.take() == []
    stores.add_below(tmp_path, depth=2)
    with OsFiles(str(root)).lock("LOCK"):
        assert stores.take() == []
    [found] = stores.take()
    assert str(root) in found and "the catalog failed to open" in found
    stores.add_below(tmp_path, depth=2)
    assert stores.take() == []


TESTS = """
import pytest
from tests.unit.test_stores import written

def test_unmarked(): written(damaged=True)

@pytest.mark.damaged("here")
def test_damaged(): written(damaged=True)

@pytest.mark.damaged("nowhere")
def test_sound(): written(damaged=False)

@pytest.mark.unchecked("why not")
def test_unchecked(): written(damaged=True)
"""


def test_a_test_fails_by_it(tmp_path: Path) -> None:
    (tmp_path / "test_them.py").write_text(TESTS)
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "tests.conftest", "test_them.py"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    lines = [line for line in result.stdout.splitlines() if line.startswith("ERROR")]
    assert [line.partition("::")[2].split()[0] for line in lines] == ["test_unmarked", "test_sound"]
    assert "4 passed" in result.stdout
