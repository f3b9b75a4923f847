"""How things are shown: tables for people, one line of JSON for programs.

Cost: rich is imported where a table is made. Threads: pure functions, but for the printing.
"""

import contextlib
import inspect
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import typer

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.table import Table

    from storage.check import Progress

LOOSE: Final = ("body", "headers", "reason", "url", "watch")
"""Columns that may be shortened on a narrow terminal; all others are needed whole."""
LOOSE_MIN: Final = 12
UNBOUNDED: Final = 100_000
"""The width of output that no screen bounds."""


def help_text(documentation: str | None, *examples: str) -> str:
    """A command's help: its docstring, then its examples, each on a line of its own."""
    paragraphs = inspect.cleandoc(documentation or "").split("\n\n")
    text = "\n\n".join(paragraph.replace("\n", " ") for paragraph in paragraphs)
    if examples:
        # "\b" keeps the lines of the paragraph as they are; "[" would open markup.
        lines = (f"$ delayserver {example}".replace("[", r"\[") for example in examples)
        text += "\n\n\b\n[bold]Example[/bold]\n" + "\n".join(lines)
    return text


def print_json(value: object, *, err: bool = False) -> None:
    """One document on one line."""
    typer.echo(json.dumps(value, ensure_ascii=False), err=err)


def text_of(value: object) -> str:
    """A value of an answer in a cell of a table."""
    match value:
        case None:
            return "–"
        case bool():
            return "yes" if value else "no"
        case int():
            return f"{value:,}"
        case float():
            return f"{value:,.3f}"
        case str():
            return value
        case _:
            return json.dumps(value, ensure_ascii=False)


def details(document: Mapping[str, Any]) -> "Table":
    """One thing: a line for each field that has a value. Nested documents: dotted names."""
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in _flat(document):
        if value not in (None, {}, []):
            table.add_row(name.replace("_", " "), _cell(value))
    return table


def blocks(documents: Sequence[Mapping[str, Any]], *, empty: str) -> "RenderableType":
    """Many things, each as `details`: where an id or a lease must not be cut."""
    from rich.console import Group

    if not documents:
        return empty
    parts: list[RenderableType] = []
    for document in documents:
        parts += [details(document), ""]
    return Group(*parts[:-1])


def _flat(document: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for name, value in document.items():
        # Values from clients (a body, headers) are shown as they wrote them.
        if isinstance(value, dict) and value and name not in ("body", "headers"):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def rows(
    documents: Sequence[Mapping[str, Any]], columns: Sequence[str], *, empty: str
) -> "RenderableType":
    """Many things: a line for each, or the sentence `empty`.

    No value is broken over lines, and no column is left out: on a terminal that is too narrow,
    values from clients (see LOOSE) end with an ellipsis, and if that is not enough, each thing has
    lines of its own."""
    return _Rows(documents, columns) if documents else empty


@dataclass(frozen=True, slots=True)
class _Rows:
    documents: Sequence[Mapping[str, Any]]
    columns: Sequence[str]

    def __rich_console__(
        self, console: "Console", options: "ConsoleOptions"
    ) -> Iterator["RenderableType"]:
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, padding=(0, 2), pad_edge=False, header_style="bold")
        least = -2
        for column in self.columns:
            heading = column.replace("_", " ")
            texts = [heading, *(text_of(document.get(column)) for document in self.documents)]
            widths = [cell_width(text) for text in texts]
            is_loose = column in LOOSE
            least += 2 + (min(max(widths), LOOSE_MIN) if is_loose else max(widths))
            table.add_column(heading, no_wrap=not is_loose)
        if least > options.max_width:
            yield blocks([_chosen(document, self.columns) for document in self.documents], empty="")
            return
        for document in self.documents:
            cells = (text_of(document.get(column)) for column in self.columns)
            table.add_row(*(Text(cell, no_wrap=True, overflow="ellipsis") for cell in cells))
        yield table


def _chosen(document: Mapping[str, Any], columns: Sequence[str]) -> dict[str, Any]:
    return {column: document.get(column) for column in columns}


def make_console() -> "Console":
    """Standard output. Output to a file or a program keeps its full width: nothing there has a
    screen's width."""
    from rich.console import Console

    console = Console()
    return console if console.is_terminal else Console(width=UNBOUNDED)


def cell_width(text: str) -> int:
    """Columns of a terminal that a text takes."""
    from rich.cells import cell_len

    return max(map(cell_len, text.split("\n")))


def _cell(value: object) -> str:
    from rich.markup import escape

    return escape(text_of(value))


@contextlib.contextmanager
def progress_bar(doing: str, *, quiet: bool) -> Iterator["Progress"]:
    """A bar on standard error that disappears in the end. Where nobody looks on there is none, so a
    file or a pipe that cannot be written does not end the work."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(
        *columns,
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=quiet or not console.is_terminal,
    ) as progress:
        bar = progress.add_task(doing, total=None)

        def show(what: str, done: int, total: int) -> None:
            progress.update(bar, description=what, completed=done, total=total or None)

        yield show
