"""Sources: topics whose records the server publishes, each once.

Cost: one request per call. Threads: belongs to the event loop.
"""

import ssl
from collections.abc import AsyncIterator
from functools import partial
from urllib.parse import urlencode

import msgspec

from delayserver.client.calling import RETRY, URL_DEFAULT, RetryingClient
from delayserver.client.cluster_map import OwnerHosts
from delayserver.client.following import followed
from delayserver.client.nodes import Connect
from delayserver.client.retries import RetryPolicy, Time
from delayserver.client.transport import (
    TIMEOUT_S,
    HttpAnswer,
    HttpTransport,
    Transport,
    decoded,
    path_of,
)
from delayserver.client.values import OnError, Source


class _List(msgspec.Struct):
    sources: list[Source]
    cursor: str | None = None


class AsyncSources(RetryingClient):
    """The sources of a server, for asyncio.

        async with AsyncSources("http://127.0.0.1:8080") as sources:
            await sources.put("orders", "order.unpaid", "127.0.0.1:9092", "orders")

    - `retry`: how long to ask again while the server is away; a minute by default.
    - `timeout_s`: how long one request may take. Each call takes a `timeout_s`, too, for all of its
      requests: UnansweredError when that is over.
    - `owner_hosts`: of a cluster any node is asked, when the one at `url` cannot be reached. Those
      are asked that are on the same host as `url`; on any, with "any": then the token goes wherever
      the server says. With "none" only `url` is.
    - `token`; `tls`: instead of the system's certificates; `transport`, `connect`, `time`: for
      tests."""

    def __init__(
        self,
        url: str = URL_DEFAULT,
        *,
        token: str | None = None,
        retry: RetryPolicy = RETRY,
        timeout_s: float = TIMEOUT_S,
        owner_hosts: OwnerHosts = "same",
        tls: ssl.SSLContext | None = None,
        transport: Transport | None = None,
        connect: Connect | None = None,
        time: Time | None = None,
    ) -> None:
        make = partial(HttpTransport, token=token, tls=tls)
        asked = followed(transport, connect, make, url, owner_hosts)
        super().__init__(url, retry=retry, timeout_s=timeout_s, transport=asked, time=time)

    async def put(
        self,
        name: str,
        subject: str,
        bootstrap: str,
        topic: str,
        *,
        due_header: str | None = None,
        group: str | None = None,
        on_error: OnError | None = None,
        username: str | None = None,
        password: str | None = None,
        mechanism: str | None = None,
        tls: bool | None = None,
        if_match: str | None = None,
        timeout_s: float | None = None,
    ) -> Source:
        """Publish what stands in a topic of Kafka, or change that: what is not given has its
        default then.

        - `bootstrap`: brokers to begin with, `host:port` with commas between them.
        - `due_header`: the header that says when a message is due; "delay-until" by default.
        - `group`: the consumer group whose offsets show how far it is.
        - `on_error`: with a record that cannot be published: "skip", or "stop" there.
        - `username`, `password`, `mechanism`, `tls`: for brokers that want to know who comes.
        - `if_match`: only if that is its version (`Source.version`).

        Raises InvalidError, NotAllowedError, ChangedError with `if_match`."""
        document = {
            "type": "kafka",
            "subject": subject,
            "bootstrap": bootstrap,
            "topic": topic,
            "due_header": due_header,
            "group": group,
            "on_error": on_error,
            "username": username,
            "password": password,
            "mechanism": mechanism,
            "tls": tls,
        }
        given = {field: value for field, value in document.items() if value is not None}
        answer = await self._call(
            "PUT", path_of("sources", name), given, if_match=if_match, timeout_s=timeout_s
        )
        return _source(answer)

    async def get(self, name: str, *, timeout_s: float | None = None) -> Source:
        """A source, and how far it is. Raises NotFoundError."""
        return _source(await self._call("GET", path_of("sources", name), timeout_s=timeout_s))

    async def list(self, *, page: int = 100) -> AsyncIterator[Source]:
        """All that the token may publish or consume, in the order of their names.

        One request for each `page` of them, at most 100."""
        query = {"limit": str(page)}
        while True:
            answer = await self._call("GET", f"{path_of('sources')}?{urlencode(query)}")
            found = decoded(answer.body, _List)
            for source in found.sources:
                yield source
            if found.cursor is None:
                return
            query["cursor"] = found.cursor

    async def pause(
        self, name: str, *, if_match: str | None = None, timeout_s: float | None = None
    ) -> Source:
        """Take nothing until it is resumed. Raises NotFoundError, ChangedError."""
        return await self._post(name, "pause", if_match, timeout_s)

    async def resume(
        self, name: str, *, if_match: str | None = None, timeout_s: float | None = None
    ) -> Source:
        """Go on where it is; one that an error has stopped tries that record again. Raises
        NotFoundError, ChangedError."""
        return await self._post(name, "resume", if_match, timeout_s)

    async def delete(
        self, name: str, *, if_match: str | None = None, timeout_s: float | None = None
    ) -> None:
        """End a source: when this returns, it takes nothing more. What it has published stays.
        Raises NotFoundError, ChangedError."""
        path = path_of("sources", name)
        if if_match is None:
            await self._delete(path, timeout_s)
        else:
            await self._call("DELETE", path, if_match=if_match, timeout_s=timeout_s)

    async def _post(
        self, name: str, what: str, if_match: str | None, timeout_s: float | None
    ) -> Source:
        path = path_of("sources", name, what)
        return _source(await self._call("POST", path, if_match=if_match, timeout_s=timeout_s))


def _source(answer: HttpAnswer) -> Source:
    version = answer.headers.get("etag", "").strip('"')
    return msgspec.structs.replace(decoded(answer.body, Source), version=version)
