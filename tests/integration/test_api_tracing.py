"""A trace goes from who publishes to who receives, whatever lies between them."""

import gzip
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.integration.api_support import unique

PARENT = f"00-{'a' * 32}-{'b' * 16}-01"
OTHER = f"00-{'a' * 32}-{'c' * 16}-01"
CONTEXT = {"traceparent": PARENT, "tracestate": "shop=1,other=2"}


@pytest.fixture
def subject():
    return unique("trace")


def test_a_webhook_carries_it_and_a_pull_shows_it(shared_api, receiver, subject):
    api = shared_api
    hook = receiver.hook(500, 200)
    api.subscribe(unique("hook"), subject, url=hook, retry={"backoff": ["1ms"]})
    path = api.subscribe(unique("pull"), subject)
    document = {"subject": subject, "headers": {"x-shop": "7"}}
    answer = api.post("/v1/messages", json=document, headers=CONTEXT)
    for _ in range(2):  # the retry as well
        received = receiver.next(hook)
        assert received.headers.items() >= {**CONTEXT, "x-shop": "7"}.items()
    (pulled,) = api.pull(path)
    assert pulled["headers"] == {**CONTEXT, "x-shop": "7"}
    assert api.look_up(answer.json()["id"])["headers"] == pulled["headers"]


def test_a_message_with_a_trace_of_its_own_keeps_it(shared_api, subject):
    api = shared_api
    path = api.subscribe(unique("pull"), subject)
    document = {"subject": subject, "headers": {"traceparent": OTHER}}
    api.post("/v1/messages", json=document, headers=CONTEXT).raise_for_status()
    api.post("/v1/messages", json={"subject": subject}, headers={"traceparent": "x"})
    batch = [{"subject": subject}] * 2
    api.post("/v1/messages/batch", json=batch, headers=CONTEXT).raise_for_status()
    api.put(f"/v1/subjects/{subject}/keys/k", headers=CONTEXT).raise_for_status()
    got = [message["headers"] for message in api.pull_all(path, 5)]
    assert got == [{"traceparent": OTHER}, {}, CONTEXT, CONTEXT, CONTEXT]


def test_a_retry_of_the_publisher_is_no_conflict_also_after_a_restart(make_api, subject):
    api = make_api()
    api.start()
    document = {"subject": subject, "key": "k", "body": 1, "delay": "1h"}
    first = api.post("/v1/messages", json=document, headers=CONTEXT)
    assert first.status_code == 201
    for step in (
        lambda: None,
        lambda: api.restart(kill=True),
        lambda: api.ask("GET", "/v1/forecast"),
        api.restart,
    ):
        step()
        for headers in (CONTEXT, {"traceparent": OTHER}, {}):
            again = api.post("/v1/messages", json=document, headers=headers)
            assert (again.status_code, again.json()["id"]) == (200, first.json()["id"])
        other = api.post("/v1/messages", json={**document, "body": 2}, headers=CONTEXT)
        assert other.status_code == 409
    assert api.look_up(first.json()["id"])["headers"] == CONTEXT


# ---- spans ---------------------------------------------------------------------------------------


class Collector:
    """Takes spans over OTLP, as any backend for traces does."""

    def __init__(self):
        self.spans: list[Any] = []
        spans = self.spans

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                data = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    data = gzip.decompress(data)
                request = ExportTraceServiceRequest.FromString(data)
                for resource in request.resource_spans:
                    for scope in resource.scope_spans:
                        spans.extend(scope.spans)
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, format, *arguments):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1/traces"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()

    def close(self):
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def named(self, name):
        return [span for span in self.spans if span.name == name]


@pytest.fixture
def collector(monkeypatch):
    collector = Collector()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", collector.url)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    yield collector
    collector.close()


def attributes(span):
    return {
        one.key: one.value.int_value if one.value.HasField("int_value") else one.value.string_value
        for one in span.attributes
    }


def test_spans_of_publish_and_delivery_are_linked(make_api, receiver, collector, subject):
    api = make_api()
    api.process.options = ["--otel"]
    api.process.start()
    api.process.wait_ready()
    hook = receiver.hook(500, 200)
    api.subscribe("hook", subject, url=hook, retry={"backoff": ["1ms"]})
    path = api.subscribe("pull", subject)
    published = api.post("/v1/messages", json={"subject": subject}, headers=CONTEXT).json()
    received = [receiver.next(hook) for _ in range(2)]
    (pulled,) = api.pull(path)
    api.post("/v1/messages", content=b"{")
    assert api.process.stop() == 0  # which sends what there is

    good, bad = collector.named("publish")
    assert good.trace_id.hex() == "a" * 32
    assert good.parent_span_id.hex() == "b" * 16
    assert attributes(good)["messaging.message.id"] == published["id"]
    assert attributes(bad)["http.response.status_code"] == 422
    assert bad.status.code == bad.status.STATUS_CODE_ERROR
    assert pulled["headers"]["traceparent"] == f"00-{'a' * 32}-{good.span_id.hex()}-01"

    deliveries = collector.named(f"deliver {subject}")
    (receive,) = collector.named(f"receive {subject}")
    assert [attributes(span)["delayserver.attempt"] for span in deliveries] == [1, 2]
    assert deliveries[0].status.code == deliveries[0].status.STATUS_CODE_ERROR
    assert deliveries[1].status.code == deliveries[1].status.STATUS_CODE_UNSET
    for span in (*deliveries, receive):
        (link,) = span.links
        assert (link.trace_id, link.span_id) == (good.trace_id, good.span_id)
        assert span.trace_id != good.trace_id
        assert attributes(span)["messaging.message.id"] == published["id"]
    for request, span in zip(received, deliveries, strict=True):
        carried = request.headers["traceparent"]
        assert carried.startswith(f"00-{span.trace_id.hex()}-{span.span_id.hex()}-")
        assert "tracestate" not in request.headers


def test_a_collector_that_is_down_costs_the_server_nothing(make_api, monkeypatch, subject):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://127.0.0.1:9/v1/traces")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    api = make_api()
    api.process.options = ["--otel"]
    api.process.start()
    api.process.wait_ready()
    path = api.subscribe("pull", subject)
    for _ in range(3):
        api.publish(subject)
    api.pull_all(path, 3)
    assert api.process.stop() == 0
