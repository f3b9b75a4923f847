"""publish-many and cancel-many: as many messages as a file has lines.

Cost: a request for each 1,000 lines; the file is not held in memory. Threads: one.
"""

import contextlib
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import typer

from delayserver.cli.options import LinesArgument
from delayserver.cli.output import details, rows
from delayserver.cli.session import CommandError, Refused, Session, path, server_command

LINES_MAX = 1000
BYTES_MAX = 8 * 1024 * 1024
SHOWN_MAX = 20

Chunk = tuple[int, list[str]]
"""Number of the first line, from 1, and the lines; none of them is empty."""


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    server_command(app, "publish-many", "publish-many orders.ndjson")(publish_many)
    server_command(app, "cancel-many", "cancel-many paid.txt", "cancel-many < paid.txt --json")(
        cancel_many
    )


class Stopped(CommandError):
    """Some lines were done, then one was refused."""


def publish_many(session: Session, *, file: LinesArgument = None) -> None:
    r"""Publish a message for each line, such as {"subject": "s", "body": 1, "delay": "30m"}.

    A thousand lines are taken or refused together; at the first that are refused it stops, and says
    which lines are wrong. Give each message a key: then the file may be published again, and lines
    that were taken before are not taken twice."""
    counts = Counter(published=0, duplicates=0)
    with _chunks(file) as chunks, _told_when_stopped(counts.total, "taken"):
        for first, lines in chunks:
            content = "\n".join(lines)
            try:
                answer = session.call(
                    *("POST", path("messages", "batch")),
                    content=content,
                    content_type="application/x-ndjson",
                )
            except Refused as error:
                raise _stopped(error, first, counts.total()) from error
            counts["duplicates"] += answer["duplicates"]
            counts["published"] += answer["count"] - answer["duplicates"]
    session.show(counts, lambda: details(counts))


def _stopped(error: Refused, first: int, done: int) -> Stopped:
    """Lines instead of pointers into a batch that nobody has seen."""
    problem = dict(error.document or {})
    wrong = []
    for one in problem.get("errors") or ():
        _, _, rest = str(one.get("pointer", "")).partition("/")
        index, slash, field = rest.partition("/")
        if index.isdecimal():
            wrong.append((first + int(index), slash + field, one.get("detail")))
    if not wrong:
        text = str(error)
    else:
        text = f"{len(wrong)} lines are wrong; correct them and publish the rest of the file:"
        for line, field, detail in wrong[:SHOWN_MAX]:
            text += f"\n  line {line}: {detail}" + (f" ({field})" if field else "")
        if len(wrong) > SHOWN_MAX:
            text += f"\n  … and {len(wrong) - SHOWN_MAX} more"
    stopped = Stopped(f"The first {done:,} messages were taken, nothing behind them. {text}")
    stopped.document = {**problem, "taken": done, "first_line": first}
    return stopped


def cancel_many(session: Session, *, file: LinesArgument = None) -> None:
    r"""Cancel a message for each line: its id, or {"subject": "order.unpaid", "key": "1001"}.

    Status 1: some could not be cancelled, and are listed with the state that they are in."""
    counts: Counter[str] = Counter()
    left: list[dict[str, Any]] = []
    with _chunks(file) as chunks, _told_when_stopped(counts.total, "gone through"):
        for first, lines in chunks:
            request: dict[str, list[Any]] = {"ids": [], "keys": []}
            for number, line in enumerate(lines, first):
                name = _name(line, number)
                request["ids" if isinstance(name, str) else "keys"].append(name)
            for result in session.call("POST", path("messages", "cancel"), request)["results"]:
                state = result["state"] or "unknown"
                counts[state if result["error"] else "cancelled"] += 1
                if result["error"]:
                    left.append({**result, "state": state})
    answer = {"cancelled": counts.pop("cancelled", 0), **counts, "left": left}
    columns = ("id", "subject", "key", "state")
    if left and not session.as_json:
        session.show(left, lambda: rows(left, columns, empty=""))
    shown = {name: count for name, count in answer.items() if name != "left"}
    session.show(answer, lambda: details(shown))
    if left:
        raise typer.Exit(1)


def _name(line: str, number: int) -> str | dict[str, str]:
    if not line.startswith("{"):
        return line
    try:
        name = json.loads(line)
    except ValueError as error:
        raise typer.BadParameter(f"line {number}: {error}", param_hint="FILE") from error
    if name.keys() != {"subject", "key"} or not all(isinstance(x, str) for x in name.values()):
        raise typer.BadParameter(
            f'line {number}: an id, or {{"subject": "…", "key": "…"}}', param_hint="FILE"
        )
    found: dict[str, str] = name
    return found


@contextlib.contextmanager
def _told_when_stopped(done: Callable[[], int], what: str) -> Iterator[None]:
    """With ctrl-C, say how far it got. The request that was under way may have been taken, too."""
    try:
        yield
    except KeyboardInterrupt:
        typer.echo(
            f"stopped: the first {done():,} lines were {what}, and perhaps up to {LINES_MAX:,} "
            "behind them; run it again with the same file, if each has a key or an id",
            err=True,
        )
        raise


@contextlib.contextmanager
def _chunks(file: Path | None) -> Iterator[Iterator[Chunk]]:
    """The lines, some at a time, and a bar on standard error."""
    with contextlib.ExitStack() as stack:
        try:
            size = None if file is None else file.stat().st_size
            lines = sys.stdin if file is None else stack.enter_context(file.open(encoding="utf-8"))
        except OSError as error:
            raise typer.BadParameter(f"cannot read {file}: {error}", param_hint="FILE") from error
        yield _with_numbers(lines, stack.enter_context(_bar(size)))


def _with_numbers(lines: IO[str], advance: Callable[[int], None]) -> Iterator[Chunk]:
    """Line numbers count empty lines too, which are left out: a chunk ends before one."""
    first, chunk, total_bytes = 1, list[str](), 0
    try:
        for number, text in enumerate(lines, 1):
            line = text.strip()
            size_bytes = len(text.encode("utf-8", "replace"))
            full = len(chunk) == LINES_MAX or total_bytes + size_bytes > BYTES_MAX
            if chunk and (full or not line):
                yield first, chunk
                advance(total_bytes)
                chunk, total_bytes = [], 0
            if line:
                first = first if chunk else number
                chunk.append(line)
            total_bytes += size_bytes
    except UnicodeDecodeError as error:
        raise typer.BadParameter(f"not UTF-8: {error}", param_hint="FILE") from error
    if chunk:
        yield first, chunk
        advance(total_bytes)


@contextlib.contextmanager
def _bar(size_bytes: int | None) -> Iterator[Callable[[int], None]]:
    """Disappears in the end, and is not there where nobody sees it."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("sending", total=size_bytes)
        yield lambda done_bytes: progress.advance(task, done_bytes)
