"""When to ask again: exponential backoff with jitter, and the server's `Retry-After`.

The wait before attempt n+1 is drawn from the upper half of `first_s · 2^(n-1)`, at most `most_s`;
clients that failed together do not return together. A `Retry-After` is the least that is waited.

Cost: none. Threads: values; time and randomness are arguments.
"""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from http import HTTPStatus
from itertools import count
from typing import Protocol, TypeVar

import msgspec

from delayserver.client.errors import UnansweredError, UnreachableError
from delayserver.client.transport import TIMEOUT_S, HttpAnswer

ATTEMPT_S_MIN = 0.1
"""With less time than that left, asking again is not worth while."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How long to keep asking when the server is overloaded, restarting or not reachable."""

    timeout_s: float = 60.0
    """From the first attempt on. A call that is not answered by then is an error, also if a server
    takes the request and keeps silent. 0: no retries; the one request has its own time."""
    first_s: float = 0.05
    most_s: float = 2.0

    def __post_init__(self) -> None:
        if self.timeout_s < 0 or not 0 < self.first_s <= self.most_s:
            raise ValueError("timeout_s is 0 or more, and 0 < first_s <= most_s")

    def wait_s(self, attempt: int, draw: float, retry_after_s: float | None = None) -> float:
        """The wait after attempt number `attempt` (from 1); `draw` is random in [0, 1)."""
        # 2**30 times any first wait is longer than any longest one.
        full_s = min(self.most_s, self.first_s * 2.0 ** min(attempt - 1, 30))
        return max(full_s * (0.5 + draw / 2), retry_after_s or 0.0)


NO_RETRIES = RetryPolicy(timeout_s=0)


class Time(msgspec.Struct, frozen=True):
    """Time and chance, as a client sees them; a test has its own."""

    now_s: Callable[[], float] = time.monotonic
    """Never set, as opposed to the clock of the day."""
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    random: Callable[[], float] = msgspec.field(default_factory=lambda: random.Random().random)


_TRY_AGAIN = (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE)
"""The server has done nothing, unless the answer `is_unknown`."""


class Attempt(Protocol):
    """One request, given up after so long. Raises UnansweredError."""

    async def __call__(self, *, timeout_s: float) -> HttpAnswer: ...


async def answered(
    request: Attempt,
    policy: RetryPolicy,
    time: Time,
    *,
    repeatable: bool = True,
    timeout_s: float = TIMEOUT_S,
) -> HttpAnswer:
    """An answer to the request, which is made again until there is one or the policy's time is up.

    One request has `timeout_s`, and never more than the rest of the policy's time. A request that
    is not `repeatable` is made again only if the server has certainly not acted on it. Returns the
    last answer, even when that is "try again"; raises UnansweredError."""
    deadline_s = time.now_s() + policy.timeout_s
    attempt_s = min(timeout_s, policy.timeout_s or timeout_s)
    for attempt in count(1):
        failure: UnansweredError | None = None
        retry_after_s = None
        try:
            answer = await request(timeout_s=attempt_s)
        except UnansweredError as error:
            failure = error
            may_repeat = repeatable or isinstance(error, UnreachableError)
        else:
            is_unknown = answer.is_unknown
            may_repeat = repeatable if is_unknown else answer.status in _TRY_AGAIN
            retry_after_s = answer.retry_after_s
        wait_s = policy.wait_s(attempt, time.random(), retry_after_s)
        left_s = deadline_s - time.now_s() - wait_s
        if not may_repeat or left_s < ATTEMPT_S_MIN:
            if failure is not None:
                raise failure
            return answer
        attempt_s = min(timeout_s, left_s)
        await time.sleep(wait_s)
    raise AssertionError("there is always another attempt")


async def within(timeout_s: float, work: Awaitable[T]) -> T:
    """The result of `work`, if it comes within that time. Raises UnansweredError."""
    try:
        async with asyncio.timeout(timeout_s):
            return await work
    except TimeoutError as error:
        raise UnansweredError(f"there was no answer within {timeout_s:g} s") from error
