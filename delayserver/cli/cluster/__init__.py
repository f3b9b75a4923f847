"""cluster create, status, move, drain, forget, adopt: a cluster whose logs stand on brokers.

    made     create, status: the cluster's facts and state
    orders   move, drain, forget: orders to the nodes
    adopt    how a log goes on that has lost its end
    brokers  the records that all of them read there

They talk to the brokers, and to no server: a cluster is made before there is one, and can be looked
at when none runs.

Exit status: 0 done, 1 the cluster was made otherwise, its topics are not as they have to be, or it
was not done in time, 2 it could not be done.
"""

import typer

from delayserver.cli.cluster.adopt import adopt
from delayserver.cli.cluster.made import create, status
from delayserver.cli.cluster.orders import drain, forget, move
from delayserver.cli.output import help_text

HELP = """A cluster of servers whose logs stand on Kafka brokers.

A cluster is made once, with a number of shards that does not change. It needs the extra `kafka` of
this package."""


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    group = typer.Typer(help=help_text(HELP), no_args_is_help=True)
    app.add_typer(group, name="cluster")
    group.callback()(_root)
    url = "kafka://b1:9092,b2:9092,b3:9092/delays"
    examples = (
        f"cluster create --cluster {url} --shards 16",
        f"cluster create --cluster {url} --shards 16 --kafka-config client.properties",
    )
    group.command("create", help=help_text(create.__doc__, *examples))(create)
    examples = (f"cluster status --cluster {url}", f"cluster status --cluster {url} --json")
    group.command("status", help=help_text(status.__doc__, *examples))(status)

    for command, example in (
        (move, f"cluster move 3 n2 --cluster {url}"),
        (drain, f"cluster drain n1 --cluster {url}"),
        (forget, f"cluster forget n1 --cluster {url}"),
        (adopt, f"cluster adopt 3 --from n1 --cluster {url}"),
    ):
        group.command(command.__name__, help=help_text(command.__doc__, example))(command)


def _root() -> None:
    pass
