"""Sources: topics whose records the server publishes, each once.

Cost: one request per call. Threads: belongs to the event loop.
"""

from collections.abc import AsyncIterator

import msgspec

from delayserver.client.definitions import DefinitionsClient
from delayserver.client.transport import HttpAnswer, decoded, path_of
from delayserver.client.values import OnError, Source


class _List(msgspec.Struct):
    sources: list[Source]
    cursor: str | None = None


class AsyncSources(DefinitionsClient[Source]):
    """The sources of a server, for asyncio.

        async with AsyncSources("http://127.0.0.1:8080") as sources:
            await sources.put("orders", "order.unpaid", "127.0.0.1:9092", "orders")

    Messages that a source has published stay when it is deleted."""

    _kind = "sources"

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
        return await self._put(name, document, timeout_s, if_match)

    async def get(self, name: str, *, timeout_s: float | None = None) -> Source:
        """A source, and how far it is. Raises NotFoundError."""
        return await self._get(name, timeout_s)

    def list(self, *, page: int = 100) -> AsyncIterator[Source]:
        """All that the token may publish or consume, in the order of their names.

        One request for each `page` of them, at most 100."""
        return self._pages(path_of("sources"), {"limit": str(page)}, _read_page)

    async def pause(
        self, name: str, *, if_match: str | None = None, timeout_s: float | None = None
    ) -> Source:
        """Take nothing until it is resumed. Raises NotFoundError, ChangedError."""
        return await self._post(name, "pause", timeout_s, if_match)

    async def resume(
        self, name: str, *, if_match: str | None = None, timeout_s: float | None = None
    ) -> Source:
        """Go on where it is; one that an error has stopped tries that record again. Raises
        NotFoundError, ChangedError."""
        return await self._post(name, "resume", timeout_s, if_match)

    async def delete(
        self, name: str, *, if_match: str | None = None, timeout_s: float | None = None
    ) -> None:
        """End a source: when this returns, it takes nothing more. Its messages stay.
        Raises NotFoundError, ChangedError."""
        await self._end(name, timeout_s, if_match)

    def _read(self, answer: HttpAnswer) -> Source:
        return msgspec.structs.replace(decoded(answer.body, Source), version=answer.version)


def _read_page(body: bytes) -> tuple[list[Source], str | None]:
    page = decoded(body, _List)
    return page.sources, page.cursor
