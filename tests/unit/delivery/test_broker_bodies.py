"""Bytes on their way to brokers are bounded, and one that hangs leaves room for others."""

from delayserver.delivery.broker_bodies import BrokerBodies
from delayserver.records.subscriptions import RedisTarget
from tests.unit.delivery.parts import Parts, webhook
from tests.unit.fakes import START_MS, subscription


def test_one_gets_half_and_the_next_one_half_of_the_rest() -> None:
    bodies = BrokerBodies(1000)
    while (room := bodies.room(1)) > 0:
        bodies.take(1, min(room, 100))
    assert bodies.under_way_bytes == 500
    while (room := bodies.room(2)) > 0:
        bodies.take(2, min(room, 10))
    assert bodies.under_way_bytes == 750 and bodies.room(3) == 250
    bodies.give_back(1, 500)
    assert bodies.room(1) == 750


def test_one_message_always_has_room() -> None:
    bodies = BrokerBodies(1000)
    bodies.take(1, 5000)
    assert (bodies.room(1), bodies.room(2)) == (0, 1)
    bodies.take(2, 5000)
    assert bodies.room(2) == 0
    for number in (1, 2):
        bodies.give_back(number, 5000)
    assert bodies.under_way_bytes == 0 and bodies.room(1) == 1000


def test_a_queue_keeps_what_has_no_room() -> None:
    broker = subscription(1, type="redis", target=RedisTarget("redis://h", "s"), max_in_flight=100)
    other = webhook(2)
    bodies = BrokerBodies(1000)
    parts = Parts(broker, other, broker_room=bodies.room)
    parts.fire(*((seq, START_MS) for seq in range(1, 21)), payload_bytes=100)
    handouts = {one.subscription_id: one.count for one in parts.ports.handouts}
    # A webhook is bounded by its requests.
    assert handouts == {1: 10, 2: 20}
    assert len(parts.waiting(broker)) == 10
    bodies.take(1, 1000)
    parts.dispatcher.pump.run(parts.dispatcher.queues.of(broker), START_MS)
    assert len(parts.waiting(broker)) == 10
