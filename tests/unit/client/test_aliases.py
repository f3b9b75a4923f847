"""Old names: each use works as the new call, and warns once with its name."""

import asyncio
import inspect
import re
import subprocess
import warnings
from pathlib import Path
from typing import Any

import pytest

import delayserver.client
from delayserver.client import AsyncClient, Client, NotFoundError
from tests.unit.client.fake_server import FakeTransport, message_id, problem

ROOT = Path(__file__).parents[3]
KINDS = {
    "AsyncProducer": "AsyncClient(…).messages",
    "AsyncSubscriptions": "AsyncClient(…).subscriptions",
    "AsyncSchedules": "AsyncClient(…).schedules",
    "AsyncSources": "AsyncClient(…).sources",
    "AsyncBackups": "AsyncClient(…).backups",
    "AsyncConsumer": "AsyncClient(…).consumer(…)",
    "Producer": "Client(…).messages",
    "Subscriptions": "Client(…).subscriptions",
    "Schedules": "Client(…).schedules",
    "Sources": "Client(…).sources",
    "Backups": "Client(…).backups",
    "Consumer": "Client(…).consumer(…)",
}
MOVED: dict[str, tuple[str, tuple[Any, ...], dict[str, Any]]] = {
    "Producer.event": ("events.send", ("k",), {}),
    "Producer.heartbeat": ("heartbeats.put", ("k",), {"timeout": "10s", "subject": "s"}),
    "Producer.get_heartbeat": ("heartbeats.get", ("k",), {}),
    "Producer.delete_heartbeat": ("heartbeats.delete", ("k",), {}),
    "Subscriptions.dead_letters": ("dead_letters.list", ("n",), {}),
    "Subscriptions.redrive": ("dead_letters.redrive", ("n",), {}),
    "Subscriptions.discard": ("dead_letters.discard", ("n", message_id(1)), {}),
}
MODES = {"": "Client", "Async": "AsyncClient"}


def make(name: str) -> tuple[Any, FakeTransport]:
    """An old class whose server refuses everything."""
    transport = FakeTransport(default=lambda method, path, document: problem(404))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return getattr(delayserver.client, name)(transport=transport), transport


def called(client: Any, method: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
    """Make a call that is refused, in either mode, and close the client."""

    async def wait() -> None:
        found = getattr(client, method)(*arguments, **options)
        try:
            await (anext(found) if inspect.isasyncgen(found) else found)
        finally:
            await client.close()

    with pytest.raises(NotFoundError):
        if isinstance(client, Client) or not inspect.iscoroutinefunction(type(client).close):
            with client:
                found = getattr(client, method)(*arguments, **options)
                next(iter(found))
        else:
            asyncio.run(wait())


@pytest.mark.parametrize(("old", "new"), KINDS.items())
def test_an_old_class_warns_once_where_it_is_made(old, new):
    transport = FakeTransport(default=lambda method, path, document: problem(404))
    with pytest.warns(DeprecationWarning) as warned:
        getattr(delayserver.client, old)("http://127.0.0.1:1", transport=transport)
    (one,) = warned
    assert str(one.message) == f"{old}(…) ends in delayserver 0.3: use {new}"
    assert one.filename == __file__


@pytest.mark.parametrize("old", KINDS)
def test_an_old_class_takes_its_address_by_name(old):
    with pytest.warns(DeprecationWarning), pytest.raises(ValueError, match="owner_hosts is"):
        getattr(delayserver.client, old)(url="http://127.0.0.1:1", owner_hosts="all")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("old", "call"), MOVED.items())
def test_a_call_that_has_moved_warns_once_and_works(old, call, mode):
    kind, method = f"{mode}{old}".split(".")
    new, arguments, options = call
    client, transport = make(kind)
    with pytest.warns(DeprecationWarning) as warned:
        called(client, method, arguments, options)
    (one,) = warned
    expected = f"{kind}.{method}(…) ends in delayserver 0.3: use {MODES[mode]}.{new}(…)"
    assert str(one.message) == expected
    assert one.filename == __file__
    assert transport.closed and len(transport.requests) == 1


@pytest.mark.parametrize("old", [kind for kind in KINDS if "Consumer" not in kind])
def test_an_old_class_has_every_call_that_it_had(old):
    client, transport = make(old)
    new: Any = {"Async": AsyncClient}.get(old[:5], Client)(transport=transport)
    group = KINDS[old].rpartition(".")[2]

    def calls(kind: type) -> set[str]:
        return {name for name in dir(kind) if name[0] != "_"}

    kind = old.removeprefix("Async")
    moved = {name.split(".")[1] for name in MOVED if name.startswith(f"{kind}.")}
    assert calls(type(client)) == calls(type(getattr(new, group))) | moved | {"close"}


@pytest.mark.parametrize("old", ["AsyncSchedules", "Schedules"])
def test_an_old_class_does_as_the_group(old):
    client, transport = make(old)
    called(client, "get", ("daily",), {})
    assert transport.requests == [("GET", "/v1/schedules/daily", None)]


def test_our_own_code_uses_no_old_name():
    imported = re.compile(r"from delayserver\.client import (\([^)]*\)|.*)")
    names = {kind for kind in KINDS if "Consumer" not in kind}
    folders = ("README.md", "delayserver", "docs", "scripts", "tests")
    command = ["git", "grep", "-lE", r"from delayserver\.client import", "--", *folders]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    paths = [ROOT / path for path in found.stdout.split()]
    assert len(paths) > 20
    used = {
        str(path)
        for path in paths
        for match in imported.finditer(path.read_text())
        if names & set(re.findall(r"\w+", match[1]))
    }
    assert used == set()
