"""PUT of a heartbeat as the hot path asks for it: made, renewed, and refused."""

import random

import msgspec
import pytest

from delayserver.api.intake import Intake
from delayserver.config import Settings
from delayserver.errors import AccessError, InputError
from delayserver.parts.heartbeats.heartbeats import Heartbeats
from delayserver.parts.heartbeats.hot import hot_put
from tests.unit.shards.shards import caller
from tests.world.server import Observer, SimulatedClock, SimulatedServer
from tests.world.storage.catalog import MemoryCatalog
from tests.world.storage.files import SimulatedFiles

BODY = b'{"timeout":"10s","subject":"lost","body":1}'


def test_a_put_makes_a_heartbeat_renews_it_and_is_refused_to_others() -> None:
    surroundings = SimulatedFiles(), MemoryCatalog(), SimulatedClock()
    server = SimulatedServer(Settings(), *surroundings, random.Random(0), Observer())
    put = hot_put(server.calls, Intake(Settings(), {"lost"}, lambda: 0.5))
    made = put("w", BODY, None)
    assert made.status == 201 and made.group is not None
    found = msgspec.json.decode(made.body)
    assert (found["key"], found["timeout"], found["subject"]) == ("w", "10s", "lost")
    assert put("w", BODY, caller("publish:lost")).status == 200
    assert server.engine.part(Heartbeats).renewed_total == 1
    with pytest.raises(InputError):
        put("w", b'{"timeout":"10s"}', None)
    with pytest.raises(AccessError):
        put("w", BODY, caller("publish:other"))
    with pytest.raises(AccessError):  # the heartbeat that it would replace is not its own
        put("w", BODY.replace(b"lost", b"other"), caller("publish:other"))
    while server.turn():
        pass
    server.close()
