"""A look-up tells of one moment, whatever happens while it reads the body."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from delayserver.queries.look_up import Queries
from delayserver.records.message import Payload, ScheduleEntry, State
from delayserver.records.message_state import ArrivedDelivery, MessageState, RowStage, state_of
from delayserver.records.tables import Change, ChangeState
from delayserver.server.calls import Calls
from storage.rows import DISPATCH_DTYPE, Outcome

SEQ, RETRY_SEQ, HOOK = 7, 9, 1


class RetryIsFiled:
    """Calls to a server in which a retry waits. While the body is read the retry is delivered, and
    a checkpoint forgets that there was one: the dispatch log of its entry has it from then on."""

    registry = SimpleNamespace(by_id=lambda number: SimpleNamespace(name="hook"))
    subject_names = ("orders",)

    def __init__(self) -> None:
        self.pending = {HOOK: Change(ChangeState.RETRYING, RETRY_SEQ, 2000, 3, 0)}
        self.settled = np.zeros(0, DISPATCH_DTYPE)

    def locate(self, seq: int, due_ms: int) -> MessageState:
        return self.message_state(seq, due_ms, "", {})

    def message_state(
        self, seq: int, due_ms: int, subject: str, settled: Mapping[int, ArrivedDelivery]
    ) -> MessageState:
        def place(entry: ScheduleEntry) -> RowStage:
            return RowStage.WAITS if entry.seq == RETRY_SEQ and self.pending else RowStage.GONE

        first = ScheduleEntry(seq, due_ms)
        return state_of(first, self.pending, place, [HOOK] if subject else [], settled)

    def version(self, seq: int) -> str:
        return "v"

    def encode_id(self, due_ms: int, seq: int) -> str:
        return f"{seq}"

    async def find_any(self, rows: Sequence[ScheduleEntry]) -> object:
        assert rows[0] == ScheduleEntry(RETRY_SEQ, 2000)
        self.pending.clear()
        self.settled = np.array(
            [(RETRY_SEQ, SEQ, 2000, 2001, HOOK, 3, Outcome.DELIVERED, 0)], DISPATCH_DTYPE
        )
        return SimpleNamespace(subject_id=0, payload=Payload(b"1"))

    async def read(self, ask: Callable[[Any], Any]) -> Any:
        return ask(
            SimpleNamespace(settled=lambda hour, seq: self.settled[self.settled["seq"] == seq])
        )


def test_a_retry_that_ends_while_the_body_is_read_is_not_lost() -> None:
    queries = Queries(cast(Calls, RetryIsFiled()))
    view = asyncio.run(queries.look_up(SEQ, 1000))
    assert view.attempts == 3
    assert {(one.subscription, one.state, one.attempt) for one in view.deliveries} == {
        ("hook", State.DELIVERED, 3)
    }
