"""Red envelopes that are not opened in time are refunded.

    an envelope is sent   ──▶ publish envelope.refund, due in 24 hours, key: the envelope
    a friend opens it     ──▶ it is theirs; the refund is cancelled
    the message fires     ──▶ the money goes back to the sender

This example runs without asyncio: `Client` is for threads. A refund that fails
for the moment is tried again later (`Retry`). A refund that comes twice is done once, since an
envelope is taken out of the books by its number.

    python -m delayserver.examples.red_envelope_refund --server http://127.0.0.1:8080
"""

import argparse
import contextlib
import random
import threading
import time
from datetime import timedelta

from delayserver.client import Client, ConflictError, Message, Retry

SUBJECT = "example.envelope.refund"


class Wallet:
    """Envelopes and refunds. A database would do what the lock does here."""

    def __init__(self, client: Client, open_within: timedelta) -> None:
        self._client = client
        self._open_within = open_within
        self._lock = threading.Lock()
        self._unopened: dict[str, int] = {}
        self.opened_cents = 0
        self.refunded_cents = 0
        self.bank_is_busy = True

    @property
    def unopened(self) -> int:
        """Envelopes that are neither opened nor refunded."""
        return len(self._unopened)

    def send(self, envelope: str, cents: int) -> None:
        """A user sends an envelope. When this returns, its refund is certain."""
        with self._lock:
            self._unopened[envelope] = cents
        body = {"envelope": envelope, "cents": cents}
        self._client.messages.publish(SUBJECT, body, delay=self._open_within, key=envelope)

    def open(self, envelope: str) -> int:
        """A user opens an envelope; the cents in it, 0 when it is too late."""
        with self._lock:
            cents = self._unopened.pop(envelope, 0)
            self.opened_cents += cents
        if cents:
            # A conflict: it fires just now, and `refund` will find nothing to do.
            with contextlib.suppress(ConflictError):
                self._client.messages.cancel(subject=SUBJECT, key=envelope)
        return cents

    def refund(self, message: Message) -> None:
        """The time is over: the money goes back, once."""
        if self.bank_is_busy:
            self.bank_is_busy = False
            raise Retry(timedelta(milliseconds=200))
        with self._lock:
            self.refunded_cents += self._unopened.pop(message.body["envelope"], 0)


def run(server: str, token: str | None, envelopes: int, open_within_s: float) -> Wallet:
    """Send envelopes, open a third of them, and wait until the others are refunded."""
    with Client(server, token=token) as client:
        wallet = Wallet(client, timedelta(seconds=open_within_s))
        consumer = client.consumer(concurrency=8)
        consumer.subscribe(SUBJECT)(wallet.refund)
        consuming = threading.Thread(target=consumer.run)
        consuming.start()
        try:
            first = random.randrange(10**12)
            numbers = [str(first + index) for index in range(envelopes)]
            for number in numbers:
                wallet.send(number, cents=888)
            print(f"{envelopes} envelopes were sent")
            opened = sum(wallet.open(number) > 0 for number in numbers[::3])
            print(f"{opened} of them were opened")
            while wallet.unopened and consuming.is_alive():
                time.sleep(0.05)
        finally:
            consumer.stop()
            consuming.join()
    return wallet


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--server", metavar="URL", default="http://127.0.0.1:8080")
    parser.add_argument("--token", default=None)
    parser.add_argument("--envelopes", type=int, default=300, metavar="N")
    parser.add_argument("--open-within", type=float, default=3.0, metavar="SECONDS")
    options = parser.parse_args()
    wallet = run(options.server, options.token, options.envelopes, options.open_within)
    print(f"opened: {wallet.opened_cents / 100:.2f}, refunded: {wallet.refunded_cents / 100:.2f}")


if __name__ == "__main__":
    main()
