"""One Spark session, and one Kafka broker, for all tests of the pipeline, since starting one takes
seconds."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from pyspark.sql import SparkSession
from sessions import QUICK_SETTINGS

from delayserver.pipeline import session as sessions
from delayserver.pipeline.session import open_session
from tests.cluster.brokers import Brokers
from tests.pipeline.forking import make_forking_python
from tests.pipeline.jars import spark_kafka_jars
from tests.pipeline.objects import ObjectStore


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whatever asks for the session, or for brokers, needs Java."""
    for item in items:
        names = getattr(item, "fixturenames", ())
        if "spark" in names:
            item.add_marker(pytest.mark.spark)
        if {"broker", "cluster"} & set(names):
            item.add_marker(pytest.mark.kafka)
            # It starts in the time of the first test, and so does Spark.
            item.add_marker(pytest.mark.timeout(300))


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """A session on two cores. Who uses it leaves its settings as they are."""
    # A JVM that runs takes no more jars, so this one has those of Kafka from the beginning.
    settings = QUICK_SETTINGS | {"spark.jars": ",".join(spark_kafka_jars())}
    python = make_forking_python(tmp_path_factory.mktemp("spark"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYSPARK_PYTHON", str(python))
        with open_session("tests", master="local[2]", settings=settings) as session:
            patch.undo()  # Programs that tests start have the Python that users have.
            yield session


@pytest.fixture(scope="session")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Brokers]:
    """One Kafka broker, for all tests of the process."""
    with Brokers(tmp_path_factory.mktemp("broker"), count=1).running() as started:
        yield started


@pytest.fixture
def shared_session(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands take the session of the tests, and leave it open."""

    @contextmanager
    def shared(*arguments: object, **settings: object) -> Iterator[SparkSession]:
        yield spark

    monkeypatch.setattr(sessions, "open_session", shared)


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectStore]:
    """An object store with one bucket."""
    with ObjectStore(tmp_path_factory.mktemp("s3")) as started:
        started.make_bucket()
        yield started
