"""Tasks of Celery that come onto a real RabbitMQ."""

from typing import Any

import kombu

from tests.integration.celery_support import RabbitMQ, Shop
from tests.waiting import wait_until


def test_it_has_confirmed_a_task_and_had_a_queue_for_it(shared_api, tmp_path):
    broker = RabbitMQ(tmp_path)
    shop = Shop(tmp_path, shared_api.process.url, broker.url)
    try:
        broker.until_there()
        forwarder = shop.forwarder()
        first = shop.send(10)
        wait_until(lambda: shop.states(shared_api, first) == {"delivered"})
        with kombu.Connection(broker.url) as connection:
            queue: Any = kombu.Queue("shop")(connection.default_channel)
            assert queue.queue_declare(passive=True).message_count == 10
            # It is gone behind the back of who forwards, and RabbitMQ would drop what is due.
            queue.delete()
            second = shop.send(5)
            wait_until(lambda: shop.states(shared_api, second) == {"delivered"})
            assert queue.queue_declare(passive=True).message_count == 5
        assert "NO_ROUTE" in forwarder.log
        assert forwarder.stop() == 0
    finally:
        shop.end()
        broker.kill()
