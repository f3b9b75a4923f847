"""Servers for the tests of the API: two that are shared, and as many of one's own as are needed."""

import ssl
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import trustme

from tests.integration.api_support import ApiServer, Receiver

SMALL = {"body_max_bytes": 100_000, "batch_max_messages": 1000}


@pytest.fixture(scope="session")
def shared_api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """A server with small limits. Who uses it takes names of its own, and ends nothing."""
    directory = tmp_path_factory.mktemp("shared")
    server = ApiServer(directory, backup_dir=directory / "backups", backup_log_ms=100, **SMALL)
    server.start()
    yield server
    server.shut_down()


@pytest.fixture(scope="session")
def _shards_api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    directory = tmp_path_factory.mktemp("shards")
    server = ApiServer(
        directory, backup_dir=directory / "backups", backup_log_ms=100, shards=2, **SMALL
    )
    server.start()
    yield server
    server.shut_down()


@pytest.fixture(params=["alone", "shards"])
def either_api(request: pytest.FixtureRequest) -> ApiServer:
    """The same, and one of two shards: whoever calls cannot tell them apart."""
    name = "shared_api" if request.param == "alone" else "_shards_api"
    server: ApiServer = request.getfixturevalue(name)
    return server


@pytest.fixture(scope="session")
def _lasting_api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    server = ApiServer(tmp_path_factory.mktemp("lasting"))
    yield server
    server.shut_down()


@pytest.fixture
def lasting_api(_lasting_api: ApiServer) -> ApiServer:
    """One directory, shared like the other, whose process may be ended and started again."""
    if not _lasting_api.process.is_running:
        _lasting_api.start()
    return _lasting_api


@pytest.fixture
def make_api(tmp_path: Path) -> Iterator[Callable[..., ApiServer]]:
    """Makes servers that are not started yet, each with a directory of its own."""
    servers: list[ApiServer] = []

    def make(**settings: object) -> ApiServer:
        directory = tmp_path / f"server-{len(servers)}"
        directory.mkdir()
        servers.append(ApiServer(directory, **settings))
        return servers[-1]

    yield make
    for server in servers:
        server.shut_down()


@pytest.fixture
def api(make_api: Callable[..., ApiServer]) -> ApiServer:
    """A server of one's own, started."""
    server = make_api()
    server.start()
    return server


@pytest.fixture(scope="session")
def receiver() -> Iterator[Receiver]:
    """A webhook receiver."""
    receiver = Receiver()
    yield receiver
    receiver.close()


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    """Who makes the certificates."""
    return trustme.CA()


@pytest.fixture
def certificate(authority: trustme.CA, tmp_path: Path) -> dict[str, Path]:
    """Settings of a server for 127.0.0.1."""
    made = authority.issue_cert("127.0.0.1")
    made.cert_chain_pems[0].write_to_path(str(tmp_path / "cert.pem"))
    made.private_key_pem.write_to_path(str(tmp_path / "key.pem"))
    return {"tls_cert": tmp_path / "cert.pem", "tls_key": tmp_path / "key.pem"}


@pytest.fixture
def trusting(authority: trustme.CA) -> ssl.SSLContext:
    """What a client verifies such a server with."""
    context = ssl.create_default_context()
    authority.configure_trust(context)
    return context
