"""token create, list, revoke, export, import: who may call a server.

The commands change a file in the data directory, whether a server runs on it or not; a server that
runs looks at it once a second.

Cost: one small file. Threads: one.
"""

import os
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from delayserver.cli.operations import DataDirOption
from delayserver.cli.options import number_or_text, option
from delayserver.cli.output import details, help_text, make_console, print_json, rows
from delayserver.cli.session import JsonOption, error_exit
from delayserver.errors import DelayServerError, InputError
from delayserver.security.tokens import FILE_MAX_BYTES, SCOPE_HELP, StandInToken, Token, TokenFile
from delayserver.times import format_time, parse_duration_ms
from storage.errors import StorageError
from storage.files import OsFiles
from storage.kinds import OWNED, Kind, require
from storage.shards import find_directory_above

HELP = """Make, list and revoke the tokens of a data directory, or bring them to another one.

Only digests are stored. A server that runs follows within a second; run the commands as the user
that it runs as. Once a token was made, the server asks everybody for one."""

_ERRORS = (DelayServerError, StorageError)
NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="Name of the token.")]


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    group = typer.Typer(no_args_is_help=True, rich_markup_mode="rich")
    examples = (
        "token create shop --scope 'publish:order.*' --rate 500 --burst 1000",
        "token create worker --scope consume:order.unpaid --expires 90d",
        "token create prometheus --scope observe --json",
        "token create shop --scope 'publish:order.*' --stdin < token-of-n1",
    )
    group.command("create", help=help_text(create.__doc__, *examples))(create)
    group.command("list", help=help_text(list_.__doc__, "token list --json"))(list_)
    group.command("revoke", help=help_text(revoke.__doc__, "token revoke shop"))(revoke)
    group.command("export", help=help_text(export.__doc__, "token export > tokens.json"))(export)
    example = "token import --prune < tokens.json"
    group.command("import", help=help_text(import_.__doc__, example))(import_)
    app.add_typer(group, name="token", help=help_text(HELP))


def create(
    *,
    name: NameArgument,
    scopes: Annotated[
        list[str],
        typer.Option(
            "--scope",
            metavar="SCOPE",
            help=f"What it may do; repeat for more: {SCOPE_HELP}. A PATTERN is a subject, a prefix "
            "that ends in .*, or *.",
        ),
    ],
    rate: Annotated[
        float | None, option("--rate", "Most requests, or messages of batches, per second.", "N")
    ] = None,
    burst: Annotated[
        int | None, option("--burst", "That many may come at once (default: --rate).", "N")
    ] = None,
    expires: Annotated[
        str | None, option("--expires", "Valid this long: 12h, 90d.", "DURATION")
    ] = None,
    from_stdin: Annotated[
        bool,
        typer.Option(
            "--stdin",
            help="Take the token that stands on standard input instead of making one: that of "
            "another node of a cluster.",
        ),
    ] = False,
    data_dir: DataDirOption = Path("data"),
    as_json: JsonOption = False,
) -> None:
    """Make a token and show it, this once: it is stored nowhere.

    The nodes of a cluster need the same tokens: make one at the first node, and give it to this
    command at the others, with --stdin."""
    text = sys.stdin.readline().strip() if from_stdin else None
    now_ms = time.time_ns() // 1_000_000
    with error_exit(as_json=as_json, also=_ERRORS):
        token, text = _tokens(data_dir).create(
            name,
            scopes,
            now_ms=now_ms,
            random_bytes=os.urandom,
            expires_ms=None if expires is None else now_ms + _lifetime_ms(expires),
            rate_per_s=rate,
            burst=burst,
            text=text,
        )
    if as_json:
        print_json({**_document(token, now_ms), "token": text})
        return
    make_console().print(details(_document(token, now_ms)), "")
    # Never wrapped, for it is to be copied.
    typer.echo(f"{text}\n\nThis is the only time that it is shown.")


def list_(*, data_dir: DataDirOption = Path("data"), as_json: JsonOption = False) -> None:
    """List the tokens, without the tokens themselves."""
    now_ms = time.time_ns() // 1_000_000
    with error_exit(as_json=as_json, also=_ERRORS):
        documents = [_document(token, now_ms) for token in _existing(data_dir).read()]
    if as_json:
        print_json({"tokens": documents})
        return
    columns = ("name", "scopes", "rate", "burst", "created_at", "expires_at")
    shown = [
        {
            **one,
            "scopes": "\n".join(one["scopes"]),
            "expires_at": f"{one['expires_at']}, expired" if one["expired"] else one["expires_at"],
            "name": f"{one['name']} (not understood: {one['not_understood']})"
            if "not_understood" in one
            else one["name"],
        }
        for one in documents
    ]
    empty = "There are no tokens; make one with `delayserver token create`."
    make_console().print(rows(shown, columns, empty=empty))


def revoke(
    *, name: NameArgument, data_dir: DataDirOption = Path("data"), as_json: JsonOption = False
) -> None:
    """Revoke a token: within a second a server that runs refuses it.

    Revoking the last one does not open the server."""
    with error_exit(as_json=as_json, also=_ERRORS):
        token = _existing(data_dir).revoke(name)
    if as_json:
        print_json({"revoked": token.name})
    else:
        typer.echo(f"{token.name} is revoked.")


def export(*, data_dir: DataDirOption = Path("data")) -> None:
    """Print all tokens for `token import`: with their digests, without the tokens themselves.

    The nodes of a cluster need the same tokens: make and revoke them at one node, and bring them to
    each of the others."""
    with error_exit(as_json=False, also=_ERRORS):
        typer.echo(_existing(data_dir).export(), nl=False)


def import_(
    *,
    prune: Annotated[
        bool, typer.Option("--prune", help="Revoke the tokens that are not there.")
    ] = False,
    data_dir: DataDirOption = Path("data"),
    as_json: JsonOption = False,
) -> None:
    """Take the tokens that `token export` has printed, from standard input.

    A token of the same name is replaced. Other tokens stay, unless --prune is given."""
    data = sys.stdin.buffer.read(FILE_MAX_BYTES)
    with error_exit(as_json=as_json, also=_ERRORS):
        taken = _tokens(data_dir).take(data, prune=prune)
    if as_json:
        print_json(taken._asdict())
        return
    for what, names in taken._asdict().items():
        typer.echo(f"{what}: {', '.join(names) or '-'}")


def _existing(data_dir: Path) -> TokenFile:
    """The tokens of a directory, which is not made here."""
    if not data_dir.is_dir():
        raise InputError(f"there is no directory {data_dir}; name the server's with --data-dir")
    return _tokens(data_dir)


def _tokens(data_dir: Path) -> TokenFile:
    """The tokens of a directory; of several shards they stand above all of them."""
    if (above := find_directory_above(str(data_dir))) is not None:
        raise InputError(f"{data_dir} is one shard of several; tokens are of all: give {above}")
    files = OsFiles(str(data_dir))
    require(files, {*OWNED, Kind.SHARDS})
    return TokenFile(files)


def _lifetime_ms(text: str) -> int:
    lifetime_ms = parse_duration_ms(number_or_text(text))
    if lifetime_ms == 0:
        raise InputError("a token that expires at once is of no use; give --expires a time")
    return lifetime_ms


def _document(token: Token, now_ms: int) -> dict[str, Any]:
    return {
        "name": token.name,
        "scopes": list(token.scopes),
        "rate": token.rate_per_s,
        "burst": token.burst,
        "created_at": format_time(token.created_ms),
        "expires_at": None if token.expires_ms is None else format_time(token.expires_ms),
        "expired": token.expires_ms is not None and token.expires_ms <= now_ms,
        **({"not_understood": token.problem} if isinstance(token, StandInToken) else {}),
    }
