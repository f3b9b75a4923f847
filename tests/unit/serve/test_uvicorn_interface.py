"""uvicorn's private interface: all of it that is used is written down, and is there."""

import ast
import inspect
from collections.abc import Iterator

import pytest
import uvicorn
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from delayserver.api.hot.connection import Connection
from delayserver.api.hot.protocol import _HotProtocol, _Unanswered
from delayserver.config import Settings
from delayserver.errors import LibraryError
from delayserver.serve import process
from delayserver.serve.reporting import EXIT_REFUSED
from delayserver.serve.uvicorn_interface import ATTRIBUTES, METHODS, check_uvicorn, given_names


def test_the_installed_uvicorn_has_all_of_it() -> None:
    check_uvicorn()


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind, methods in METHODS.items() for name in methods]
)
def test_a_missing_method_is_named(kind: type, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(kind, name)
    with pytest.raises(LibraryError, match=rf"lacks {kind.__name__}\.{name}\(\)[.;] "):
        check_uvicorn()


def test_other_parameters_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def send_400_response(self: object, msg: str, status: int) -> None: ...

    monkeypatch.setattr(HttpToolsProtocol, "send_400_response", send_400_response)
    with pytest.raises(LibraryError, match=r"send_400_response\(msg\), it has \(msg, status\)"):
        check_uvicorn()


@pytest.mark.parametrize("kind", ATTRIBUTES)
def test_missing_attributes_are_named(kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(self: object) -> None: ...

    def made_of(
        self: object, config: object, server_state: object, app_state: object, _loop: object
    ) -> None: ...

    monkeypatch.setattr(kind, "__init__", nothing)
    if kind is HttpToolsProtocol:
        monkeypatch.setattr(kind, "__init__", made_of)
        monkeypatch.setattr(kind, "on_message_begin", nothing)
    lacks = "; ".join(f"{kind.__name__}.{name}" for name in ATTRIBUTES[kind])
    with pytest.raises(LibraryError, match=f"lacks {lacks}. Install"):
        check_uvicorn()


def test_a_server_does_not_start_on_another_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path
) -> None:
    monkeypatch.delattr(HttpToolsProtocol, "_start_asgi_task")
    # A logger that is set up keeps this test's standard error for all tests behind it.
    monkeypatch.setattr(process, "set_up_logging", lambda settings, place: None)
    settings = Settings(data_dir=tmp_path / "data", port=0)
    assert process.serve(settings) == EXIT_REFUSED
    assert "_start_asgi_task" in capsys.readouterr().out
    assert not (tmp_path / "data").exists()


# ── the list is whole ──────────────────────────────────────────────────────────────────────────


def attributes(kind: type, *owners: str) -> Iterator[str]:
    """What a class asks of `x.name`, where x, or the last part of it, is an owner; where that is
    `self`, what it overrides, too."""
    for node in ast.walk(ast.parse(inspect.getsource(kind))):
        if isinstance(node, ast.Attribute):
            owner = node.value
            if isinstance(owner, ast.Call) and ast.unparse(owner) == "super()":
                owner = ast.Name("self")
            last = getattr(owner, "id", None) or getattr(owner, "attr", None)
            if last in owners:
                yield node.attr
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and "self" in owners:
            yield node.name


def has(kind: type) -> set[str]:
    """Names of a class and of its objects, but for those that all objects have."""
    return {*vars(kind), *given_names(kind)} - {*vars(object)}


def listed(kind: type) -> set[str]:
    return {*METHODS.get(kind, ()), *ATTRIBUTES.get(kind, ())}


@pytest.mark.parametrize(
    ("kind", "owners"),
    [
        (HttpToolsProtocol, ["self"]),
        (FlowControl, ["flow"]),
        (RequestResponseCycle, ["cycle", "unanswered", "_unanswered"]),
        (ServerState, ["server_state"]),
    ],
)
def test_what_connections_use_is_listed(kind: type, owners: list[str]) -> None:
    used = {name for ours in (Connection, _HotProtocol) for name in attributes(ours, *owners)}
    assert (used & has(kind)) - listed(kind) == set()


def test_what_the_wiring_uses_is_listed() -> None:
    used = set(attributes(process._Uvicorn, "self")) | {"serve"}
    assert used & has(uvicorn.Server) == listed(uvicorn.Server)


def test_a_stand_in_for_a_cycle_has_what_the_protocol_asks_of_one() -> None:
    asked = set(attributes(HttpToolsProtocol, "cycle", "existing_cycle"))
    # It receives bodies, and runs an application, for its own cycles alone.
    assert asked - {"body", "run_asgi"} == listed(RequestResponseCycle)
    stand_in = _Unanswered()
    assert all(hasattr(stand_in, name) for name in listed(RequestResponseCycle))
