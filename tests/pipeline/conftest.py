"""One Spark session for all tests of the pipeline, since starting one takes seconds."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from pyspark.sql import SparkSession
from sessions import QUICK_SETTINGS

from delayserver.pipeline import session as sessions
from delayserver.pipeline.session import open_session


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whatever asks for the session needs Java."""
    for item in items:
        if "spark" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.spark)


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """A session on two cores. Who uses it leaves its settings as they are."""
    with open_session("tests", master="local[2]", settings=QUICK_SETTINGS) as session:
        yield session


@pytest.fixture
def shared_session(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands take the session of the tests, and leave it open."""

    @contextmanager
    def shared(*arguments: object, **settings: object) -> Iterator[SparkSession]:
        yield spark

    monkeypatch.setattr(sessions, "open_session", shared)
