"""Spans for OpenTelemetry (the extra `otel`): one for each publish, one for each delivery.

    client's span ──parent──▶ publish ──stored with the message──▶ … ──link──▶ deliver, receive

A delivery may come days after its publish, so it is a trace of its own that links to the other
one; a webhook carries the delivery's context, and its receiver belongs to that trace. Where the
spans go to is said by the usual variables (OTEL_EXPORTER_OTLP_ENDPOINT, OTEL_SERVICE_NAME, …).

Cost: nothing where it is off, for then nobody imports this; 30 µs per span where it is on.
Threads: spans belong to the event loop; a thread of the library sends them.
"""

import os
from collections.abc import Mapping
from typing import Final

import delayserver
from delayserver.errors import InputError
from delayserver.records.message import DueDelivery
from delayserver.records.tracecontext import Trace

try:
    from opentelemetry import trace as api
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
except ImportError as error:
    raise InputError(
        f"OpenTelemetry is not installed ({error}): install the extra `otel` of this package, or "
        "leave --otel away"
    ) from error

SYSTEM: Final = "delayserver"
_context = TraceContextTextMapPropagator()


def provider_of_environment() -> TracerProvider:
    """Sends spans as the variables OTEL_… say, OTLP over HTTP."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    named = "OTEL_SERVICE_NAME" in os.environ
    resource = Resource.create({} if named else {"service.name": SYSTEM})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider


class Span:
    """Something that has begun. `trace`: it goes along with the message from here on."""

    def __init__(self, span: api.Span) -> None:
        self._span = span
        carrier: dict[str, str] = {}
        _context.inject(carrier, api.set_span_in_context(span))
        self.trace: Trace = carrier

    def end(self, attributes: Mapping[str, str | int], failure: str | None = None) -> None:
        """It is over; `failure` says why it was in vain."""
        self._span.set_attributes(dict(attributes))
        if failure is not None:
            self._span.set_status(api.StatusCode.ERROR, failure)
        self._span.end()


class Telemetry:
    """Makes the spans of a server."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer(SYSTEM, delayserver.__version__)

    def publish(self, trace: Trace | None) -> Span:
        """A publish begins, in the span of the client that calls."""
        parent = _context.extract(dict(trace)) if trace else None
        attributes = _attributes("publish", "send")
        return Span(
            self._tracer.start_span(
                "publish", context=parent, kind=api.SpanKind.PRODUCER, attributes=attributes
            )
        )

    def delivery(self, name: str, subscription: str, delivery: DueDelivery) -> Span:
        """A delivery begins: `deliver` to a webhook, `receive` by a consumer."""
        stored = _context.extract(delivery.payload.headers or {})
        linked = api.get_current_span(stored).get_span_context()
        attributes = {
            **_attributes(name, "send" if name == "deliver" else "receive"),
            "messaging.destination.name": delivery.subject,
            "messaging.destination.subscription.name": subscription,
            "messaging.message.id": delivery.message_id,
            "delayserver.attempt": delivery.attempt,
            "delayserver.due_ms": delivery.origin.due_ms,
        }
        return Span(
            self._tracer.start_span(
                f"{name} {delivery.subject}",
                context=api.set_span_in_context(api.INVALID_SPAN),
                kind=api.SpanKind.CONSUMER,
                attributes=attributes,
                links=[api.Link(linked)] if linked.is_valid else [],
            )
        )

    def close(self) -> None:
        """Send the spans that wait; returns when they are sent."""
        self._provider.shutdown()


def _attributes(name: str, kind: str) -> dict[str, str | int]:
    return {
        "messaging.system": SYSTEM,
        "messaging.operation.name": name,
        "messaging.operation.type": kind,
    }
