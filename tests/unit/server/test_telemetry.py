"""Telemetry is there when it is asked for, and says what is missing when it is not installed."""

import subprocess
import sys

import pytest

from delayserver.errors import InputError


def test_what_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "delayserver.server.telemetry", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(InputError, match=r"the extra `otel`"):
        import delayserver.server.telemetry  # noqa: F401
    monkeypatch.delitem(sys.modules, "delayserver.server.telemetry", raising=False)


def test_a_server_without_it_does_not_load_it() -> None:
    code = (
        "import sys, delayserver.serve.process; "
        "assert not {'opentelemetry.sdk', 'delayserver.server.telemetry'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
