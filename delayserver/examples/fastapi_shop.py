"""A shop on FastAPI: an order that is not paid in time is cancelled, by a signed webhook.

    POST /orders          ──▶ publish shop.order.late, due in 30 minutes, key: the order
    POST /orders/ID/pay   ──▶ paid; the message is cancelled
    GET /orders/ID
    POST /hooks/late      ◀── the delay server, when the message fires: cancel the order

The receiver of the webhook checks its signature, since everybody can reach the address. It answers
2xx when it is done; after any other answer the webhook comes again. At its start the shop
subscribes, with a secret that it shares with the delay server. SHOP_SECRET holds the secret;
without it the shop draws one, which works for one process alone. Orders stand in a dictionary here;
a real shop keeps them in a database.

The delay server calls no address that it is not allowed to call (`--webhook-targets`; loopback by
default).

    python -m delayserver.examples.fastapi_shop --server http://127.0.0.1:8080 --port 8000
    curl -X POST http://127.0.0.1:8000/orders
"""

import argparse
import base64
import contextlib
import os
import secrets
import uuid
from collections.abc import AsyncIterator

import uvicorn
from fastapi import FastAPI, HTTPException, Request

from delayserver.client import (
    AsyncClient,
    ConflictError,
    NotFoundError,
    SignatureError,
    verify_webhook,
)

SUBJECT = "shop.order.late"
NAME = "shop-late"
WAITING, PAID, CANCELLED = "waiting for payment", "paid", "cancelled, unpaid"


def make_app(server: str, token: str | None, own_url: str, secret: str, pay_within: str) -> FastAPI:
    """The shop, which the delay server reaches at `own_url`."""
    client = AsyncClient(server, token=token)
    orders: dict[str, str] = {}

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with client:
            url = f"{own_url}/hooks/late"
            await client.subscriptions.put_webhook(NAME, SUBJECT, url, secret=secret)
            yield

    app = FastAPI(title="Shop", lifespan=lifespan)

    def document(order: str) -> dict[str, str]:
        if order not in orders:
            raise HTTPException(404, "there is no such order")
        return {"id": order, "state": orders[order]}

    @app.post("/orders", status_code=201)
    async def place() -> dict[str, str]:
        """A customer orders. When this is answered, the order is cancelled in time."""
        order = str(uuid.uuid4())
        await client.messages.publish(SUBJECT, {"order": order}, delay=pay_within, key=order)
        orders[order] = WAITING
        return document(order)

    @app.get("/orders/{order}")
    async def show(order: str) -> dict[str, str]:
        """An order."""
        return document(order)

    @app.post("/orders/{order}/pay")
    async def pay(order: str) -> dict[str, str]:
        """A customer pays."""
        if document(order)["state"] != WAITING:
            raise HTTPException(409, "it is paid or cancelled already")
        orders[order] = PAID
        # A conflict: it fires just now, and the hook will see that the order is paid.
        with contextlib.suppress(ConflictError, NotFoundError):
            await client.messages.cancel(subject=SUBJECT, key=order)
        return document(order)

    @app.post("/hooks/late", status_code=204)
    async def late(request: Request) -> None:
        """The time to pay is over. May come twice for one order, and does no harm then."""
        try:
            verify_webhook(request.headers, await request.body(), secret)
        except SignatureError as error:
            raise HTTPException(401, str(error)) from error
        order = (await request.json())["order"]
        if orders.get(order) == WAITING:
            orders[order] = CANCELLED

    return app


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--server", metavar="URL", default="http://127.0.0.1:8080")
    parser.add_argument("--token", default=None)
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--pay-within", default="30m", metavar="DURATION")
    options = parser.parse_args()
    drawn = "whsec_" + base64.b64encode(secrets.token_bytes(32)).decode()
    secret = os.environ.get("SHOP_SECRET", drawn)
    own_url = f"http://127.0.0.1:{options.port}"
    app = make_app(options.server, options.token, own_url, secret, options.pay_within)
    uvicorn.run(app, host="127.0.0.1", port=options.port, log_level="warning")


if __name__ == "__main__":
    main()
