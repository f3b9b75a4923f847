"""A command line whose server is a function of this process."""

import json
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner, Result

from delayserver.cli import make_app, modules_of


@dataclass
class Cli:
    """Runs commands; `answers` are given one after the other, `requests` is what was asked."""

    monkeypatch: pytest.MonkeyPatch
    answers: list[httpx.Response | BaseException] = field(default_factory=list)
    requests: list[httpx.Request] = field(default_factory=list)
    clients: list[dict[str, Any]] = field(default_factory=list)

    def answer(self, status: int, document: Any, **headers: str) -> None:
        """The next answer of the server."""
        self.answers.append(httpx.Response(status, json=document, headers=headers))

    def run(self, *arguments: str, stdin: str | None = None) -> Result:
        """One command, with the modules that the command line imports for it."""
        app = make_app(modules_of(list(arguments)))
        return CliRunner().invoke(app, list(arguments), input=stdin, obj=self._client)

    @property
    def asked(self) -> tuple[str, str, Any]:
        """Method, path and document of the only request."""
        (request,) = self.requests
        path = request.url.raw_path.decode()
        return request.method, path, json.loads(request.content) if request.content else None

    def _client(self, **arguments: Any) -> httpx.Client:
        self.clients.append(arguments)
        return httpx.Client(transport=httpx.MockTransport(self._handle), **arguments)

    def _handle(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        answer = self.answers.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        return answer


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch) -> Cli:
    names = ("URL", "TOKEN", "CONFIG", "CLIENT_CERT", "CLIENT_KEY")
    for name in (*names, "WEBHOOK_SECRET", "BROKER_PASSWORD"):
        monkeypatch.delenv(f"DELAYSERVER_{name}", raising=False)
    # Help and errors are compared as text: no colours, no wrapping.
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("TERM", "dumb")
    return Cli(monkeypatch)
