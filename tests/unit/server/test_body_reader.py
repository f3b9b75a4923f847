"""Bodies of rows that leave are read at once where they are in memory."""

from __future__ import annotations

import pytest

from delayserver.delivery.delayed_fetch import Pulled, PullRequest
from tests.unit.server.machine import Machine


@pytest.mark.parametrize("is_filed", [False, True])
@pytest.mark.parametrize("is_in_memory", [False, True])
def test_a_body_leaves_wherever_it_stands(is_filed: bool, is_in_memory: bool) -> None:
    machine = Machine()
    calls = machine.calls
    machine.subscribe()
    machine.publish(due_in_ms=0)
    if is_filed:
        machine.wait(calls.checkpoint)
    if not is_in_memory:
        machine.server.reader_now.fetch_now = lambda *rest: None  # type: ignore[method-assign]
    answers: list[Pulled] = []
    request = PullRequest(10, 60_000, 60_000, answers.append)
    calls.consumers.pull(calls.subscription("s1"), request)
    machine.wait(calls.settled)
    [[(delivery, _)]] = answers
    assert delivery.payload.body == b"1"
