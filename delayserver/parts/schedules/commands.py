"""schedules: list, put, preview, show, pause, resume, trigger, delete.

Cost: one request; of a list one for each 100. Threads: one.
"""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import typer

from delayserver.cli import named
from delayserver.cli.command_options import CommandOptions, with_options
from delayserver.cli.options import (
    BodyArgument,
    HeaderOption,
    duration,
    given,
    header_fields,
    moment,
    option,
    with_body,
)
from delayserver.cli.session import Session, path, server_command

HELP = (
    """Publish a message again and again: at the times of a cron expression, or every so often."""
)

ScheduleArgument = Annotated[str, typer.Argument(metavar="NAME", help="Name of the schedule.")]


@dataclass(frozen=True, kw_only=True)
class TimesOptions(CommandOptions):
    """When a schedule runs."""

    cron: Annotated[
        str | None,
        typer.Option(
            metavar="EXPRESSION",
            help="minute, hour, day of month, month, day of week, such as '0 9 * * MON-FRI'; with "
            "six fields seconds stand in front; or @hourly, @daily, @weekly, @monthly, @yearly.",
        ),
    ] = None
    every: Annotated[
        str | None, typer.Option(metavar="DURATION", help="Instead of --cron: 10s, 5m, 1h30m.")
    ] = None
    timezone: Annotated[
        str | None, option("--timezone", "Of --cron: Europe/Berlin; UTC without it.", "ZONE")
    ] = None
    start: Annotated[str | None, option("--start", "Nothing is planned before.", "TIME")] = None
    end: Annotated[str | None, option("--end", "Nothing is planned behind.", "TIME")] = None
    max_runs: Annotated[int | None, option("--max-runs", "It ends with this run.")] = None

    def fields(self) -> dict[str, Any]:
        """As they stand in a request."""
        if (self.cron is None) == (self.every is None):
            raise typer.BadParameter("give either --cron or --every")
        return given(
            {
                "cron": self.cron,
                "every": duration(self.every, "--every"),
                "timezone": self.timezone,
                "start_at": moment(self.start, "--start"),
                "end_at": moment(self.end, "--end"),
                "max_runs": self.max_runs,
            }
        )


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    columns = ("name", "subject", "cron", "every", "timezone", "next_at", "runs", "paused")
    group = named.add_group(app, "schedules", "daily", HELP, columns, _first)
    server_command(
        group,
        "put",
        """schedules put daily report.daily '{"shop": 7}' --cron '0 9 * * MON-FRI' """
        "--timezone Europe/Berlin",
        "schedules put poll feed.poll null --every 30s --overlap skip --catch-up none",
    )(put)
    server_command(
        group, "preview", "schedules preview --cron '30 2 * * *' --timezone Europe/Berlin"
    )(preview)
    server_command(group, "trigger", "schedules trigger daily")(trigger)
    named.register(
        group,
        "schedules",
        "daily",
        ScheduleArgument,
        show="Show one schedule, its next runs and its last one.",
        pause="Publish nothing until it is resumed.",
        resume="Publish again; its --catch-up decides about missed runs.",
        delete="End a schedule. Its messages stay.",
    )


def _first(found: named.Documents) -> named.Documents:
    """With the next time alone, which is enough for a table."""
    return [one | {"next_at": next(iter(one["next_at"]), None)} for one in found]


@with_options
def put(
    session: Session,
    *,
    name: ScheduleArgument,
    subject: Annotated[
        str, typer.Argument(metavar="SUBJECT", help="The subject that it publishes to.")
    ],
    body: BodyArgument,
    plan: TimesOptions,
    headers: HeaderOption = None,
    jitter: Annotated[
        str | None, option("--jitter", "Each message is due up to so much later.", "DURATION")
    ] = None,
    catch_up: Annotated[
        Literal["none", "last", "all"] | None,
        option("--catch-up", "Which missed runs are made; without it the last one."),
    ] = None,
    overlap: Annotated[
        Literal["skip", "allow"] | None,
        option("--overlap", "skip: no run while the message of the one before is not settled."),
    ] = None,
) -> None:
    """Make a schedule, or change it; an option that is not given has its default then."""
    document = {"subject": subject, **plan.fields()}
    if headers:
        document["headers"] = header_fields(headers)
    jitter_field = duration(jitter, "--jitter")
    document |= given({"jitter": jitter_field, "catch_up": catch_up, "overlap": overlap})
    session.show(session.call("PUT", path("schedules", name), content=with_body(document, body)))


@with_options
def preview(
    session: Session,
    *,
    plan: TimesOptions,
    subject: Annotated[
        str, typer.Option(metavar="SUBJECT", help="One that the token may publish to.")
    ] = "preview",
    count: Annotated[int, typer.Option(min=1, max=100, help="How many times.")] = 5,
) -> None:
    """Show when a schedule would run; nothing is made."""
    document = {"subject": subject, **plan.fields()}
    answer = session.call("POST", f"{path('schedules', 'preview')}?count={count}", document)
    session.show(answer, lambda: "\n".join(answer["next_at"]) or "It would never run.")


def trigger(session: Session, *, name: ScheduleArgument) -> None:
    """Run a schedule now, besides its planned times."""
    session.show(session.call("POST", path("schedules", name, "trigger")))
