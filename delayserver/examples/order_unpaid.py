"""Orders that are not paid in time are closed.

    an order is placed ──▶ publish order.unpaid, due when the time to pay is over, key: the order
    it is paid         ──▶ cancel by that key; "cancelled" means that it never fires
    the message fires  ──▶ it is still unpaid: close the order, give the stock back

The key is the order's number, so a retry cannot create a second message for the same order. The
state of the order alone decides whether it is paid or closed. Here the state stands in a
dictionary; in a real shop it is a row of a database.

    python -m delayserver.examples.order_unpaid --server http://127.0.0.1:8080
"""

import argparse
import asyncio
import contextlib
import random
from collections import Counter
from datetime import timedelta

from delayserver.client import AsyncClient, ConflictError, Message

SUBJECT = "example.order.unpaid"


class Shop:
    """Orders, and the state of each."""

    def __init__(self, client: AsyncClient, pay_within: timedelta) -> None:
        self._client = client
        self._pay_within = pay_within
        self.orders: dict[str, str] = {}
        self.all_decided = asyncio.Event()
        self._undecided = 0

    async def place(self, order: str) -> None:
        """A customer orders. When this returns, the order is certain to be closed in time."""
        self.orders[order] = "waiting for payment"
        self._undecided += 1
        await self._client.messages.publish(
            SUBJECT, {"order": order}, delay=self._pay_within, key=order
        )

    async def pay(self, order: str) -> bool:
        """A customer pays; False when it is too late."""
        if self.orders[order] != "waiting for payment":
            return False
        self._decide(order, "paid")
        # A conflict: it fires just now, and `close` will see that the order is paid.
        with contextlib.suppress(ConflictError):
            await self._client.messages.cancel(subject=SUBJECT, key=order)
        return True

    async def close(self, message: Message) -> None:
        """The time to pay is over. May be called twice for one order, and does no harm then."""
        order = message.body["order"]
        if self.orders.get(order) == "waiting for payment":
            self._decide(order, "closed, unpaid")

    def _decide(self, order: str, state: str) -> None:
        self.orders[order] = state
        self._undecided -= 1
        if not self._undecided:
            self.all_decided.set()


async def run(server: str, token: str | None, orders: int, pay_within_s: float) -> Counter[str]:
    """Place orders, pay half of them, and wait until the others are closed."""
    async with AsyncClient(server, token=token) as client:
        shop = Shop(client, timedelta(seconds=pay_within_s))
        consumer = client.consumer()
        consumer.subscribe(SUBJECT)(shop.close)
        consuming = asyncio.create_task(consumer.run())
        # Numbers that no earlier run of this example has used: a key stays taken for a while.
        first = random.randrange(10**12)
        numbers = [str(first + index) for index in range(orders)]
        await asyncio.gather(*map(shop.place, numbers))
        print(f"{orders} orders were placed")
        paid = await asyncio.gather(*map(shop.pay, numbers[::2]))
        print(f"{sum(paid)} of them were paid")
        decided = asyncio.create_task(shop.all_decided.wait())
        await asyncio.wait((decided, consuming), return_when=asyncio.FIRST_COMPLETED)
        decided.cancel()
        consumer.stop()
        await consuming
    return Counter(shop.orders.values())


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--server", metavar="URL", default="http://127.0.0.1:8080")
    parser.add_argument("--token", default=None)
    parser.add_argument("--orders", type=int, default=1000, metavar="N")
    parser.add_argument("--pay-within", type=float, default=3.0, metavar="SECONDS")
    options = parser.parse_args()
    counts = asyncio.run(run(options.server, options.token, options.orders, options.pay_within))
    for state, count in sorted(counts.items()):
        print(f"{state}: {count}")


if __name__ == "__main__":
    main()
