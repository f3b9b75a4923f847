"""A connection to a server, as commands see it: an answer, or an error that tells the way out.

    CommandError       exit status 1
    ├── Refused        1  the server said no (problem document, RFC 9457)
    ├── CannotRun      2  a check, a repair or a job could not do its work
    └── Unreachable    3  there is no server, or not one of ours

`server_command` registers a function whose first parameter is a `Session`; the command line gets
the options of a connection (--url, --token, …) and --json in its place. Tests hand another
`ClientFactory` in as the context object.

Cost: one TCP connection per command. Threads: one.
"""

import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from enum import Enum
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Concatenate, ParamSpec, Protocol
from urllib.parse import quote, urlencode

import typer

from delayserver.cli.command_options import CommandOptions, use_signature, with_options
from delayserver.cli.output import details, help_text, make_console, print_json

if TYPE_CHECKING:
    import ssl

    import httpx
    from rich.console import RenderableType

URL_DEFAULT = "http://127.0.0.1:8080"
TIMEOUT_S = 30.0
PAGE_MAX = 1000
NAMED_PAGE_MAX = 100
"""The most rows of a page of a list in the order of names."""
NO_QUERY: Mapping[str, str | None] = {}

P = ParamSpec("P")


class CommandError(Exception):
    """A command failed; the text says why, and how to go on."""

    exit_status = 1
    document: Mapping[str, Any] | None = None
    """Shown by --json instead of the text."""


class Refused(CommandError):
    """The server understood, and said no."""

    def __init__(
        self, status: int, path: str, problem: Mapping[str, Any], retry_after: str | None
    ) -> None:
        super().__init__(_sentence(status, path, problem, retry_after))
        self.document = problem


class CannotRun(CommandError):
    """A check, a repair or a job could not do its work."""

    exit_status = 2


class Unreachable(CommandError):
    """No delay server answers at that address."""

    exit_status = 3


class ClientFactory(Protocol):
    """Makes the HTTP client; a test makes one that never leaves the process."""

    def __call__(
        self,
        *,
        base_url: str,
        headers: Mapping[str, str],
        timeout: float,
        verify: "ssl.SSLContext | bool",
    ) -> "httpx.Client": ...


def http_client(
    *,
    base_url: str,
    headers: Mapping[str, str],
    timeout: float,
    verify: "ssl.SSLContext | bool",
) -> "httpx.Client":
    """The client of real life. A proxy for the web is not meant for the way to this server."""
    import httpx

    return httpx.Client(
        base_url=base_url, headers=headers, timeout=timeout, verify=verify, trust_env=False
    )


def _tls(
    authority: Path | None, client_cert: Path | None, client_key: Path | None
) -> "ssl.SSLContext | bool":
    """The authorities to trust, and our certificate; True: the usual authorities, and none."""
    import ssl

    if client_cert is None and client_key is not None:
        raise typer.BadParameter("it goes with --client-cert", param_hint="--client-key")
    if authority is None and client_cert is None:
        return True
    option = "--tls-ca"
    what = str(authority)
    try:
        context = ssl.create_default_context(cafile=authority)
        if client_cert is not None:
            option = "--client-cert"
            what = f"{client_cert} with the key in {client_key or 'the same file'}"
            # A key that needs a password is refused; nobody may be there to type one.
            context.load_cert_chain(client_cert, client_key, password="")
    except OSError as error:
        raise typer.BadParameter(
            f"cannot use {what}: {error.strerror or error}", param_hint=option
        ) from error
    return context


@dataclass(frozen=True, slots=True)
class Session:
    """The connection of a command that talks to a server."""

    client: "httpx.Client"
    url: str
    as_json: bool
    client_cert: Path | None = None
    """The certificate that is shown to a server that asks for one, …"""
    client_key: Path | None = None
    """… and its key, if that is not in the same file."""

    def call(
        self,
        method: str,
        path: str,
        document: object = None,
        *,
        content: str | None = None,
        content_type: str = "application/json",
        timeout_s: float = TIMEOUT_S,
    ) -> Any:
        """One request, `document` (or `content`, as text) in it; the answer's document, None where
        there is nothing to tell.

        Raises Refused, Unreachable."""
        import httpx

        if document is not None:
            content = json.dumps(document)
        headers = {} if content is None else {"content-type": content_type}
        try:
            response = self.client.request(
                method,
                path,
                content=None if content is None else content.encode(),
                headers=headers,
                timeout=timeout_s,
            )
        except (httpx.UnsupportedProtocol, httpx.InvalidURL) as error:
            raise typer.BadParameter(
                f"{self.url!r} is not an address such as {URL_DEFAULT} ({error})",
                param_hint="--url",
            ) from error
        except httpx.TimeoutException as error:
            raise Unreachable(
                f"The server at {self.url} did not answer within {timeout_s:g} s. The call may "
                "have had its effect: look it up, or send it again with the same key."
            ) from error
        except httpx.TransportError as error:
            raise Unreachable(
                f"No server can be reached at {self.url} ({error}). "
                "Start one with `delayserver serve`, or say where it is with --url."
            ) from error
        return self._answer(response)

    def pages(
        self,
        path: str,
        name: str,
        limit: int,
        query: Mapping[str, str | None] = NO_QUERY,
        *,
        page_max: int = PAGE_MAX,
    ) -> dict[str, Any]:
        """Up to `limit` things of a list that comes in pages, and the cursor behind them."""
        found: list[Any] = []
        cursor: str | None = None
        while True:
            asked = {**query, "limit": str(min(limit - len(found), page_max)), "cursor": cursor}
            given = {key: value for key, value in asked.items() if value}
            answer = self.call("GET", f"{path}?{urlencode(given)}")
            found += answer[name]
            cursor = answer["cursor"]
            if cursor is None or len(found) >= limit:
                return {name: found, "cursor": cursor}

    def _answer(self, response: "httpx.Response") -> Any:
        if response.status_code == HTTPStatus.NO_CONTENT:
            return None
        try:
            answer = response.json()
        except ValueError:
            answer = None
        if response.is_success and answer is not None:
            return answer
        if isinstance(answer, dict) and "title" in answer:
            asked = response.request.url.path
            raise Refused(response.status_code, asked, answer, response.headers.get("retry-after"))
        raise Unreachable(
            f"The server at {self.url} is not a delay server (status {response.status_code}, "
            f"{response.headers.get('content-type', 'no content type')}). "
            "Give the URL of the delay server with --url."
        )

    def show(self, answer: Any, rendered: "Callable[[], RenderableType] | None" = None) -> None:
        """Print an answer: as it came for programs, as `rendered` or its fields for people."""
        if self.as_json:
            print_json(answer)
        else:
            make_console().print(rendered() if rendered else details(answer))


_ADVICE = {
    401: "Give the token with --token or DELAYSERVER_TOKEN.",
    403: "Use a token that has the right to do this.",
    413: "Make it smaller, or raise the server's limit.",
    422: "Correct it and send it again; nothing was changed.",
    507: "Free some space on the server's disk.",
}


_WHERE_TO_LOOK = {
    "/v1/messages/": "Give the id or the key as `publish` printed it. The server forgets settled "
    "messages after its retention time.",
    "/v1/subjects/": "Give the id or the key as `publish` printed it. The server forgets settled "
    "messages after its retention time.",
    "/v1/subscriptions/": "`delayserver subscriptions` lists all of them.",
}
"""Advice for a thing that does not exist, by the beginning of its path."""


def _advice(status: int, path: str) -> str:
    if status == HTTPStatus.NOT_FOUND:
        found = (text for begin, text in _WHERE_TO_LOOK.items() if path.startswith(begin))
        return next(found, "")
    return _ADVICE.get(status, "")


def _sentence(status: int, path: str, problem: Mapping[str, Any], retry_after: str | None) -> str:
    """`The request is invalid: give either … (/deliver_at). Correct it …`"""
    title, detail = str(problem.get("title", "")), str(problem.get("detail", ""))
    errors = [error for error in problem.get("errors") or () if isinstance(error, dict)]
    if len(errors) == 1 and errors[0].get("detail") == detail:
        pointer = errors[0].get("pointer")
        detail += f" ({pointer})" if pointer else ""
        errors = []
    sentence = f"{title}: {detail}" if detail else title
    for error in errors:
        sentence += f"\n  {error.get('pointer') or '/'}: {error.get('detail')}"
    if errors:
        sentence += "\n"
    elif not sentence.endswith((".", "!", "?")):
        sentence += ". "
    else:
        sentence += " "
    if retry_after is not None:
        sentence += f"Try again in {retry_after} s."
    else:
        sentence += _advice(status, path)
    return sentence.rstrip()


def path(*parts: str) -> str:
    """A path below /v1; names and keys may hold anything."""
    return "/v1/" + "/".join(quote(part, safe="") for part in parts)


TokenOption = Annotated[
    str | None,
    typer.Option(
        "--token",
        metavar="TOKEN",
        envvar="DELAYSERVER_TOKEN",
        help="Bearer token, where the server asks for one.",
        rich_help_panel="Server",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", metavar="", help="Print JSON, for programs.")]


@dataclass(frozen=True, kw_only=True)
class ConnectionOptions(CommandOptions):
    """Options that lead to a server."""

    url: Annotated[
        str,
        typer.Option(
            "--url",
            metavar="URL",
            envvar="DELAYSERVER_URL",
            help="Where the server is.",
            rich_help_panel="Server",
        ),
    ] = URL_DEFAULT
    token: TokenOption = None
    tls_ca: Annotated[
        Path | None,
        typer.Option(
            "--tls-ca",
            metavar="FILE",
            envvar="DELAYSERVER_TLS_CA",
            help="With https: the authority that made the server's certificate (PEM).",
            rich_help_panel="Server",
        ),
    ] = None
    client_cert: Annotated[
        Path | None,
        typer.Option(
            "--client-cert",
            metavar="FILE",
            envvar="DELAYSERVER_CLIENT_CERT",
            help="With https: the certificate to show where the server asks for one (PEM).",
            rich_help_panel="Server",
        ),
    ] = None
    client_key: Annotated[
        Path | None,
        typer.Option(
            "--client-key",
            metavar="FILE",
            envvar="DELAYSERVER_CLIENT_KEY",
            help="Its private key (PEM), if that is not in the same file.",
            rich_help_panel="Server",
        ),
    ] = None

    def session(self, make: ClientFactory, *, as_json: bool) -> Session:
        """A connection with these options."""
        client = make(
            base_url=self.url,
            headers={"authorization": f"Bearer {self.token}"} if self.token else {},
            timeout=TIMEOUT_S,
            verify=_tls(self.tls_ca, self.client_cert, self.client_key),
        )
        return Session(client, self.url, as_json, self.client_cert, self.client_key)


def server_command(
    app: typer.Typer, name: str | None, *examples: str
) -> Callable[[Callable[Concatenate[Session, P], None]], Callable[Concatenate[Session, P], None]]:
    """Register a command that talks to a server; without a name it runs when a group is called
    without one of its commands."""

    def register(
        function: Callable[Concatenate[Session, P], None],
    ) -> Callable[Concatenate[Session, P], None]:
        def run(
            context: typer.Context,
            as_json: bool,
            connection: ConnectionOptions,
            **arguments: Any,
        ) -> None:
            if context.invoked_subcommand is not None:
                _refuse_options(context)
                return
            connection = _with_those_before(context, connection)
            with error_exit(as_json=as_json):
                session = connection.session(context.obj or http_client, as_json=as_json)
                with session.client:
                    function(session, **arguments)  # type: ignore[call-arg]

        _, *own = inspect.signature(function, eval_str=True).parameters.values()
        keyword = inspect.Parameter.KEYWORD_ONLY
        parameters = [
            inspect.Parameter("context", keyword, annotation=typer.Context),
            *(parameter.replace(kind=keyword) for parameter in own),
            inspect.Parameter("as_json", keyword, default=False, annotation=JsonOption),
            inspect.Parameter("connection", keyword, annotation=ConnectionOptions),
        ]
        use_signature(run, parameters)
        run.__doc__ = help_text(function.__doc__, *examples)
        command = with_options(run)
        if name is None:
            app.callback(invoke_without_command=True, help=run.__doc__)(command)
        else:
            app.command(name, help=run.__doc__)(command)
        return function

    return register


def _with_those_before(context: typer.Context, connection: ConnectionOptions) -> ConnectionOptions:
    """Options of the server may also stand before the command: behind it, they win."""
    root, names = context.find_root(), {field.name for field in fields(connection)}
    before = {
        name: value
        for name, value in root.params.items()
        if name in names and _is_written(root.get_parameter_source(name))
        if not _is_written(context.get_parameter_source(name))
    }
    return replace(connection, **before)


def _is_written(source: Enum | None) -> bool:
    return source is not None and source.name == "COMMANDLINE"


def _refuse_options(context: typer.Context) -> None:
    """Options of a group that a command of it would not see."""
    if any(_is_written(context.get_parameter_source(name)) for name in context.params):
        raise typer.BadParameter(f"options of `{context.invoked_subcommand}` come behind that word")


class error_exit:
    """Ends the program with the error's sentence and status instead of a traceback.

    `also`: other errors that are told so, as if they were of the class `kind`."""

    def __init__(
        self,
        *,
        as_json: bool = False,
        also: tuple[type[Exception], ...] = (),
        kind: type[CommandError] = CommandError,
    ) -> None:
        self._as_json = as_json
        self._also = also
        self._kind = kind

    def __enter__(self) -> None:
        return None

    def __exit__(self, _type: object, error: BaseException | None, _traceback: object) -> None:
        if isinstance(error, self._also):
            error = self._kind(str(error))
        if isinstance(error, CommandError):
            if self._as_json:
                print_json(error.document or {"title": str(error)}, err=True)
            else:
                typer.echo(f"error: {error}", err=True)
            raise typer.Exit(error.exit_status) from error
