"""The server that runs here: the one that the settings of this environment start.

A health check has the environment of its server (a container's variables, a unit's file of
settings), but no address is given to it. So it reads the same settings as the server: the port,
the address, whether there is a certificate.

Its certificate is not verified: it is made for the name that clients use, and maybe by an authority
that this machine does not know, while the way to it does not leave the machine. So nothing that is
secret is sent: no token. Where the server asks who calls (`tls_client_ca`) it is shown its own
certificate, as nodes of a cluster show theirs to each other: that has to be good for clients, too.
One that was made for clients goes before it.

Cost: 0.1 s, for the settings. Threads: one.
"""

import ipaddress
import ssl
from pathlib import Path

import typer

from delayserver.cli.serve import settings_or_exit
from delayserver.cli.session import TIMEOUT_S, Session, http_client
from delayserver.config import Settings


def session_here(asked: Session, config: Path | None) -> Session:
    """A session with it, instead of the one that was asked for; who asked closes its client.
    `config`: its TOML file."""
    settings = settings_or_exit({}, config)
    if settings.port == 0:
        raise typer.BadParameter(
            "with port 0 it is at any free port: say where with --url", param_hint="--here"
        )
    url = url_here(settings)
    verify = _tls(settings, asked)
    client = http_client(base_url=url, headers={}, timeout=TIMEOUT_S, verify=verify)
    return Session(client, url, asked.as_json)


def url_here(settings: Settings) -> str:
    """Where this machine reaches the server: at its address, or, if that is all of them, at the
    loopback address."""
    host = settings.host
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        pass
    else:
        if address.is_unspecified:
            host = "127.0.0.1" if address.version == 4 else "::1"
    authority = f"[{host}]" if ":" in host else host
    return f"{'http' if settings.tls_cert is None else 'https'}://{authority}:{settings.port}"


def _tls(settings: Settings, asked: Session) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    shown = asked.client_cert, asked.client_key
    if asked.client_cert is None and settings.tls_client_ca is not None:
        shown = settings.tls_cert, settings.tls_key
    cert, key = shown
    if cert is not None:
        try:
            context.load_cert_chain(cert, key, password="")
        except OSError as error:
            raise typer.BadParameter(
                f"cannot show {cert} with the key in {key or 'the same file'}: "
                f"{error.strerror or error}",
                param_hint="--here",
            ) from error
    return context
