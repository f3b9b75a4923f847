"""Planned restarts under consumers that work: no message is in two handlers, or handled twice.

The server is told to stop, and started again, while consumers of the client library hold leases,
extend them and acknowledge. A ledger outside of the server counts how often each message was
handled. `python -m tests.integration.celery_support` does the same with tasks of Celery.

    python -m tests.crash.planned --restarts 200

Cost: a second for each restart. Threads: one, and those of the client.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

from delayserver.client import AsyncClient, Message
from tests.integration.api_support import ApiServer
from tests.waiting import wait_until

CONSUMERS: Final = 2
PUBLISHED: Final = 40
"""Messages for each restart, due within two seconds."""
DUE_MAX_MS: Final = 2000
WORK_MAX_S: Final = 0.8
"""Many are in a handler when the server stops, and when it is there again."""
SERVING_MAX_S: Final = 0.6


class Handlers:
    """The deeds of the handlers of all consumers."""

    def __init__(self, chance: random.Random) -> None:
        self.done: Counter[str] = Counter()
        self.busy: Counter[str] = Counter()
        self.overlaps: list[str] = []
        """Messages that were in two handlers at once."""
        self._chance = chance

    async def handle(self, message: Message) -> None:
        """Work on a message for a while."""
        self.busy[message.id] += 1
        if self.busy[message.id] > 1:
            self.overlaps.append(message.id)
        await asyncio.sleep(self._chance.uniform(0, WORK_MAX_S))
        self.busy[message.id] -= 1
        self.done[message.id] += 1


@asynccontextmanager
async def consuming(url: str, handlers: Handlers) -> AsyncIterator[None]:
    """Several consumers of one subscription, until the end of the block."""
    consumers = [AsyncClient(url).consumer(concurrency=20) for _ in range(CONSUMERS)]
    for consumer in consumers:
        consumer.subscribe("work", name="workers", lease="3s")(handlers.handle)
    tasks = [asyncio.create_task(consumer.run()) for consumer in consumers]
    try:
        yield
    finally:
        for consumer in consumers:
            consumer.stop()
        await asyncio.gather(*tasks)


async def consumers_over(directory: Path, restarts: int, seed: int) -> Counter[str]:
    """How often each message was handled."""
    chance, api = random.Random(seed), ApiServer(directory)
    handlers, published = Handlers(chance), set[str]()
    api.start()
    try:
        async with consuming(api.process.url, handlers):
            for _ in range(restarts):
                batch = [
                    {"subject": "work", "delay": chance.randrange(DUE_MAX_MS)}
                    for _ in range(PUBLISHED)
                ]
                answer = await asyncio.to_thread(api.ask, "POST", "/v1/messages/batch", json=batch)
                published.update(answer["ids"])
                await asyncio.sleep(chance.uniform(0, SERVING_MAX_S))
                await asyncio.to_thread(api.restart)
            await asyncio.to_thread(wait_until, lambda: published <= handlers.done.keys(), 60)
    finally:
        api.shut_down()
    assert not handlers.overlaps, f"in two handlers at once: {handlers.overlaps}"
    assert handlers.done.keys() == published
    return handlers.done


def main() -> None:
    """Restart many times, and print what became of the messages."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--restarts", type=int, default=200, help="planned ones (default: 200)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        counts = asyncio.run(consumers_over(Path(name), options.restarts, options.seed))
    print(f"{options.restarts} planned restarts; handled so often: {Counter(counts.values())}")
    if set(counts.values()) != {1}:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
