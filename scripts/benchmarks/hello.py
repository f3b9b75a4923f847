"""The yardstick of HTTP: a bare ASGI application that says hello, on the server's uvicorn settings.

    python scripts/benchmarks/hello.py PORT

No framework, no routing, no look at the request. What a server on uvicorn reaches is measured in
multiples of it, so that figures of different machines can be compared.
"""

import asyncio
import gc
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import uvicorn
import uvloop

BODY = b"hello"
START = {
    "type": "http.response.start",
    "status": 200,
    "headers": [(b"content-type", b"text/plain"), (b"content-length", b"%d" % len(BODY))],
}
END = {"type": "http.response.body", "body": BODY}


async def hello(
    scope: dict[str, Any],
    receive: Callable[[], Awaitable[dict[str, Any]]],
    send: Callable[[dict[str, Any]], Awaitable[None]],
) -> None:
    """Answer anything with 200."""
    await send(START)
    await send(END)


def main() -> None:
    """Serve until SIGTERM."""
    config = uvicorn.Config(
        hello,
        host="127.0.0.1",
        port=int(sys.argv[1]),
        http="httptools",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=False,
        proxy_headers=False,
        backlog=4096,
        timeout_keep_alive=75,
    )
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(uvicorn.Server(config).serve())


if __name__ == "__main__":
    main()
