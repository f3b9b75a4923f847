"""show, pause, resume, delete: the commands for all things with a name and a definition.

Cost: one request each. Threads: one.
"""

from collections.abc import Callable
from typing import Any

import typer

from delayserver.cli.session import Session, path, server_command


def register(
    group: typer.Typer,
    kind: str,
    example: str,
    argument: Any,
    *,
    show: str,
    pause: str,
    resume: str,
    delete: str,
) -> None:
    """Add the commands to a group. `example`: a name; `argument`: how one is asked for; the others:
    texts of the help."""

    def asking(method: str, *what: str) -> Callable[..., None]:
        def ask(session: Session, *, name: str) -> None:
            session.show(session.call(method, path(kind, name, *what)))

        return ask

    def end(session: Session, *, name: str) -> None:
        session.call("DELETE", path(kind, name))
        session.show({"deleted": name}, lambda: f"{name} is deleted")

    for command, function, text in (
        ("show", asking("GET"), show),
        ("pause", asking("POST", "pause"), pause),
        ("resume", asking("POST", "resume"), resume),
        ("delete", end, delete),
    ):
        function.__doc__, function.__annotations__["name"] = text, argument
        server_command(group, command, f"{kind} {command} {example}")(function)
