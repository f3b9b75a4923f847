"""Brokers for the tests of this folder: three, for all tests of a process.

Each worker of pytest that gets a file of this folder has brokers of its own, so a test may kill
one; it brings it back before it ends.
"""

from collections.abc import Iterator

import pytest

from storage.replicated.kafka_settings import ClusterUrl
from tests.cluster.brokers import Brokers
from tests.cluster.nodes import new_cluster


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent.name == "cluster":
            item.add_marker(pytest.mark.kafka)
            # Three brokers that start on a busy machine take some 40 s of the first test's time.
            item.add_marker(pytest.mark.timeout(300))


@pytest.fixture(scope="session")
def brokers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Brokers]:
    with Brokers(tmp_path_factory.mktemp("brokers")).running() as started:
        yield started


@pytest.fixture
def url(brokers: Brokers) -> ClusterUrl:
    """A cluster of one shard."""
    return new_cluster(brokers)
