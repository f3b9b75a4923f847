"""The store is checked after every test that wrote one, with the code of `delayserver check`.

    simulated   what a `Replay` was made for: it files the records and writes the catalog
    real        the same on real files, and every data directory below the test's `tmp_path`,
                whichever process wrote it; one that somebody has open is checked later

What a fixture of the session has written is checked at the end. A machine that was killed or lost
power is not: its disk goes on as that of the next one.

A test that leaves damage on purpose says so and why with the mark `damaged`: the check has to name
it then. A test whose stores say nothing, because it plants bugs or flips bits by the hundred, is
marked `unchecked`.

What was checked is removed, unless the test has failed: a server sets 64 MiB aside for its message
log, and all of them would fill a disk before a run has ended.

Several workers take whole files (`--dist loadfile`). Those that take long come before all others,
lest one worker go through such a file alone at the end. Folders whose files share what is dear to
start, and costs time while it waits (brokers, a Spark), belong to one worker.
"""

import shutil
from collections.abc import Generator, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

from delayserver.schedule.replay import Replay
from storage.catalog import Catalog
from storage.tiered_catalog import TieredCatalog
from tests import budget
from tests.accounting import RunTimes, WorkerTimes
from tests.stores import Stores

# A busy machine is no finding: Hypothesis is to find wrong answers, and not slow ones.
settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("any machine")

HERE = Path(__file__).parent
LONGEST_FILE = "integration/test_bench.py"
SHARING = ("cluster", "pipeline/archive", "pipeline")
"""Folders here whose files share brokers, or a Spark."""
ALONE = (
    "pipeline/test_jvm_ends.py",
    "pipeline/test_on_spark_cluster.py",
    "pipeline/test_spark_connect.py",
)
"""… but for those that start their own."""
WAITING = ("crash", "console", "soak", "sinks", "observe", "simulation", "integration")
"""… and those whose files wait for clocks and processes."""

STORES = Stores()
_FAILED = pytest.StashKey[bool]()


class _Scheduling(LoadFileScheduling):
    """Whole files, and of some folders all of them together. (The marks of `--dist loadgroup` do
    not reach xdist from pytest 9.2 on.)"""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.split("::", 1)[0]
        place = Path(file).relative_to(HERE.name).as_posix()
        if place in ALONE:
            return file
        return next((one for one in SHARING if place.startswith(f"{one}/")), file)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadFileScheduling | None:
    """Those of a run with `--dist loadfile`."""
    return _Scheduling(config, log) if config.getvalue("dist") == "loadfile" else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order the files, and leave each as it is."""
    order = (LONGEST_FILE, *SHARING, *ALONE, *WAITING)

    def place(item: pytest.Item) -> int:
        if not item.path.is_relative_to(HERE):
            return len(order)  # Others may use this as a plugin.
        file = item.path.relative_to(HERE).as_posix()
        if file in order:
            return order.index(file)
        folders = (at for at, one in enumerate(order) if file.startswith(f"{one}/"))
        return next(folders, len(order))

    items.sort(key=place)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("budget")
    group.addoption("--budget", action="store_true", help="compare the run with tests/BUDGET.md")
    group.addoption("--report", action="store_true", help="write tests/BUDGET.md anew")


def pytest_configure(config: pytest.Config) -> None:
    if not (config.getoption("--budget") or config.getoption("--report")):
        return
    is_worker = hasattr(config, "workerinput")
    if is_worker or config.getvalue("dist") == "no":
        config.pluginmanager.register(WorkerTimes())
    if not is_worker:
        tell = budget.write_page if config.getoption("--report") else budget.compare
        config.pluginmanager.register(RunTimes(tell))


@pytest.fixture(scope="session", autouse=True)
def _stores() -> Iterator[None]:
    """Note what is written."""
    original = Replay.__init__

    def init(self: Replay, catalog: Catalog, schedule: Any, *rest: Any, **named: Any) -> None:
        original(self, catalog, schedule, *rest, **named)
        inner = catalog.inner if isinstance(catalog, TieredCatalog) else catalog
        STORES.add(schedule.files, inner)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Replay, "__init__", init)
        yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    STORES.is_off = item.get_closest_marker("unchecked") is not None
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    item.stash[_FAILED] = item.stash.get(_FAILED, False) or report.failed
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    funcargs = getattr(item, "funcargs", {})
    result = yield
    if "tmp_path" in funcargs:
        STORES.add_below(funcargs["tmp_path"], depth=2)
    found = STORES.take()
    if item.get_closest_marker("damaged") is None:
        _refuse("the test", found)
    elif not found:
        pytest.fail("it is marked as leaving damage, and a check finds none", pytrace=False)
    path = funcargs.get("tmp_path")
    if path is not None and not (item.stash[_FAILED] or STORES.has_below(path)):
        shutil.rmtree(path, ignore_errors=True)
    if nextitem is None:
        base: pytest.TempPathFactory = item.config._tmp_path_factory  # type: ignore[attr-defined]
        STORES.add_below(base.getbasetemp(), depth=3)
        _refuse("some fixture", STORES.take(everything=True))
    return result


def _refuse(whose: str, damage: Iterable[str]) -> None:
    if text := "\n".join(damage):
        pytest.fail(f"a check of what {whose} has written finds damage:\n{text}", pytrace=False)
