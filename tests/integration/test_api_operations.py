"""What operators look at, who may call, and that the store's limits and its clock are respected."""

import json
import re
import socket

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.integration.api_support import now_ms, time_ms, unique
from tests.waiting import wait_until

TOKEN = "correct horse battery staple"
HOUR_MS = 3_600_000


@pytest.fixture
def subject():
    return unique("operations")


# ---- what there is to see ----------------------------------------------------------------------


def test_the_server_is_alive_and_ready(shared_api):
    assert shared_api.ask("GET", "/healthz") == {"status": "ok"}
    assert shared_api.ask("GET", "/readyz") == {"status": "ready"}


def test_stats_and_metrics_count(shared_api, subject):
    api = shared_api
    path = api.subscribe(unique("consumer"), subject)

    before = api.ask("GET", "/v1/stats")
    published = [api.publish(subject, delay=delay) for delay in (0, "1h", "1h")]
    api.ask("DELETE", f"/v1/messages/{published[1]['id']}")
    api.pull_all(path, 1)
    after = api.ask("GET", "/v1/stats")
    changes = {name: after[name] - before[name] for name in ("accepted", "cancelled", "delivered")}
    assert changes == {"accepted": 3, "cancelled": 1, "delivered": 1}
    assert after["oldest_due_at"] is None or time_ms(after["oldest_due_at"]) <= now_ms()
    assert time_ms(after["started_at"]) <= now_ms()
    assert after["subscriptions"] == len(api.ask("GET", "/v1/subscriptions")["subscriptions"])
    assert api.get("/metrics").headers["content-type"].startswith("text/plain; version=")


def metrics_of(api):
    """All samples of the server's own metrics, by name and labels."""
    samples = {}
    for family in text_string_to_metric_families(api.get("/metrics").text):
        assert family.documentation
        for sample in family.samples:
            samples[sample.name, tuple(sorted(sample.labels.items()))] = sample.value
    return samples


def test_what_a_message_goes_through_is_counted_by_its_subject(make_api, receiver):
    api = make_api(metrics_subjects_max=2)
    api.start()
    hook = receiver.hook(500)
    path = api.subscribe("pulls", "one.*")
    retry = {"max_attempts": 2, "backoff": ["1ms"]}
    api.subscribe("fails", "one.b", url=hook, retry=retry)
    for subject in ("one.a", "one.b", "one.c", "one.d"):
        api.publish(subject)
    later = api.publish("one.a", delay="10d", key="k")
    api.publish("one.a", delay="10d")
    api.ask("DELETE", "/v1/subjects/one.a/keys/k")
    api.pull_all(path, 4)
    receiver.next(hook)
    receiver.next(hook)

    def total(name, subject):
        return metrics_of(api).get((f"delayserver_{name}_total", (("subject", subject),)), 0)

    wait_until(lambda: total("dead", "one.b") == 1)
    assert later["id"]
    assert [total("accepted", name) for name in ("one.a", "one.b", "_other")] == [3, 1, 2]
    assert [total("delivered", name) for name in ("one.a", "one.b", "_other")] == [1, 1, 2]
    assert total("cancelled", "one.a") == 1
    assert total("retried", "one.b") == 1
    samples = metrics_of(api)

    def of_subscription(name, subscription, **labels):
        pairs = sorted({"subscription": subscription, **labels}.items())
        return samples.get((f"delayserver_{name}", tuple(pairs)), 0)

    for subscription, delivered, retried, dead, handed in (
        ("pulls", 4, 0, 0, 4),
        ("fails", 0, 1, 1, 2),
    ):
        assert of_subscription("subscription_delivered_total", subscription) == delivered
        assert of_subscription("subscription_retried_total", subscription) == retried
        assert of_subscription("subscription_dead_total", subscription) == dead
        assert of_subscription("subscription_lateness_seconds_count", subscription) == handed
    assert of_subscription("webhook_answers_total", "fails", status="5xx") == 2
    assert of_subscription("webhook_seconds_count", "fails") == 2
    lateness = "delayserver_delivery_lateness_seconds_count"
    assert samples[lateness, ()] == 6
    api.ask("GET", "/v1/forecast")  # after a checkpoint all is filed
    samples = metrics_of(api)
    assert samples["delayserver_pending_later_messages", ()] == 1
    assert samples["delayserver_replay_lag_seconds", ()] >= 0
    assert samples["delayserver_disk_free_bytes", ()] > 0
    assert samples["delayserver_oldest_due_age_seconds", ()] == 0
    for log in ("messages", "schedule", "dispatch"):
        assert samples["delayserver_fsync_seconds_count", (("log", log),)] > 0
    assert samples["process_resident_memory_bytes", ()] > 0
    assert any(name == "delayserver_build_info" for name, _ in samples)


def test_requests_are_counted_by_status_whichever_way_they_are_served(make_api):
    api = make_api(token="t" * 16)
    api.start()
    api.headers["authorization"] = "Bearer " + "t" * 16
    for way in ("", "?ack=durable"):
        message = {"subject": "a", "body": 1}
        answer = api.post(f"/v1/messages{way}", json=message)
        assert answer.status_code == 201, answer.text
        assert api.post(f"/v1/messages{way}", json={"subject": 1}).status_code == 422
        for headers in ({"authorization": "Bearer wrong"}, {"authorization": ""}):
            assert api.post(f"/v1/messages{way}", json=message, headers=headers).status_code == 401
    counts = {
        labels[0][1]: count
        for (name, labels), count in metrics_of(api).items()
        if name == "delayserver_requests_total"
    }
    assert (counts["201"], counts["422"], counts["401"]) == (2, 2, 4)


def test_the_oldest_that_waits_is_seen(api, subject):
    api.subscribe("nobody", subject)
    published = api.publish(subject)
    wait_until(lambda: metrics_of(api)["delayserver_oldest_due_age_seconds", ()] > 0)
    samples = metrics_of(api)
    assert samples["delayserver_queued_deliveries", ()] == 1
    nobody = (("subscription", "nobody"),)
    assert samples["delayserver_subscription_queued_deliveries", nobody] == 1
    assert samples["delayserver_subscription_oldest_due_age_seconds", nobody] > 0
    assert samples["delayserver_subscription_in_flight_deliveries", nobody] == 0
    assert samples["delayserver_pending_deliveries", ()] == 1
    stats = api.ask("GET", "/v1/stats")
    assert stats["oldest_due_at"] == published["deliver_at"]
    assert (stats["queued"], stats["in_flight"]) == (1, 0)
    api.publish(unique("unmatched"))
    wait_until(lambda: metrics_of(api)["delayserver_unmatched_messages", ()] == 1)


def log_lines(api, event):
    return [one for one in map(json.loads, api.log.splitlines()) if one["event"] == event]


def test_a_line_of_the_log_about_a_message_names_it(make_api, receiver, subject):
    api = make_api()
    api.process.options = ["--log-json", "--log-level=debug"]
    api.process.start()
    api.process.wait_ready()
    retry = {"max_attempts": 2, "backoff": ["1ms"]}
    api.subscribe("fails", subject, url=receiver.hook(500, 502), retry=retry)
    published = api.publish(subject, key="k")
    wait_until(lambda: log_lines(api, "dead letter"))
    (line,) = log_lines(api, "dead letter")
    about = {
        "message_id": published["id"],
        "subject": subject,
        "key": "k",
        "subscription": "fails",
    }
    assert line.items() >= {**about, "attempt": 2, "level": "warning"}.items()
    assert "502" in line["reason"]
    failures = log_lines(api, "a delivery failed")
    assert [one["error"] for one in failures] == ["HTTP 500", "HTTP 502"]
    assert all(one.items() >= about.items() for one in failures)


def test_what_libraries_log_is_json_too(make_api):
    api = make_api()
    api.process.options = ["--log-json"]
    api.process.start()
    api.process.wait_ready()
    with socket.create_connection(("127.0.0.1", api.process.port)) as wire:
        wire.sendall(b"garbage\r\n\r\n")
        wait_until(lambda: log_lines(api, "Invalid HTTP request received."))
    (line,) = log_lines(api, "Invalid HTTP request received.")
    assert line["logger"] == "uvicorn.error"


def test_the_forecast_counts_what_is_to_come_without_what_was_cancelled(shared_api, subject):
    api = shared_api
    at_ms = (now_ms() // HOUR_MS + 1000) * HOUR_MS
    batch = [{"subject": subject, "deliver_at": at_ms + n} for n in range(5)]
    ids = api.ask("POST", "/v1/messages/batch", json=batch)["ids"]
    api.ask("DELETE", f"/v1/messages/{ids[0]}")
    answer = api.ask("GET", "/v1/forecast")
    assert answer["bucket"] == "1h"
    assert {time_ms(one["from"]): one["count"] for one in answer["buckets"]}[at_ms] == 4
    days = api.ask("GET", "/v1/forecast?bucket=1d")["buckets"]
    assert sum(day["count"] for day in days) == sum(one["count"] for one in answer["buckets"])
    for bucket in ("x", "90m", "0", "1s"):
        problem = api.ask("GET", f"/v1/forecast?bucket={bucket}", 422)
        assert [error["pointer"] for error in problem["errors"]] == ["/bucket"]


def test_the_forecast_counts_no_message_that_was_delivered(api, subject):
    path = api.subscribe("forecast", subject)
    at_ms = (now_ms() // HOUR_MS + 1000) * HOUR_MS
    api.publish(subject)
    gone = api.publish(subject, deliver_at=at_ms)
    api.ask("DELETE", f"/v1/messages/{gone['id']}")

    def counts():
        return [one["count"] for one in api.ask("GET", "/v1/forecast")["buckets"]]

    assert counts() == [1]
    api.pull_all(path, 1)
    wait_until(lambda: counts() == [])


def test_documentation_is_served(shared_api):
    page = shared_api.get("/docs").text
    assert "https://" not in page and "http://" not in page
    for path in re.findall(r'(?:src|href)="([^"]+)"', page):
        if not path.startswith("data:"):
            packed = shared_api.get(f"/{path}")
            assert packed.headers["content-encoding"] == "gzip"
            plain = shared_api.get(f"/{path}", headers={"accept-encoding": "identity"})
            assert "content-encoding" not in plain.headers
            assert plain.content == packed.content and len(plain.content) > 100_000
    assert "openapi.json" in page
    assert shared_api.ask("GET", "/openapi.json")["openapi"].startswith("3.1")


def test_a_long_answer_is_compressed_for_who_takes_that(either_api, subject):
    """A list over all shards too; never what a consumer pulls."""
    api = either_api
    due = {"deliver_at": now_ms() + 3_600_000, "subject": subject}
    batch = [{**due, "body": f"{n} " * 20} for n in range(40)]
    api.post("/v1/messages/batch", json=batch).raise_for_status()
    for path in (f"/v1/subjects/{subject}/messages", "/metrics", "/openapi.json"):
        plain = api.get(path, headers={"accept-encoding": "identity"})
        packed = api.get(path, headers={"accept-encoding": "gzip"})
        assert "content-encoding" not in plain.headers
        assert packed.headers["content-encoding"] == "gzip"
        assert int(packed.headers["content-length"]) < len(plain.content) / 2
        if path != "/metrics":
            assert packed.content == plain.content
        assert {plain.headers["vary"], packed.headers["vary"]} == {"accept-encoding"}
        timing = r"app;dur=\d+\.\d, gzip;dur=\d+\.\d"
        assert re.fullmatch(timing, packed.headers["server-timing"])
    forecast = api.get("/v1/forecast", headers={"accept-encoding": "gzip"})
    assert re.match(r"app;dur=\d", forecast.headers["server-timing"])
    definition = {"subject": subject, "type": "pull"}
    api.put(f"/v1/subscriptions/{subject}", json=definition).raise_for_status()
    messages = [{"subject": subject, "body": "x" * 100}] * 30
    api.post("/v1/messages/batch", json=messages).raise_for_status()
    asked = {"max": 30, "wait": "10s"}
    pulled = api.post(f"/v1/subscriptions/{subject}/pull", json=asked)
    assert pulled.json()["messages"]
    assert not {"content-encoding", "server-timing"} & set(pulled.headers)


def test_what_is_not_there_or_not_meant_is_a_problem_too(shared_api):
    problem = shared_api.ask("GET", "/v2/anything", 404)
    assert "/docs" in problem["detail"]
    answer = shared_api.delete("/v1/messages")
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
    assert answer.headers["content-type"] == "application/problem+json"


# ---- who may call ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        ("http://localhost:3000", 201),
        ("http://127.0.0.1", 201),
        ("http://[::1]:8080", 201),
        ("https://evil.example", 403),
        ("http://localhost.evil.example", 403),
        ("null", 403),
        ("http://[", 403),
        ("é".encode("latin-1"), 403),
    ],
)
def test_a_page_of_another_origin_may_not_call(shared_api, subject, origin, status):
    document = {"subject": subject}
    answer = shared_api.post("/v1/messages", json=document, headers={"origin": origin})
    assert answer.status_code == status
    answer = shared_api.get("/v1/subscriptions", headers={"origin": origin})
    assert answer.status_code == (200 if status == 201 else 403)


def test_with_a_token_only_its_holder_may_call(make_api, subject):
    api = make_api(token=TOKEN)
    api.start()
    paths = ("/v1/messages", "/v1/subscriptions", "/metrics", "/v1/stats", "/nowhere")
    for path in paths:
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": TOKEN}):
            answer = api.post(path, json={"subject": subject}, headers=headers)
            assert answer.status_code == 401
            assert answer.headers["www-authenticate"] == "Bearer"
            assert answer.json()["type"] == "urn:delayserver:problem:unauthorized"
    assert api.get("/healthz").status_code == api.get("/readyz").status_code == 200
    api.headers["authorization"] = f"bearer {TOKEN}"
    api.publish(subject)
    api.ask("GET", "/v1/subscriptions")
    assert TOKEN not in api.log


def test_off_loopback_the_server_needs_a_token(make_api):
    api = make_api(host="0.0.0.0")
    api.launch()
    assert wait_until(lambda: not api.process.is_running)
    assert api.process.stop() != 0
    assert "token" in api.log


# ---- the disk and the clock --------------------------------------------------------------------


def test_when_the_disk_is_nearly_full_nothing_is_accepted_and_all_is_delivered(make_api, subject):
    api = make_api()
    api.start()
    path = api.subscribe("consumer", subject)
    soon = api.publish(subject, delay="1s", key="k")
    later = api.publish(subject, delay="1h")
    other = api.publish(subject, delay="1h")
    api.restart(disk_reserve_bytes=1 << 60)
    document = {"subject": subject}
    for method, where, body in (
        ("POST", "/v1/messages", document),
        ("POST", "/v1/messages/batch", [document]),
        ("PUT", f"/v1/subjects/{subject}/keys/x", {}),
    ):
        problem = api.ask(method, where, 507, json=body)
        assert problem["type"] == "urn:delayserver:problem:disk-full"
        assert "disk_reserve_bytes" in problem["detail"]
    api.ask("GET", "/readyz")
    (message,) = api.pull(path)
    assert message["id"] == soon["id"]
    api.ask("POST", f"{path}/nack", json={"leases": [message["lease"]], "delay": "100ms"})
    (message,) = api.pull(path)
    api.ack(path, message)
    api.ask("PATCH", f"/v1/messages/{later['id']}", json={"delay": "100ms"})
    api.ask("DELETE", f"/v1/messages/{other['id']}")
    assert [one["id"] for one in api.pull_all(path, 1)] == [later["id"]]


def test_a_clock_set_forward_and_back_fires_nothing_twice_and_nothing_early(make_api, subject):
    api = make_api()
    api.start()
    path = api.subscribe("consumer", subject)
    half = api.publish(subject, delay="30m")
    double = api.publish(subject, delay="2h")

    api.restart(kill=True, clock_offset_ms=HOUR_MS)
    (message,) = api.pull(path)
    assert message["id"] == half["id"]
    api.ack(path, message)
    ahead = api.publish(subject, delay="30m", key="k")
    assert time_ms(ahead["deliver_at"]) > now_ms() + HOUR_MS
    at_once = api.publish(subject)
    assert [one["id"] for one in api.pull_all(path, 1)] == [at_once["id"]]

    api.restart(kill=True, clock_offset_ms=0)
    assert api.pull(path, wait="300ms") == []
    states = [api.look_up(one["id"])["state"] for one in (half, at_once, ahead, double)]
    assert states == ["delivered", "delivered", "scheduled", "scheduled"]
    quick = api.publish(subject, delay="200ms")
    (message,) = api.pull(path)
    assert message["id"] == quick["id"]
    assert now_ms() >= time_ms(quick["deliver_at"])
    api.ack(path, message)

    api.restart(clock_offset_ms=3 * HOUR_MS)
    assert [one["id"] for one in api.pull_all(path, 2)] == [ahead["id"], double["id"]]
    assert api.pull(path, wait="200ms") == []
