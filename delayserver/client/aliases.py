"""Old names of clients and calls, until 0.3. Each use gives one DeprecationWarning that names the
new call.

    AsyncProducer, Producer             ─▶ client.messages, client.events, client.heartbeats
    AsyncSubscriptions, Subscriptions   ─▶ client.subscriptions, client.dead_letters
    AsyncSchedules, Schedules           ─▶ client.schedules
    AsyncSources, Sources               ─▶ client.sources
    AsyncBackups, Backups               ─▶ client.backups

An old class is the group of its calls, with connections of its own. The classes `AsyncConsumer` and
`Consumer` stay. Only making one without a client ends (`options.options_of_consumer`).

Cost: of a client. Threads: as the groups.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Self, TypeVar, Unpack

from delayserver.client import backups, messages, schedules, sources, subscriptions
from delayserver.client.blocking import (
    Blocking,
    ClientBackups,
    ClientDeadLetters,
    ClientEvents,
    ClientHeartbeats,
    ClientMessages,
    ClientSchedules,
    ClientSources,
    ClientSubscriptions,
    Closing,
)
from delayserver.client.calling import EXIT_S, RetryingClient
from delayserver.client.groups import (
    AsyncClientDeadLetters,
    AsyncClientEvents,
    AsyncClientHeartbeats,
)
from delayserver.client.options import URL_DEFAULT, ClientConfig, ClientOptions, warn_of_old

S = TypeVar("S")
G = TypeVar("G")
T = TypeVar("T")
P = ParamSpec("P")


def moved(
    method: Callable[Concatenate[G, P], T], group: Callable[[S], G], old: str, new: str
) -> Callable[Concatenate[S, P], T]:
    """The old name of a call that has moved; `group` makes its new group of an old client."""

    @wraps(method)
    def call(client: S, /, *arguments: P.args, **options: P.kwargs) -> T:
        warn_of_old(f"{old}(…)", f"{new}(…)", depth=2)
        return method(group(client), *arguments, **options)

    return call


# ── asyncio ────────────────────────────────────────────────────────────────────────────────────


class _Block:
    """Closes a client at the end of a block."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self: Closing, kind: type[BaseException] | None, *_: object) -> None:
        await self.close(None if kind is None else EXIT_S)


class AsyncProducer(messages.AsyncClientMessages, _Block):
    """Use `AsyncClient(…).messages`."""

    def __init__(self, url: str = URL_DEFAULT, **options: Unpack[ClientOptions]) -> None:
        warn_of_old("AsyncProducer(…)", "AsyncClient(…).messages", depth=2)
        super().__init__(ClientConfig(url, **options))

    event = moved(
        AsyncClientEvents.send, AsyncClientEvents, "AsyncProducer.event", "AsyncClient.events.send"
    )
    heartbeat = moved(
        AsyncClientHeartbeats.put,
        AsyncClientHeartbeats,
        "AsyncProducer.heartbeat",
        "AsyncClient.heartbeats.put",
    )
    get_heartbeat = moved(
        AsyncClientHeartbeats.get,
        AsyncClientHeartbeats,
        "AsyncProducer.get_heartbeat",
        "AsyncClient.heartbeats.get",
    )
    delete_heartbeat = moved(
        AsyncClientHeartbeats.delete,
        AsyncClientHeartbeats,
        "AsyncProducer.delete_heartbeat",
        "AsyncClient.heartbeats.delete",
    )


class _OldGroup(_Block):
    """A group with connections of its own."""

    def __init__(self, url: str = URL_DEFAULT, **options: Unpack[ClientOptions]) -> None:
        kind = type(self).__name__
        group = kind.removeprefix("Async").lower()
        warn_of_old(f"{kind}(…)", f"AsyncClient(…).{group}", depth=2)
        wanted = ClientConfig(url, **options)
        self._client = RetryingClient(wanted, wanted.any_node())

    async def close(self, timeout_s: float | None = None) -> None:
        """Take nothing more, and disconnect."""
        await self._client.close(timeout_s)


def _letters(old: "AsyncSubscriptions") -> AsyncClientDeadLetters:
    return AsyncClientDeadLetters(old._client)


class AsyncSubscriptions(_OldGroup, subscriptions.AsyncClientSubscriptions):
    """Use `AsyncClient(…).subscriptions`."""

    dead_letters = moved(
        AsyncClientDeadLetters.list,
        _letters,
        "AsyncSubscriptions.dead_letters",
        "AsyncClient.dead_letters.list",
    )
    redrive = moved(
        AsyncClientDeadLetters.redrive,
        _letters,
        "AsyncSubscriptions.redrive",
        "AsyncClient.dead_letters.redrive",
    )
    discard = moved(
        AsyncClientDeadLetters.discard,
        _letters,
        "AsyncSubscriptions.discard",
        "AsyncClient.dead_letters.discard",
    )


class AsyncSchedules(_OldGroup, schedules.AsyncClientSchedules):
    """Use `AsyncClient(…).schedules`."""


class AsyncSources(_OldGroup, sources.AsyncClientSources):
    """Use `AsyncClient(…).sources`."""


class AsyncBackups(_OldGroup, backups.AsyncClientBackups):
    """Use `AsyncClient(…).backups`."""


# ── threads ────────────────────────────────────────────────────────────────────────────────────


class _OldCalls(Blocking[Any]):
    """A group for threads, with connections and a thread of its own."""

    def __init__(
        self, group: Callable[[RetryingClient], object], url: str, options: ClientOptions
    ) -> None:
        kind = type(self).__name__
        warn_of_old(f"{kind}(…)", f"Client(…).{kind.lower()}", depth=3)
        wanted = ClientConfig(url, **options)
        client = RetryingClient(wanted, wanted.any_node())
        super().__init__(group(client), client)


def _events_of(old: "Producer") -> ClientEvents:
    return ClientEvents(AsyncClientEvents(old._client), old._thread)


def _heartbeats_of(old: "Producer") -> ClientHeartbeats:
    return ClientHeartbeats(AsyncClientHeartbeats(old._client), old._thread)


class Producer(Blocking[messages.AsyncClientMessages], ClientMessages):
    """Use `Client(…).messages`."""

    def __init__(self, url: str = URL_DEFAULT, **options: Unpack[ClientOptions]) -> None:
        warn_of_old("Producer(…)", "Client(…).messages", depth=2)
        client = messages.AsyncClientMessages(ClientConfig(url, **options))
        super().__init__(client, client)

    event = moved(ClientEvents.send, _events_of, "Producer.event", "Client.events.send")
    heartbeat = moved(
        ClientHeartbeats.put, _heartbeats_of, "Producer.heartbeat", "Client.heartbeats.put"
    )
    get_heartbeat = moved(
        ClientHeartbeats.get, _heartbeats_of, "Producer.get_heartbeat", "Client.heartbeats.get"
    )
    delete_heartbeat = moved(
        ClientHeartbeats.delete,
        _heartbeats_of,
        "Producer.delete_heartbeat",
        "Client.heartbeats.delete",
    )


def _letters_of(old: "Subscriptions") -> ClientDeadLetters:
    return ClientDeadLetters(AsyncClientDeadLetters(old._client._client), old._thread)


class Subscriptions(_OldCalls, ClientSubscriptions):
    """Use `Client(…).subscriptions`."""

    def __init__(self, url: str = URL_DEFAULT, **options: Unpack[ClientOptions]) -> None:
        super().__init__(subscriptions.AsyncClientSubscriptions, url, options)

    dead_letters = moved(
        ClientDeadLetters.list,
        _letters_of,
        "Subscriptions.dead_letters",
        "Client.dead_letters.list",
    )
    redrive = moved(
        ClientDeadLetters.redrive,
        _letters_of,
        "Subscriptions.redrive",
        "Client.dead_letters.redrive",
    )
    discard = moved(
        ClientDeadLetters.discard,
        _letters_of,
        "Subscriptions.discard",
        "Client.dead_letters.discard",
    )


class Schedules(_OldCalls, ClientSchedules):
    """Use `Client(…).schedules`."""

    def __init__(self, url: str = URL_DEFAULT, **options: Unpack[ClientOptions]) -> None:
        super().__init__(schedules.AsyncClientSchedules, url, options)


class Sources(_OldCalls, ClientSources):
    """Use `Client(…).sources`."""

    def __init__(self, url: str = URL_DEFAULT, **options: Unpack[ClientOptions]) -> None:
        super().__init__(sources.AsyncClientSources, url, options)


class Backups(_OldCalls, ClientBackups):
    """Use `Client(…).backups`."""

    def __init__(self, url: str = URL_DEFAULT, **options: Unpack[ClientOptions]) -> None:
        super().__init__(backups.AsyncClientBackups, url, options)
