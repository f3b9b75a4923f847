"""backup, backups, restore: copies of a server's data, and a directory that is made of one.

Cost: a request, and another twice a second while it is waited for; `restore` reads every byte of a
backup twice. Threads: one.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from delayserver.cli.options import option
from delayserver.cli.output import details, help_text, make_console, print_json, progress_bar, rows
from delayserver.cli.session import (
    CannotRun,
    CommandError,
    JsonOption,
    Session,
    error_exit,
    path,
    server_command,
)
from storage.errors import StorageError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from delayserver.backup.restoring import Restored

POLL_S: Final = 0.5
DAMAGED_STATUS: Final = 1
HELP = "The backups of a server: list and delete them."
_RESTORE_EXAMPLES: Final = (
    "restore /srv/backups/2026-11-20T03-00-00.000Z data",
    "restore /srv/backups/before-the-upgrade /var/lib/delayserver --json",
    "restore /srv/backups data --until 2026-11-25T14:03:00Z",
    "restore /srv/backups data --until latest",
)
LATEST: Final = "latest"


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    server_command(app, "backup", "backup", "backup before-the-upgrade", "backup --keep 7 --json")(
        backup
    )
    group = typer.Typer(rich_markup_mode="rich")
    app.add_typer(group, name="backups", help=help_text(HELP))
    server_command(group, None, "backups", "backups delete before-the-upgrade")(backups)
    server_command(group, "list", "backups list --json")(backups)
    server_command(group, "delete", "backups delete before-the-upgrade")(delete)
    app.command("restore", help=help_text(restore.__doc__, *_RESTORE_EXAMPLES))(restore)


def backup(
    session: Session,
    *,
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="Its name; without one, the time.")
    ] = None,
    verify: Annotated[
        bool,
        typer.Option(
            "--verify/--no-verify",
            help="Read every byte of it again, and compare it with all others.",
        ),
    ] = True,
    wait: Annotated[
        bool, typer.Option("--wait/--no-wait", help="Wait until it is complete.")
    ] = True,
    keep: Annotated[
        int | None,
        option(
            "--keep",
            "When it is complete, delete older ones, so that so many verified ones are left. Of"
            " those that were made with --no-verify so many are left besides.",
            "COUNT",
            min=1,
        ),
    ] = None,
) -> None:
    """Make a backup of a server that goes on running, in its directory for backups.

    Every change that was answered before is in it. Files that have not changed since the last
    backup are not copied again. If it is not waited for (or that is interrupted), it is made all
    the same: `delayserver backups` shows how far it is. Status 1: it has failed."""
    if keep is not None and not wait:
        raise typer.BadParameter("needs a backup that is waited for", param_hint="--keep")
    document = {"verify": verify} | ({} if name is None else {"name": name})
    made = session.call("POST", path("backups"), document)
    if wait:
        made = _complete(session, made)
        if keep is not None:
            _delete_older(session, keep, made["name"])
    session.show(made, lambda: _shown(made))


def _complete(session: Session, made: dict[str, Any]) -> dict[str, Any]:
    """The backup once it is complete. Raises CommandError."""
    import time

    with progress_bar("waiting", quiet=session.as_json) as progress:
        while made["state"] == "running":
            time.sleep(POLL_S)
            made = session.call("GET", path("backups", made["name"]))
            progress(made["step"] or made["state"], made["done_bytes"], made["total_bytes"])
    if made["state"] != "complete":
        raise CommandError(f"The backup {made['name']} has failed: {made['error']}")
    return made


def outdated(backups: Sequence[Mapping[str, Any]], keep: int, made: str) -> list[str]:
    """The names of the backups to delete, so that `keep` verified ones are left, and no more than
    so many others. `backups`: as the server lists them, in the order in which they were made,
    whatever the clock said; `made`: the one that was made just now, which stays.

    Verified ones are counted by themselves. Else three backups that nobody has read again, of a
    directory that is damaged, would push out the last one that can be restored."""
    assert keep >= 1, keep
    complete = [one for one in backups if one["state"] == "complete"]
    found = []
    for is_verified in (True, False):
        names = [one["name"] for one in complete if one["verified"] is is_verified]
        found += [name for name in names[:-keep] if name != made]
    return found


def _delete_older(session: Session, keep: int, made: str) -> None:
    for name in outdated(session.call("GET", path("backups"))["backups"], keep, made):
        session.call("DELETE", path("backups", name))


def _shown(made: dict[str, Any]) -> "RenderableType":
    document = {name: value for name, value in made.items() if name != "shards"}
    return details(document)


def backups(session: Session) -> None:
    """List backups, in the order in which they were made, and the one that is being made or has
    failed.

    `log_reaches_at`: `delayserver restore --until` takes a backup to any moment up to that."""
    answer = session.call("GET", path("backups"))
    columns = (
        *("name", "state", "taken_at", "log_reaches_at", "total_bytes", "copied_bytes"),
        *("verified", "error"),
    )
    empty = "There are no backups; make one with `delayserver backup`."
    session.show(answer, lambda: rows(answer["backups"], columns, empty=empty))


def delete(
    session: Session,
    *,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the backup.")],
) -> None:
    """Delete a backup; one that is being made is given up. No other is touched by that."""
    session.call("DELETE", path("backups", name))
    session.show({"deleted": name}, lambda: f"{name} is deleted")


def restore(
    backup: Annotated[
        Path,
        typer.Argument(
            metavar="BACKUP",
            help="The directory of one backup, with its name; with --until also that of all "
            "backups, of which the newest that fits is taken.",
        ),
    ],
    data_dir: Annotated[
        Path,
        typer.Argument(
            metavar="DATA_DIR", help="The directory to be made: it must be empty, or not there."
        ),
    ],
    until: Annotated[
        str | None,
        option(
            "--until",
            "With all that was accepted by then: RFC 3339, or ms since 1970; `latest`: as far "
            "as the message log behind the backup reaches.",
            "TIME",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Make a data directory of a backup, for a server to be started on.

    Nothing is written before every byte of the backup is verified, and the new directory is checked
    in the end. The backup stays as it is. A message that was delivered after the backup was made is
    delivered again, with the same id; one that was accepted, cancelled or moved after it, or with
    --until after that time, is not known any more. --until needs the message log that a server with
    a backup_dir copies beside its backups: it says how far that reaches, if it is not far enough.

    Status 0: the directory is sound. 1: it is damaged. 2: it could not be made."""
    import time

    from delayserver.backup.restoring import restore

    with (
        error_exit(as_json=as_json, also=(StorageError, OSError), kind=CannotRun),
        progress_bar("restoring", quiet=as_json) as progress,
    ):
        now_ms = time.time_ns() // 1_000_000
        until_ms = _until_ms(until, now_ms)
        restored = restore(backup, data_dir, now_ms=now_ms, until_ms=until_ms, progress=progress)
    documents = [_document(one) for one in restored]
    is_sound = not any(one.problem for one in restored)
    if as_json:
        print_json({"data_dir": str(data_dir), "is_sound": is_sound, "shards": documents})
    else:
        columns: tuple[str, ...]
        columns = ("shard", "backup", "taken_at", "last_seq", "total_bytes", "problem")
        if until is not None:
            columns = (*columns[:4], "last_accepted_at", *columns[4:])
        make_console().print(rows(documents, columns, empty=""))
        if is_sound:
            make_console().print(f"{data_dir} is sound. Start a server on it.", highlight=False)
    if not is_sound:
        raise typer.Exit(DAMAGED_STATUS)


def _until_ms(until: str | None, now_ms: int) -> int | None:
    """The moment that `--until` names. Raises typer.BadParameter."""
    from delayserver.backup.shipped_log import LATEST_MS
    from delayserver.errors import InputError
    from delayserver.times import format_time, read_time_ms

    if until is None:
        return None
    if until == LATEST:
        return LATEST_MS
    try:
        until_ms = read_time_ms(until)
    except InputError as error:
        raise typer.BadParameter(f"{error.detail}; or `{LATEST}`", param_hint="--until") from error
    if until_ms > now_ms:
        raise typer.BadParameter(
            f"{format_time(until_ms)} is still to come; `{LATEST}` is as far as the log reaches",
            param_hint="--until",
        )
    return until_ms


def _document(one: "Restored") -> dict[str, Any]:
    from delayserver.times import format_time

    return {
        "shard": one.manifest.shard,
        "backup": one.manifest.name,
        "taken_at": format_time(one.manifest.taken_ms),
        "last_seq": one.last_seq,
        "last_accepted_at": None if one.last_ms is None else format_time(one.last_ms),
        "total_bytes": one.total_bytes,
        "problem": one.problem or None,
    }
