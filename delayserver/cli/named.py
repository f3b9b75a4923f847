"""list, show, pause, resume, delete: the commands for all things with a name and a definition.

Cost: one request each; of a list one for each 100. Threads: one.
"""

from collections.abc import Callable
from typing import Annotated, Any

import typer

from delayserver.cli.output import help_text, rows
from delayserver.cli.session import NAMED_PAGE_MAX, Session, path, server_command

Documents = list[dict[str, Any]]


def add_group(
    app: typer.Typer,
    kind: str,
    example: str,
    text: str,
    columns: tuple[str, ...],
    shown: Callable[[Documents], Documents] = lambda found: found,
) -> typer.Typer:
    """Add the group of a kind, with its list.

    `kind`: in the plural; `example`: a name; `text`: the help of the group; `columns`: the fields
    in the table of the list; `shown`: makes the rows of that table of the answer."""
    group = typer.Typer(rich_markup_mode="rich")
    app.add_typer(group, name=kind, help=help_text(text))

    def show_list(
        session: Session,
        *,
        limit: Annotated[int, typer.Option(min=1, help=f"Most {kind} to list.")] = 1000,
    ) -> None:
        answer = session.pages(path(kind), kind, limit, page_max=NAMED_PAGE_MAX)
        empty = f"There are no {kind}; make one with `delayserver {kind} put`."
        session.show(answer, lambda: rows(shown(answer[kind]), columns, empty=empty))

    show_list.__doc__ = f"List {kind} in the order of their names, or look at one and change it."
    server_command(group, None, kind, f"{kind} pause {example}")(show_list)
    server_command(group, "list", f"{kind} list --json")(show_list)
    return group


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
