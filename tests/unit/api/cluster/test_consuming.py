"""A consumer at any shard gets what is due in all of them, and no lease is stranded."""

from __future__ import annotations

from tests.unit.api.cluster.linked import World


def ids_of(messages: list[dict]) -> set[str]:
    return {one["id"] for one in messages}


def test_a_consumer_gets_what_falls_due_elsewhere() -> None:
    world = World()

    async def test() -> None:
        consumer = world.pull(0)
        await world.settle()
        due = world.publish(2, delay_ms=5000)
        await world.move(4900)
        assert not consumer.answers
        await world.move(100)
        assert ids_of(consumer.messages) == {due}
        [lease] = consumer.leases
        assert lease[8:].startswith("2-")
        assert await world.ack(0, [lease]) == {"acked": 1, "expired": []}
        assert await world.ack(1, [lease]) == {"acked": 0, "expired": [lease]}
        assert await world.available(at=1) == []
        world.check_nothing_is_left()

    world.run(test())
