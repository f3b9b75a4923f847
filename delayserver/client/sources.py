"""Sources: topics whose records the server publishes, each once.

Cost: one request per call. Threads: belongs to the event loop.
"""

from collections.abc import AsyncIterator
from typing import TypedDict, Unpack

import msgspec

from delayserver.client.definitions import VersionedDefinitions
from delayserver.client.transport import HttpAnswer, decoded, path_of
from delayserver.client.values import OnError, Source
from delayserver.client.writing import options_to_send


class SourceOptions(TypedDict, total=False):
    """Options of a source; see `AsyncClientSources.put`."""

    due_header: str | None
    group: str | None
    on_error: OnError | None
    username: str | None
    password: str | None
    mechanism: str | None
    tls: bool | None


class AsyncClientSources(VersionedDefinitions[Source]):
    """The sources of a server.

        await client.sources.put("orders", "order.unpaid", "127.0.0.1:9092", "orders")

    A source that is resumed goes on where it is; one that an error has stopped tries that record
    again. Messages that a source has published stay when it is deleted."""

    _kind = "sources"

    async def put(
        self,
        name: str,
        subject: str,
        bootstrap: str,
        topic: str,
        *,
        if_match: str | None = None,
        timeout_s: float | None = None,
        **options: Unpack[SourceOptions],
    ) -> Source:
        """Publish the records of a topic of Kafka, or replace that source; an option that is not
        given has its default then.

        - `bootstrap`: brokers to begin with, `host:port` with commas between them.
        - `due_header`: the header that says when a message is due; "delay-until" by default.
        - `group`: the consumer group whose offsets show how far it is.
        - `on_error`: with a record that cannot be published: "skip", or "stop" there.
        - `username`, `password`, `mechanism`, `tls`: how the server logs in to the brokers.
        - `if_match`: only if that is its version (`Source.version`).

        Raises InvalidError, NotAllowedError, ChangedError with `if_match`."""
        document = {
            "type": "kafka",
            "subject": subject,
            "bootstrap": bootstrap,
            "topic": topic,
            **options_to_send(SourceOptions, options),
        }
        return await self._put(name, document, if_match=if_match, timeout_s=timeout_s)

    def list(self, *, page: int = 100) -> AsyncIterator[Source]:
        """All that the token may publish or consume, in the order of their names.

        One request for each `page` of them, at most 100."""
        return self._client._pages(path_of("sources"), "sources", Source, page)

    def _read(self, answer: HttpAnswer) -> Source:
        return msgspec.structs.replace(decoded(answer.body, Source), version=answer.version)
