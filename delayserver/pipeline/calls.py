"""Calls of a job to the server, over HTTP: waited for, and made again while the server is away.

Every call that a job makes may be repeated, because it names its load or its hour. So the job waits
for a server that is restarted meanwhile, and asks again.

Cost: one connection. Threads: the caller's.
"""

import time
from collections.abc import Callable
from typing import Any, Self

import httpx

from delayserver.errors import PipelineError

POLL_S = 0.2
CALL_TIMEOUT_S = 30.0
_WAIT_FOR = (502, 503, 504)


class CallRefusedError(PipelineError):
    """The server understood a call, and refused it."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class ServerCalls:
    """A server that a job can call."""

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        wait_s: float = 60.0,
        sleep: Callable[[float], None] = time.sleep,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """`wait_s`: how long to wait for a server that does not answer, or is not ready."""
        headers = {"authorization": f"Bearer {token}"} if token else {}
        self._client = httpx.Client(
            base_url=url, headers=headers, timeout=CALL_TIMEOUT_S, trust_env=False
        )
        self.url = url
        self._wait_s = wait_s
        self._sleep = sleep
        self._monotonic = monotonic

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def call(
        self, method: str, path: str, document: object = None, timeout_s: float = CALL_TIMEOUT_S
    ) -> Any:
        """The document of the answer. Raises CallRefusedError, PipelineError."""
        deadline = self._monotonic() + self._wait_s
        while True:
            try:
                response = self._client.request(method, path, json=document, timeout=timeout_s)
            except httpx.TransportError as error:
                if self._monotonic() >= deadline:
                    raise PipelineError(
                        f"no server can be reached at {self.url} ({error}); start it, or say "
                        "where it is with --server"
                    ) from error
            else:
                if response.status_code not in _WAIT_FOR or self._monotonic() >= deadline:
                    return self._answer(response)
            self._sleep(POLL_S)

    def _answer(self, response: httpx.Response) -> Any:
        try:
            answer = response.json()
        except ValueError:
            answer = None
        if response.is_success and isinstance(answer, dict):
            return answer
        if isinstance(answer, dict) and "title" in answer:
            text = f"the server refused: {answer['title']}: {answer.get('detail', '')}"
            raise CallRefusedError(response.status_code, text)
        raise PipelineError(
            f"what answers at {self.url} is not a delay server (status {response.status_code})"
        )
