"""cluster adopt: a log that has lost its end goes on behind the replica that people name.

Cost: some requests to the brokers, two seconds in which no node may write to the log, and six in
which each node reports its replica. Threads: those of the client.
"""

import contextlib
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from delayserver.cli.cluster.brokers import (
    ClusterOption,
    KafkaConfigOption,
    WaitOption,
    cluster_errors,
    must_be_node,
    open_engine,
    owner_of,
    read_tail,
    tell,
    wait_until,
)
from delayserver.cli.command_options import CommandOptions, with_options
from delayserver.cli.output import make_console, rows
from delayserver.cli.session import CannotRun, JsonOption

if TYPE_CHECKING:
    from storage.replicated.kafka import KafkaEngine

REST_S: Final = 2.0
"""An owner of a shard writes more often."""
SAYS_S: Final = 6.0
"""A replica says how far it is every three seconds."""
REACH_COLUMNS: Final = ("node", "has all up to seq", "state", "heard")


@dataclass(frozen=True, kw_only=True)
class AdoptOptions(CommandOptions):
    """Options of `cluster adopt`."""

    shard: Annotated[int, typer.Argument(metavar="SHARD", min=0, show_default=False)]
    node: Annotated[
        str,
        typer.Option(
            "--from",
            metavar="NODE",
            help="Whose replica the log goes on behind.",
            show_default=False,
        ),
    ]
    cluster: ClusterOption
    yes: Annotated[
        bool,
        typer.Option("--yes", help="Do not ask, and go on where another replica has more, too."),
    ] = False
    wait: WaitOption = 60.0
    kafka_config: KafkaConfigOption = None
    as_json: JsonOption = False


@with_options
def adopt(options: AdoptOptions) -> None:
    """Let the log of a shard that has lost its end go on behind the replica of one node.

    When all brokers have lost power, a log may end before the last records that the replicas have
    filed. The replicas stop then, and say so. Start all nodes that can be started, then name the
    one whose replica reaches furthest: the shard goes on with all of its records. A replica that
    has other records is set aside on its disk, and copied anew.

    It is refused where the node has lost nothing or is not there, and, without --yes, where another
    replica reaches further. Without --yes it shows the replicas of all nodes, and asks.

    Status 0: the node owns the shard. 1: not within the time, but it may come. 2: it could not be
    asked, or was refused."""
    from storage.replicated.meta import AdoptRecord, MetaLog

    shard, node, as_json = options.shard, options.node, options.as_json
    with (
        cluster_errors(as_json),
        open_engine(options.cluster, options.kafka_config) as engine,
        contextlib.closing(engine.meta()) as log,
    ):
        identity, nodes = MetaLog(log).read_cluster()
        if not shard < identity.shards:
            raise CannotRun(f"There are {identity.shards} shards, from 0.")
        must_be_node(node, nodes)
        known = MetaLog(log).read()
        end, epoch = _resting_end(engine, shard)
        reaches = _reaches(engine, shard, nodes.keys() - known.forgotten)
        decided = known.adoptions.get(shard, [])
        epochs = [*(one.stopped_epoch for one in reaches), *(one.epoch for one in decided)]
        check_adoption(reaches, node, end, may_lose=options.yes)
        if not options.yes:
            if as_json:
                raise CannotRun("--json cannot ask for a confirmation: add --yes.")
            make_console().print(rows([one.as_row() for one in reaches], REACH_COLUMNS, empty=""))
            typer.confirm(
                f"Shard {shard} goes on behind what {node} has, at offset {end} of its log?",
                abort=True,
            )
        record = AdoptRecord(shard, node, end, max([epoch, *epochs]) + 1)
        MetaLog(log).say(record)

        def owns_it() -> bool:
            owner, found = owner_of(engine, shard, nodes)
            return owner is not None and found > record.epoch

        done = wait_until(options.wait, as_json, f"shard {shard}", owns_it)
    answer = {
        "shard": shard,
        "node": node,
        "end": record.end,
        "epoch": record.epoch,
    }
    tell(
        as_json,
        done,
        f"shard {shard} goes on behind what {node} has",
        answer,
    )


@dataclass(frozen=True)
class Reach:
    """A node's report on its replica."""

    node: str
    at_ms: int
    is_there: bool
    read_offset: int
    """The offset up to which it had read the log, if it did not stop."""
    stopped_epoch: int
    stopped_seq: int

    def as_row(self) -> dict[str, Any]:
        """For a table."""
        from delayserver.times import format_time

        return {
            "node": self.node,
            "has all up to seq": self.stopped_seq if self.stopped_epoch else None,
            "state": ("waits" if self.stopped_epoch else "follows") if self.is_there else "away",
            "heard": format_time(self.at_ms),
        }


def _reaches(engine: "KafkaEngine", shard: int, nodes: Iterable[str]) -> list[Reach]:
    """Returns the report of each node. A node that is there reports anew while this function waits,
    whatever its clock shows."""
    from delayserver.cluster.watch import unpack_note

    names = sorted(nodes)
    before = engine.noted_progress(names)
    time.sleep(SAYS_S)
    found = []
    for node, places in engine.noted_progress(names).items():
        _, text = places.get(shard, (0, ""))
        if (note := unpack_note(text)) is not None:
            is_there = before[node].get(shard, (0, ""))[1] != text
            stopped = (note.stopped_epoch, note.stopped_seq)
            found.append(Reach(node, note.at_ms, is_there, note.read_offset, *stopped))
    return found


def check_adoption(reaches: list[Reach], node: str, end: int, *, may_lose: bool) -> None:
    """Whether the log of a shard, which ends at the offset `end`, can go on behind the replica of a
    node; `may_lose`: also where another may have more. Raises CannotRun."""
    own = next((one for one in reaches if one.node == node), None)
    if own is None or not own.is_there:
        raise CannotRun(f"{node} is not there: start it, and wait until it reports its replica.")
    if not own.stopped_epoch:
        raise CannotRun(f"The log has lost nothing that {node} has: it follows.")
    if may_lose:
        return
    further = [one for one in reaches if one.stopped_epoch and one.stopped_seq > own.stopped_seq]
    if further:
        listed = ", ".join(f"{one.node} up to seq {one.stopped_seq:,}" for one in further)
        raise CannotRun(
            f"{node} has all up to seq {own.stopped_seq:,}, and another replica more: {listed}. "
            "Name that one, or say --yes if it cannot be had."
        )
    unheard = [
        one.node
        for one in reaches
        if not one.is_there and not one.stopped_epoch and one.read_offset > end
    ]
    if unheard:
        raise CannotRun(
            f"{', '.join(unheard)} had read more than the log has now, and may have it still: "
            "start it first, or say --yes if it cannot be had."
        )


def _resting_end(engine: "KafkaEngine", shard: int) -> tuple[int, int]:
    """Where the log of a shard ends, and the last epoch that somebody has claimed in it, whether it
    counts or not. Raises CannotRun."""
    epochs = [0]
    with contextlib.closing(engine.log(shard)) as log:
        end = read_tail(log, lambda record: epochs.append(record.epoch))
        if end is None:
            raise CannotRun("The brokers do not say where the log ends.")
        time.sleep(REST_S)
        if log.end() != end:
            raise CannotRun(
                f"Another process writes to the log of shard {shard}: the log goes on already, or "
                "its owner has to be stopped first (see `cluster status`)."
            )
    return end, max(epochs)
