"""The sockets that clients connect to.

Cost: some system calls, at the start. Threads: any.
"""

import contextlib
import socket
from collections.abc import Iterator

from delayserver.config import Settings

BACKLOG = 4096


def bind(settings: Settings, *, shares: bool = False) -> socket.socket:
    """A socket at the address of the settings; `shares`: others may be there, too. Raises OSError
    with a text that tells the operator how to get a free port."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if shares:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    with _port_errors(settings, listener):
        listener.bind((settings.host, settings.port))
    listener.set_inheritable(False)
    return listener


def listen(settings: Settings, listener: socket.socket) -> None:
    """Have clients connect to it. Raises as `bind`."""
    with _port_errors(settings, listener):
        # uvloop would not tell that another server, which started with us, was quicker.
        listener.listen(BACKLOG)


@contextlib.contextmanager
def _port_errors(settings: Settings, listener: socket.socket) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        listener.close()
        raise OSError(
            f"cannot listen on {settings.host}:{settings.port}: {error.strerror}; "
            "stop the program that listens there, or choose another --port"
        ) from error


def url_of(listener: socket.socket, is_https: bool) -> str:
    """Where a socket is reached."""
    host, port = listener.getsockname()[:2]
    authority = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    return f"{'https' if is_https else 'http'}://{authority}"
