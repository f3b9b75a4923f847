"""What is settled in one turn of the event loop is one request."""

from __future__ import annotations

from collections.abc import Callable

from delayserver.server.settle_queue import SettleQueue
from delayserver.server.threads import SettleRequest
from storage.notes import NoteBytes


def test_all_of_a_turn_is_one_request() -> None:
    soon: list[Callable[[], None]] = []
    requests: list[SettleRequest] = []
    queue = SettleQueue(soon.append, requests.append)
    told: list[str] = []
    queue.settle(1, b"a", None)
    queue.settle(1, b"b", NoteBytes(b"note"))
    queue.settle_recorded(2, b"c", 7)
    queue.when_settled(lambda: told.append("settled"))
    queue.retire([1], lambda: told.append("retired"))
    [flush] = soon
    assert requests == []
    flush()
    [request] = requests
    assert request.rows_by_hour == {1: [b"a", b"b", b"note"]}
    assert request.recorded == {7: {2: [b"c"]}}
    assert request.settled_hours == [1]
    for done in request.done:
        done()
    assert told == ["settled", "retired"]
    queue.flush()
    assert len(requests) == 1, "nothing came since"
    queue.settle(3, b"d", None)
    assert len(soon) == 2
