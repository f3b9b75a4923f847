"""demo: a shop that lives for a few seconds, and a server that is killed in the middle of them.

    shop       the customers, and their orders and envelopes
    servers    the server they use, and how it is struck
    ledger     the promises and the receipts, and the judgement
    process    the server, as a process that can be killed
    sharded    one of several processes, which can be killed one by one
    receiver   the receiver of its webhooks

The crash tests use the last four as well.

Cost: as long as it was told to take. Threads: one, and the server's processes.
"""

import asyncio
import contextlib
import json
import random
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from delayserver.cli.demo.ledger import Verdict, judge
from delayserver.cli.demo.process import ServerFailed
from delayserver.cli.demo.servers import DemoServer, OwnServer, RunningServer
from delayserver.cli.demo.shop import REFUND, UNPAID, DemoPhase, DemoPlan, DemoShop
from delayserver.cli.output import help_text, print_json
from delayserver.cli.session import CommandError, JsonOption, error_exit

if TYPE_CHECKING:
    from rich.console import RenderableType

REFRESH_S = 0.1
HELP = """Watch a server survive a crash: run a small shop on it, kill it, count.

A server is started on a free port with a directory of its own. The shop publishes notices about
unpaid orders (webhook) and refunds of red envelopes (pull), and cancels those that get paid or
opened. In the middle the server is killed with SIGKILL and started again. An independent ledger
then names messages that were lost, early, or delivered although cancelled: none, or status 1.

With --url the shop runs on nodes of a cluster that run already, on this machine and without tokens.
In the middle the owner of a shard is struck: by the command that --strike gives, with the node's
name or address in place of {node} and {url}, or by you, when the demo says so."""


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    examples = (
        "demo",
        "demo --orders 1000 --seconds 20 --keep",
        "demo --shards 2",
        "demo --url http://127.0.0.1:8081 --strike 'scripts/cluster kill {node}'",
    )
    app.command("demo", help=help_text(HELP, *examples))(demo)


def demo(
    orders: Annotated[int, typer.Option(min=1, max=20_000, help="Orders of the shop.")] = 200,
    seconds: Annotated[float, typer.Option(min=2, help="How long the shop is open.")] = 8.0,
    seed: Annotated[
        int | None, typer.Option(help="Plan the same again.", show_default="a new one")
    ] = None,
    shards: Annotated[
        int, typer.Option(min=1, help="Processes of the server; all are killed.")
    ] = 1,
    url: Annotated[
        str | None,
        typer.Option(metavar="URL", help="A node of a cluster that runs.", show_default=False),
    ] = None,
    strike: Annotated[
        str | None,
        typer.Option(
            metavar="COMMAND", help="Strikes the owner of a shard, with --url.", show_default=False
        ),
    ] = None,
    keep: Annotated[
        bool, typer.Option("--keep", help="Keep the server's directory and the ledger.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """The command; see HELP."""
    seed = random.randrange(1_000_000) if seed is None else seed
    plan = DemoPlan(orders, seconds, seed)
    if url is None and strike is not None:
        raise typer.BadParameter("goes together with --url", param_hint="--strike")
    if url is not None and shards > 1:
        raise typer.BadParameter("a cluster has as many as it has", param_hint="--shards")
    directory = Path(tempfile.mkdtemp(prefix="delayserver-demo-"))
    try:
        with error_exit(as_json=as_json):
            try:
                server = _server(directory, shards, url, strike)
                shop = asyncio.run(_run(DemoShop(plan, server), quiet=as_json))
            except* asyncio.CancelledError as group:
                raise typer.Exit(128 + signal.SIGTERM) from group
            except* ServerFailed as group:
                raise CommandError(str(_first(group))) from group
        verdict = judge(shop.ledger)
        if keep:
            shop.ledger.write(directory / "ledger.jsonl")
        if as_json:
            print_json(_document(shop, verdict, directory if keep else None))
        else:
            from rich.console import Console

            for part in _rendered(shop, verdict, directory if keep else None):
                Console().print(part)
    finally:
        if not keep:
            shutil.rmtree(directory, ignore_errors=True)
    if not verdict.is_clean or shop.ledger.strangers or shop.damage:
        raise typer.Exit(1)


def _server(directory: Path, shards: int, url: str | None, strike: str | None) -> DemoServer:
    if url is not None:
        return RunningServer(url, strike)
    return OwnServer(directory, shards)


def _first(group: BaseExceptionGroup[ServerFailed]) -> BaseException:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


# ---- while it runs -----------------------------------------------------------------------------


async def _run(shop: DemoShop, *, quiet: bool) -> DemoShop:
    """Run the shop, show how far it is, and leave no server behind when it is stopped."""
    task = asyncio.create_task(shop.run())
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    with contextlib.nullcontext() if quiet else _progress(shop) as show:
        while not task.done():
            await asyncio.wait([task], timeout=REFRESH_S)
            if show is not None:
                show()
    await task
    return shop


@contextlib.contextmanager
def _progress(shop: DemoShop) -> Iterator[Any]:
    """Bars on standard error: published, settled; and the current phase."""
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    progress = Progress(
        TextColumn("{task.description:<10}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[phase]}"),
        console=Console(stderr=True),
    )
    published = progress.add_task("published", phase="", total=None)
    settled = progress.add_task("settled", phase="", total=None)

    def show() -> None:
        orders = shop.ledger.orders
        answered = sum(order.answered for order in orders)
        done = sum(order.cancelled_ms is not None or order.is_delivered for order in orders)
        total = len(orders) or None
        phase = f"[yellow]{escape(shop.doing)}" if shop.phase is DemoPhase.DOWN else shop.phase
        progress.update(published, completed=answered, total=total, phase=phase)
        progress.update(settled, completed=done, total=total)

    with progress:
        yield show


# ---- when it is over ---------------------------------------------------------------------------


def _document(shop: DemoShop, verdict: Verdict, directory: Path | None) -> dict[str, Any]:
    return {
        "orders": shop.plan.orders,
        "seed": shop.plan.seed,
        "published": verdict.published,
        "cancelled": verdict.cancelled,
        "delivered": verdict.delivered,
        "repeated": verdict.repeated,
        **{name: len(orders) for name, orders in verdict.broken.items()},
        "never_published": len(shop.ledger.strangers),
        "damage": shop.damage,
        "cancelled_too_late": shop.payments_too_late,
        "lateness_p50_ms": verdict.lateness_percentile_ms(50),
        "lateness_p99_ms": verdict.lateness_percentile_ms(99),
        "start_s": round(shop.start_s, 3),
        "restart_s": round(shop.restart_s, 3),
        "violations": [
            {"what": name, "ids": sorted(order.message_ids), "key": order.key}
            for name, order in verdict.violations()
        ],
        "directory": None if directory is None else str(directory),
    }


def _rendered(
    shop: DemoShop, verdict: Verdict, directory: Path | None
) -> "Iterator[RenderableType]":
    from rich.table import Table

    ledger = shop.ledger
    parts = [
        judge(ledger, [order for order in ledger.orders if order.subject == subject])
        for subject in (shop.unpaid, shop.refund)
    ]
    table = Table(title="What became of it", title_justify="left", header_style="bold")
    table.add_column("")
    for column in (f"{UNPAID}\nwebhook", f"{REFUND}\npull", "together"):
        table.add_column(column, justify="right")

    def row(name: str, values: list[str], style: str = "") -> None:
        table.add_row(name, *values, style=style)

    def counted(name: str, figure: str) -> None:
        row(name, [f"{getattr(part, figure):,}" for part in (*parts, verdict)])

    def judged(name: str, rule: str) -> None:
        counts = [len(part.broken[rule]) for part in (*parts, verdict)]
        row(name, [f"{count:,}" for count in counts], _style(bad=counts[-1] > 0))

    counted("published", "published")
    counted("cancelled (paid, opened)", "cancelled")
    counted("delivered", "delivered")
    judged("lost", "lost")
    judged("cancelled, yet delivered", "fired_cancelled")
    judged("early", "early")
    judged("recorded, yet repeated", "repeated_recorded")
    judged("under another id", "other_id")
    judged("changed on the way", "garbled")
    if shop.damage is not None:
        row("damaged in the files", ["", "", str(len(shop.damage))], _style(bad=bool(shop.damage)))
    counted("repeated ¹", "repeated")
    for percent in (50, 99):
        late = [part.lateness_percentile_ms(percent) for part in (*parts, verdict)]
        row(f"late, p{percent} ²", ["–" if one is None else f"{one} ms" for one in late])
    row(shop.server.back, ["", "", f"{shop.restart_s:.2f} s"])
    yield table
    yield (
        "[dim]¹ on their way at the kill, delivered but not yet recorded: they come again with the "
        "same id, by which a receiver knows them\n"
        "² where the server was up from the due time on; "
        f"{shop.payments_too_late} payments came when the notice was on its way already\n"
        f"seed {shop.plan.seed}[/dim]"
    )
    for name, order in verdict.violations():
        yield f"[bold red]{name}[/bold red] {json.dumps(order.to_json())}"
    for stranger in ledger.strangers:
        yield f"[bold red]never published[/bold red] {stranger}"
    for damage in shop.damage or ():
        yield f"[bold red]{damage}[/bold red]"
    if directory is not None:
        yield f"data, log and ledger are in {directory}"


def _style(*, bad: bool) -> str:
    return "bold red" if bad else "green"
