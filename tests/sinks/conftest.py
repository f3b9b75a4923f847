"""A server for the tests of a file of this folder, each of which starts one broker."""

from collections.abc import Iterator

import pytest

from tests.integration.api_support import ApiServer, unique


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    with ApiServer(tmp_path_factory.mktemp("server")) as started:
        started.start()
        yield started
        started.shut_down()


@pytest.fixture
def name() -> str:
    """Of a subscription, of its subject, and of where its messages go."""
    return unique("due")


@pytest.fixture
def path(name: str, server: ApiServer) -> Iterator[str]:
    """Of a subscription, which is deleted behind the test."""
    path = f"/v1/subscriptions/{name}"
    yield path
    server.delete(path)
