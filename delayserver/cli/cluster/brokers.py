"""A cluster as its brokers show it: the client, the errors, who owns a shard, waiting.

confluent-kafka, an extra, is imported when a command needs it.

Cost: half a second to read the last records of a shard's log. Threads: those of the client.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from delayserver.cli.options import option
from delayserver.cli.output import print_json, progress_bar
from delayserver.cli.session import CannotRun, CommandError, error_exit
from storage.errors import ClusterDiffersError, OffsetRangeError, StorageError

if TYPE_CHECKING:
    from storage.replicated.engine import EngineLog
    from storage.replicated.envelope import LogRecord
    from storage.replicated.kafka import KafkaEngine

WRONG_STATUS: Final = 1
LOOK_S: Final = 0.5

ClusterOption = Annotated[
    str,
    typer.Option(
        "--cluster",
        metavar="URL",
        envvar="DELAYSERVER_CLUSTER",
        help="Brokers and name: kafka://HOST:PORT[,HOST:PORT...]/NAME.".replace("[", r"\["),
        show_default=False,
    ),
]
KafkaConfigOption = Annotated[
    Path | None,
    option(
        "--kafka-config",
        "Client settings for the brokers (SASL, TLS): key=value lines of librdkafka.",
        "FILE",
        envvar="DELAYSERVER_KAFKA_CONFIG",
    ),
]
NodeArgument = Annotated[str, typer.Argument(metavar="NODE", show_default=False)]
WaitOption = Annotated[
    float,
    typer.Option("--wait", metavar="SECONDS", min=0, help="How long to wait until it is done."),
]


@contextlib.contextmanager
def open_engine(cluster: str, kafka_config: Path | None) -> "Iterator[KafkaEngine]":
    """A connection to the brokers. Raises StorageError, CannotRun."""
    from storage.replicated.kafka_settings import ClientSettings, ClusterUrl, read_properties

    url = ClusterUrl.parse(cluster)
    properties = {} if kafka_config is None else read_properties(kafka_config)
    try:
        from storage.replicated.kafka import KafkaEngine
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "confluent_kafka":
            raise
        text = "A cluster needs the package confluent-kafka: pip install 'delayserver[kafka]'"
        raise CannotRun(text) from error
    yield KafkaEngine(ClientSettings(url, properties))


@contextlib.contextmanager
def cluster_errors(as_json: bool) -> Iterator[None]:
    """Print an error as a sentence, and end the command."""
    with error_exit(as_json=as_json, also=(StorageError,), kind=CannotRun):
        try:
            yield
        except ClusterDiffersError as error:
            raise CommandError(str(error)) from error


def must_be_node(node: str, nodes: dict[str, int]) -> None:
    """Raises CommandError."""
    if node not in nodes:
        raise CommandError(f"There is no node {node}; there are {', '.join(nodes) or 'none'}.")


def _nobody_looks(done: int, total: int) -> None:
    pass


def read_tail(
    log: "EngineLog",
    see: "Callable[[LogRecord], None]",
    *,
    whole: bool = False,
    show: Callable[[int, int], None] = _nobody_looks,
) -> int | None:
    """Give the last records of a shard's log to `see`, or with `whole` all of them, and the offset
    at which it ends; None: the brokers do not say it. `show` gets how many were read, and of how
    many."""
    from storage.replicated.onlooker import TAIL_RECORDS

    end = log.end()
    if end is not None:
        begin = 0 if whole else max(0, end - TAIL_RECORDS)
        try:
            _read(log, see, begin, end, show)
        except OffsetRangeError as error:
            # Records that were not needed any more were deleted.
            if not begin < error.first <= end:
                raise
            _read(log, see, error.first, end, show)
    return end


def _read(
    log: "EngineLog",
    see: "Callable[[LogRecord], None]",
    begin: int,
    end: int,
    show: Callable[[int, int], None],
) -> None:
    from storage.replicated.envelope import decode
    from storage.replicated.reading import read_to_end

    for offset, data in read_to_end(log, begin, end):
        see(decode(data, log.name, offset))
        if not offset % 100:
            show(offset - begin, end - begin)


def owner_of(engine: "KafkaEngine", shard: int, nodes: dict[str, int]) -> tuple[str | None, int]:
    """The owner of a shard, and its epoch, by the last records of the shard's log."""
    from storage.replicated.sighting import Sighting

    seen = Sighting()
    with contextlib.closing(engine.log(shard)) as log:
        read_tail(log, seen.see)
    return name_of(seen.owner, nodes), seen.epoch


def name_of(number: int, nodes: dict[str, int]) -> str | None:
    """The node of that number; None: there is none."""
    return next((name for name, own in nodes.items() if own == number), None)


def wait_until(wait_s: float, as_json: bool, what: str, is_done: Callable[[], bool]) -> bool:
    """Look twice a second, and for so long, whether it is done; whether it was."""
    began_s = time.monotonic()
    with progress_bar("", quiet=as_json) as progress:
        while not is_done():
            waited_s = time.monotonic() - began_s
            if waited_s >= wait_s:
                return False
            progress(f"waiting for {what}", round(waited_s), round(wait_s))
            time.sleep(LOOK_S)
    return True


def tell(as_json: bool, done: bool, what: str, answer: dict[str, Any]) -> None:
    """Report the work, or end with status 1 since it was not done."""
    if as_json:
        print_json({**answer, "done": done})
    elif done:
        typer.echo(f"Done: {what}.")
    else:
        typer.echo(f"Not yet: {what}. The order stands: see `cluster status`.", err=True)
    if not done:
        raise typer.Exit(WRONG_STATUS)
