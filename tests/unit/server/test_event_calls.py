"""An event: what watches its key is cancelled or fires, and is durable when the call returns."""

from __future__ import annotations

import pytest

from delayserver.decisions.new_messages import NewMessage
from delayserver.records.message import Payload, State, Watch
from delayserver.records.tables import OnEvent
from tests.unit.server.machine import DAY_MS, Machine


@pytest.mark.parametrize("is_filed", [False, True])
def test_an_event_completes_all_that_watches_its_key(is_filed: bool) -> None:
    """Bodies are in memory, or on the disk and longer together than what is read at once."""
    machine = Machine()
    calls = machine.calls
    machine.server.settings = calls.settings.model_copy(update={"answer_max_bytes": 1500})
    ids = []
    for number in range(8):
        on_event = OnEvent.CANCEL if number == 0 else OnEvent.FIRE
        payload = Payload(b"x" * 1000, watch=Watch(("paid",), on_event))
        message = NewMessage("orders", machine.clock() + DAY_MS, payload)
        ids.append(calls.message_id(calls.publish_one(message, machine.clock()).message_id))
    if is_filed:
        machine.wait(calls.checkpoint)
    assert machine.wait(lambda: calls.event("paid")) == (1, 7)
    assert calls.not_durable() is None
    cancelled, *fired = (calls.locate(one.seq, one.due_ms) for one in ids)
    assert cancelled.state is State.CANCELLED
    assert all(one.entry.due_ms <= machine.clock() for one in fired)
    assert machine.wait(lambda: calls.event("paid")) == (0, 0)
