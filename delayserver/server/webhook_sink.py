"""The sink of webhooks: each request is traced, sent and counted.

Cost: a task of asyncio and the sender's cost, for each request. Threads: belongs to the event
loop.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import msgspec
import structlog

from delayserver.delivery.sink import MayBegin, ResultCallback
from delayserver.delivery.webhook import WebhookSender, webhook_request
from delayserver.records.message import HEADERS_BYTES_MAX, DueDelivery
from delayserver.records.subscriptions import Subscription
from delayserver.records.tracecontext import in_trace
from delayserver.server.metrics import Metrics

if TYPE_CHECKING:
    from delayserver.server.telemetry import Telemetry

log = structlog.get_logger()


class WebhookSink:
    """A `Sink`: deliveries that it gets together are one request, and have one answer."""

    def __init__(
        self,
        sender: WebhookSender,
        clock: Callable[[], int],
        metrics: Metrics,
        telemetry: "Telemetry | None",
    ) -> None:
        self._sender = sender
        self._clock = clock
        self._metrics = metrics
        self._telemetry = telemetry

    async def deliver(
        self,
        subscription: Subscription,
        deliveries: list[DueDelivery],
        may_begin: MayBegin,
        told: ResultCallback,
    ) -> None:
        """See `Sink`."""
        began_ms = self._clock()
        request = webhook_request(subscription, deliveries, began_ms // 1000)
        spans = []
        if self._telemetry is not None:
            begin = self._telemetry.delivery
            spans = [begin("deliver", subscription.name, delivery) for delivery in deliveries]
            if not subscription.batch_max:
                # The receiver belongs to this delivery, which links to the publish.
                headers = in_trace(request.headers, spans[0].trace, max_bytes=HEADERS_BYTES_MAX)
                request = msgspec.structs.replace(request, headers=headers)
        began_at = time.perf_counter()
        response = await self._sender.send(request, partial(may_begin, deliveries))
        took_s = time.perf_counter() - began_at
        if not response.is_withheld:
            self._metrics.on_webhook(subscription.id, response.status, took_s)
        is_taken = response.status is not None and 200 <= response.status < 300
        failure = (
            None
            if is_taken or response.is_withheld
            else response.error or f"HTTP {response.status}"
        )
        for span in spans:
            span.end({"http.response.status_code": response.status or 0}, failure)
        told(deliveries, response.result(began_ms, round(took_s * 1000)))

    def on_subscription(self, subscription: Subscription) -> None:
        """See `Sink`. Idle connections are closed within seconds anyway."""

    async def close(self) -> None:
        """See `Sink`."""
        await self._sender.close()
