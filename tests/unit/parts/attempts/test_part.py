"""The attempts of messages, as the core is told of them."""

from typing import Any

import pytest

from delayserver.parts.attempts.part import ATTEMPTS_PART
from delayserver.parts.part import NoDecisions
from delayserver.shards.peers import PeerCall
from tests.unit.shards.shards import AWAY, ToldPeers


def test_it_decides_nothing_and_has_no_definitions() -> None:
    core: Any = None
    decider = ATTEMPTS_PART.decide(core)
    assert isinstance(decider, NoDecisions) and decider.not_understood is None


@pytest.mark.parametrize(("method", "path"), ATTEMPTS_PART.rules)
def test_each_call_is_for_the_shard_in_the_id(method: str, path: str) -> None:
    peers = ToldPeers(4, lambda shard, call: AWAY)
    call = PeerCall(method, path.format(message_id="0002" + "0" * 32))
    assert peers.route(call) is AWAY and peers.asked == [(2, call)]
