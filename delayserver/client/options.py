"""The options of a client: how its server is reached, how long it is asked, and the limits of its
publishes.

Cost: none. Threads: values.
"""

import ssl
import warnings
from functools import partial
from typing import Any, Final, TypedDict

import msgspec

from delayserver.client.cluster_map import OwnerHosts, check_hosts
from delayserver.client.following import Following
from delayserver.client.nodes import Connect
from delayserver.client.retries import RetryPolicy, Time
from delayserver.client.transport import TIMEOUT_S, HttpTransport, Transport

URL_DEFAULT: Final = "http://127.0.0.1:8080"
RETRY: Final = RetryPolicy()
PENDING_MAX: Final = 10_000
PENDING_MAX_BYTES: Final = 64 * 1024 * 1024
IN_FLIGHT_MAX: Final = 2
"""Requests: the server works on one while the next is made."""


class ReachOptions(TypedDict, total=False):
    """Options that say how the server is reached; see `AsyncClient`."""

    token: str | None
    owner_hosts: OwnerHosts
    tls: ssl.SSLContext | None
    transport: Transport | None
    connect: Connect | None
    time: Time | None


class AskOptions(ReachOptions, total=False):
    """Options of every call; see `AsyncClient`."""

    retry: RetryPolicy
    timeout_s: float


class ClientOptions(AskOptions, total=False):
    """Options of a client; see `AsyncClient`."""

    generate_keys: bool
    pending_max: int
    pending_max_bytes: int
    in_flight_max: int


class ClientConfig(msgspec.Struct, frozen=True):
    """The options of a client with their defaults. Raises ValueError."""

    url: str = URL_DEFAULT
    token: str | None = None
    owner_hosts: OwnerHosts = "same"
    tls: ssl.SSLContext | None = None
    transport: Transport | None = None
    connect: Connect | None = None
    time: Time | None = None
    retry: RetryPolicy = RETRY
    timeout_s: float = TIMEOUT_S
    generate_keys: bool = True
    pending_max: int = PENDING_MAX
    pending_max_bytes: int = PENDING_MAX_BYTES
    in_flight_max: int = IN_FLIGHT_MAX

    def __post_init__(self) -> None:
        check_hosts(self.owner_hosts)

    @property
    def connected(self) -> Connect:
        """Makes a transport to an address."""
        return self.connect or partial(HttpTransport, token=self.token, tls=self.tls)

    def home(self) -> Transport:
        """A transport to `url` alone."""
        return self.transport or HttpTransport(self.url, token=self.token, tls=self.tls)

    def any_node(self) -> Transport:
        """A transport to whichever node can be reached. A test that gives a `transport` without
        `connect` has that node alone."""
        if self.transport is not None and self.connect is None:
            return self.transport
        return Following(self.home(), self.url, self.connected, self.owner_hosts)


# ── old names ──────────────────────────────────────────────────────────────────────────────────


def warn_of_old(old: str, new: str, *, depth: int) -> None:
    """Tell the caller `depth` frames above that a name ends. `new`: the call to use instead."""
    text = f"{old} ends in delayserver 0.3: use {new}"
    warnings.warn(text, DeprecationWarning, stacklevel=depth + 1)


def options_of_consumer(
    client: str, server: ClientConfig | str, options: dict[str, Any]
) -> tuple[ClientConfig, dict[str, Any]]:
    """The options of a consumer by their use: to reach the server, and its own.

    Until 0.3 a consumer may also be made by itself, with an address and options of a client."""
    if isinstance(server, ClientConfig):
        return server, options
    kind = client.replace("Client", "Consumer")
    warn_of_old(f"{kind}(…)", f"{client}(…).consumer(…)", depth=3)
    names = ReachOptions.__annotations__
    reach = {name: value for name, value in options.items() if name in names}
    own = {name: value for name, value in options.items() if name not in names}
    return ClientConfig(own.pop("url", server), **reach), own
