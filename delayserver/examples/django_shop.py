"""A shop on Django, in one file: an order that nobody pays within half an hour is cancelled.

    POST /orders          ──▶ publish shop.order.unpaid, due in 30 minutes, key: the order; then
                              the row
    POST /orders/ID/pay   ──▶ the row is paid; the message is cancelled
    GET /orders/ID
    consume               ──▶ the message fires: cancel the order, if it is still unpaid

The message comes first, then the row. A process that dies in between leaves a message about an
order that does not exist, and that message does nothing. The other way round it would leave an
order that is never cancelled. One UPDATE of the database decides whether the payment or the message
comes first.

Three commands, each in a terminal of its own but the first:

    python -m delayserver.examples.django_shop migrate
    python -m delayserver.examples.django_shop runserver 127.0.0.1:8000
    python -m delayserver.examples.django_shop consume

    curl -X POST http://127.0.0.1:8000/orders

The environment says where things are: DELAYSERVER_URL (http://127.0.0.1:8080), DELAYSERVER_TOKEN,
SHOP_DATABASE (shop.sqlite3), SHOP_PAY_WITHIN (30m).
"""

import contextlib
import logging
import os
import secrets
import sys
import uuid
from collections.abc import Iterator

import django
from django.conf import settings
from django.core.management import execute_from_command_line
from django.db import close_old_connections, connection, models
from django.http import HttpRequest, JsonResponse
from django.shortcuts import get_object_or_404
from django.urls import path
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.http import require_GET, require_POST

from delayserver.client import Client, ClientError, Message

SUBJECT = "shop.order.unpaid"
URL = os.environ.get("DELAYSERVER_URL", "http://127.0.0.1:8080")
TOKEN = os.environ.get("DELAYSERVER_TOKEN")
PAY_WITHIN = os.environ.get("SHOP_PAY_WITHIN", "30m")

settings.configure(
    ALLOWED_HOSTS=["127.0.0.1", "localhost"],
    DATABASES={
        "default": {
            "ENGINE": "django.db.backends.sqlite3",
            "NAME": os.environ.get("SHOP_DATABASE", "shop.sqlite3"),
        }
    },
    DEBUG=False,
    ROOT_URLCONF=__name__,
    SECRET_KEY=secrets.token_hex(),
    USE_TZ=True,
)
django.setup()
log = logging.getLogger("shop")
client = Client(URL, token=TOKEN)
"""One for all threads of a process; it may be made before a fork."""


class ShopOrder(models.Model):
    """An order of a customer."""

    class Meta:
        app_label = "shop"

    class Payment(models.TextChoices):
        """The states of an order."""

        WAITING = "waiting for payment"
        PAID = "paid"
        CANCELLED = "cancelled, unpaid"

    id = models.UUIDField(primary_key=True)
    state = models.CharField(max_length=20, choices=Payment, default=Payment.WAITING)

    def document(self) -> dict[str, str]:
        """As it is shown."""
        return {"id": str(self.id), "state": self.state}


def decide(order: str, state: str) -> bool:
    """Give a waiting order its final state, once; False: another caller gave it one before."""
    waiting = ShopOrder.objects.filter(pk=order, state=ShopOrder.Payment.WAITING)
    return bool(waiting.update(state=state))


# ── the shop ───────────────────────────────────────────────────────────────────────────────────


@csrf_exempt  # no cookie says who calls
@require_POST
def place(request: HttpRequest) -> JsonResponse:
    """A customer orders. After this answer the order is certain to be cancelled in time."""
    order = uuid.uuid4()
    client.messages.publish(SUBJECT, {"order": str(order)}, delay=PAY_WITHIN, key=str(order))
    return JsonResponse(ShopOrder.objects.create(id=order).document(), status=201)


@require_GET
def show(request: HttpRequest, order: uuid.UUID) -> JsonResponse:
    """An order."""
    return JsonResponse(get_object_or_404(ShopOrder, pk=order).document())


@csrf_exempt
@require_POST
def pay(request: HttpRequest, order: uuid.UUID) -> JsonResponse:
    """A customer pays; 409 when it is too late."""
    get_object_or_404(ShopOrder, pk=order)
    if not decide(str(order), ShopOrder.Payment.PAID):
        return JsonResponse({"error": "it is paid or cancelled already"}, status=409)
    # The order is paid, so the message does no harm if it fires just now or cannot be cancelled.
    try:
        client.messages.cancel(subject=SUBJECT, key=str(order), timeout_s=5)
    except ClientError as error:
        log.info("the message of order %s is not cancelled: %s", order, error)
    return JsonResponse(ShopOrder.objects.get(pk=order).document())


urlpatterns = [
    path("orders", place),
    path("orders/<uuid:order>", show),
    path("orders/<uuid:order>/pay", pay),
]


# ── the consumer ───────────────────────────────────────────────────────────────────────────────


@contextlib.contextmanager
def fresh_connections(message: Message) -> Iterator[None]:
    """Django closes old connections around each request, but not around a handler; this does."""
    close_old_connections()
    try:
        yield
    finally:
        close_old_connections()


def consume() -> None:
    """Cancel orders that were not paid in time, until SIGTERM or ctrl-C."""
    consumer = client.consumer(concurrency=4, around=fresh_connections)

    @consumer.subscribe(SUBJECT)
    def cancel(message: Message) -> None:
        """May be called twice for one order, and does no harm then."""
        order = message.body["order"]
        if decide(order, ShopOrder.Payment.CANCELLED):
            print(f"{order} is cancelled", flush=True)

    consumer.run()


def migrate() -> None:
    """Make the table, unless it is there; a project of several files has migrations."""
    if ShopOrder._meta.db_table not in connection.introspection.table_names():
        with connection.schema_editor() as editor:
            editor.create_model(ShopOrder)


def main() -> None:
    """The command line: ours, and that of Django."""
    match sys.argv[1:]:
        case [] | ["-h" | "--help"]:
            print(__doc__)
        case ["migrate"]:
            migrate()
        case ["consume"]:
            consume()
        case ["runserver", *arguments]:
            # The reloader starts a file, and this is a module.
            execute_from_command_line(["django_shop", "runserver", "--noreload", *arguments])
        case arguments:
            execute_from_command_line(["django_shop", *arguments])


if __name__ == "__main__":
    main()
