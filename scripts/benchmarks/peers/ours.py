"""This server: HTTP, one POST for each message, as any client would send it; and through the
client library, which sends together what its tasks wait for."""

import asyncio
import os
import re
import sys
import time
from functools import partial

from consumers import pull_on_time
from load import KEY, LoadConnection, http_request, make_batches, publish_batches
from servers import ROOT

from delayserver.client import AsyncClient
from peers.base import (
    ClosedLoop,
    ClosedLoopResult,
    Counter,
    Got,
    Peer,
    PeerError,
    closed_loop,
    make_body,
    paced_tasks,
)

CANCEL_SUBJECT = "bench.cancel"
_LENGTH = re.compile(rb"content-length: ([0-9]+)\r\n")


class DelayServer(Peer):
    """One process, HTTP."""

    name = "delay server"
    packages = "none"
    durability = "--durability fsync"

    @classmethod
    def is_installed(cls) -> bool:
        return True

    def start(self) -> None:
        self.spawn(
            *(sys.executable, "-m", "delayserver", "serve", "--port", str(self.port)),
            *("--data-dir", str(self.directory / "data"), "--log-level", "warning"),
            cwd=ROOT,
            # An installed server has its bytecode; without it a start compiles the package.
            env={k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"},
        )

    async def is_ready(self) -> bool:
        def ask() -> bool:
            with LoadConnection(self.port, timeout_s=5) as connection:
                if connection.request(http_request("GET", "/readyz"))[0] != 200:
                    return False
                document = {"subject": "bench.soon", "type": "pull"}
                connection.call("PUT", "/v1/subscriptions/bench", document)
                return True

        return await asyncio.to_thread(ask)

    async def publish(self, load: ClosedLoop) -> ClosedLoopResult:
        subject = b"bench.later" if load.delay_ms > 3_600_000 else b"bench.soon"

        def request(due_ms: int) -> bytes:
            body = b'{"subject":"%b","body":"%b","deliver_at":%d}' % (
                subject,
                make_body(due_ms),
                due_ms,
            )
            return http_request("POST", "/v1/messages", body)

        return await closed_loop(
            self.port, load, request, lambda: answers(b"201"), connections=load.in_flight
        )

    async def cancel(self, load: ClosedLoop) -> ClosedLoopResult:
        assert load.count is not None
        keys = await publish_keys(self.port, load)
        waiting = iter(keys)
        path = f"/v1/subjects/{CANCEL_SUBJECT}/keys/"
        return await closed_loop(
            self.port,
            load,
            lambda due_ms: http_request("DELETE", path + next(waiting)),
            lambda: answers(b"200"),
            connections=load.in_flight,
        )

    async def consume(self, count: int, idle_max_s: float) -> Got:
        receive = partial(pull_on_time, self.port, "bench", count, int(idle_max_s * 1000))
        received = await asyncio.to_thread(receive)
        # Its figures are worked out already: a moment and a due time that differ by as much.
        now_ms = time.time_ns() // 1_000_000
        return Got(
            [int((now_ms + late_ms) * 1e6) for late_ms in received.lateness_ms],
            [now_ms] * len(received.lateness_ms),
        )


class ClientLibrary(DelayServer):
    """The delay server through its client library: one task for each message in flight, and an
    answer for each."""

    name = "delay server, client library"
    durability = "--durability fsync, without generated keys"

    async def publish(self, load: ClosedLoop) -> ClosedLoopResult:
        subject = "bench.later" if load.delay_ms > 3_600_000 else "bench.soon"
        url = f"http://127.0.0.1:{self.port}"
        async with AsyncClient(url, generate_keys=False) as client:

            async def send(number: int, due_ms: int) -> None:
                await client.messages.publish(
                    subject, make_body(due_ms).decode(), deliver_at=due_ms
                )

            return await paced_tasks(load, send)

    async def cancel(self, load: ClosedLoop) -> ClosedLoopResult:
        waiting = iter(await publish_keys(self.port, load))
        async with AsyncClient(f"http://127.0.0.1:{self.port}") as client:

            async def send(number: int, due_ms: int) -> None:
                await client.messages.cancel(subject=CANCEL_SUBJECT, key=next(waiting))

            return await paced_tasks(load, send)


async def publish_keys(port: int, load: ClosedLoop) -> list[str]:
    """Messages under keys, in batches; the keys."""
    assert load.count is not None
    dues_ms = [load.due_ms()] * load.count
    batches = make_batches(CANCEL_SUBJECT, dues_ms, {"text": "x" * 200}, 500, keyed=True)
    await asyncio.to_thread(
        publish_batches, port, batches, time.monotonic(), requests_max=len(batches.requests)
    )
    return [KEY % number for number in range(load.count)]


def answers(status: bytes) -> Counter:
    """Counts answers, all with this status."""
    begin = b"HTTP/1.1 %b " % status

    def count_answers(data: bytes) -> tuple[int, bytes]:
        count = 0
        while (end := data.find(b"\r\n\r\n")) >= 0:
            if not data.startswith(begin):
                raise PeerError(f"not {status.decode()}: {data[:300]!r}")
            found = _LENGTH.search(data, 0, end + 2)
            assert found is not None
            total = end + 4 + int(found[1])
            if len(data) < total:
                break
            count += 1
            data = data[total:]
        return count, data

    return count_answers
