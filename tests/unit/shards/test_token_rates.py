"""The rate of a token holds for all processes together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from delayserver.errors import RateLimitedError
from delayserver.security.tokens import Caller, TokenFile, TokenTable
from delayserver.shards.token_rates import SHARE_S, TokenRates
from tests.world.storage.files import SimulatedFiles

COUNT = 3
RATE = 50.0
BURST = 10
STEP_S = 0.001


class Node:
    """`Peers` and `Loop` of one process."""

    def __init__(self, nodes: list[Node], file: TokenFile) -> None:
        self.own = len(nodes)
        self.count = COUNT
        self.now_s = 0.0
        self.nodes = nodes
        self.timers: list[tuple[float, Callable[[], None]]] = []
        self.told = 0
        self.heard: dict[str, Callable[[int, bytes], None]] = {}
        self.tokens = TokenTable(file, None, lambda: self.now_s)
        self.tokens.refresh(0)
        self.rates = TokenRates(self, self.tokens, self)

    def ask(self, shard: int, call: object) -> Any:
        raise AssertionError

    def on_change(self, changed: object) -> None:
        raise AssertionError

    def on_told(self, topic: str, heard: Callable[[int, bytes], None]) -> None:
        self.heard[topic] = heard

    def tell(self, shard: int, topic: str, notice: bytes) -> None:
        assert shard != self.own
        self.told += 1
        self.nodes[shard].heard[topic](self.own, notice)

    def call_soon(self, function: Callable[[], None]) -> None:
        raise AssertionError

    def call_later(self, delay: float, function: Callable[[], None]) -> None:
        self.timers.append((self.now_s + delay, function))

    def advance(self, now_s: float) -> None:
        self.now_s = now_s
        due = [one for one in self.timers if one[0] <= now_s]
        self.timers = [one for one in self.timers if one[0] > now_s]
        for _, function in due:
            function()


class Nodes:
    """Processes that have one token, and one clock."""

    def __init__(self, **options: Any) -> None:
        self.file = TokenFile(SimulatedFiles("data"))
        _, text = self.file.create("shop", ("admin",), now_ms=0, random_bytes=bytes, **options)
        self.text = text.encode()
        self.nodes: list[Node] = []
        for _ in range(COUNT):
            self.nodes.append(Node(self.nodes, self.file))

    def caller(self, shard: int) -> Caller:
        return self.nodes[shard].tokens.caller(self.text)

    def advance(self, now_s: float) -> None:
        for node in self.nodes:
            node.advance(now_s)

    def is_let_in(self, shard: int) -> bool:
        try:
            self.caller(shard).admit()
        except RateLimitedError:
            return False
        return True


@pytest.mark.parametrize("busy", [(1,), (0, 2), (0, 1, 2)])
def test_it_is_kept_over_time_and_used(busy: tuple[int, ...]) -> None:
    nodes = Nodes(rate_per_s=RATE, burst=BURST)
    let_in, seconds = 0, 20
    for step in range(int(seconds / STEP_S)):
        nodes.advance(step * STEP_S)
        for shard in busy:
            let_in += nodes.is_let_in(shard)
        earned = RATE * step * STEP_S
        # Before they know of each other, each lets in its burst and what it earns.
        assert let_in <= len(busy) * (BURST + RATE * SHARE_S + 1) + earned
    assert let_in >= BURST + RATE * seconds - 2
    # What was let in too much is paid back.
    assert let_in <= len(busy) * (1 + RATE * SHARE_S) + BURST + RATE * seconds


def test_the_messages_of_a_batch_count_everywhere() -> None:
    nodes = Nodes(rate_per_s=RATE, burst=BURST)
    nodes.caller(0).admit()
    nodes.caller(0).count(60)
    assert nodes.is_let_in(1)
    nodes.advance(SHARE_S)
    for shard in range(COUNT):
        assert not nodes.is_let_in(shard)
    nodes.advance(SHARE_S + 0.9)
    assert not nodes.is_let_in(2)
    nodes.advance(SHARE_S + 1.1)
    assert nodes.is_let_in(2)


def test_a_notice_says_what_came_in_a_while() -> None:
    nodes = Nodes(rate_per_s=1000.0, burst=1000)
    for step in range(100):
        nodes.advance(step * STEP_S)
        assert nodes.is_let_in(0)
    assert nodes.nodes[0].told == (COUNT - 1) * (100 * STEP_S // SHARE_S - 1)
    nodes.advance(10.0)
    assert nodes.nodes[0].told == (COUNT - 1) * 100 * STEP_S // SHARE_S
    assert nodes.nodes[0].timers == []


def test_a_token_without_a_rate_costs_nothing() -> None:
    nodes = Nodes()
    for _ in range(100):
        nodes.caller(0).admit()
        nodes.caller(0).count(50)
    assert nodes.nodes[0].timers == []


def test_of_a_token_that_is_not_known_nothing_is_counted() -> None:
    nodes = Nodes(rate_per_s=RATE, burst=BURST)
    nodes.file.revoke("shop")
    nodes.nodes[1].tokens.refresh(0)
    assert nodes.is_let_in(0)
    nodes.advance(SHARE_S)
    assert nodes.is_let_in(0)
