"""Clients and receivers that take all the sockets they can get, and leave the logs theirs."""

import contextlib
import functools
import resource
import socket
import subprocess

import httpx
import pytest

from delayserver.cli.demo import process
from delayserver.server.descriptors import LEFT_MIN, OWN_MIN
from tests.forked_servers import ForkedServerProcess
from tests.integration.api_support import unique
from tests.waiting import wait_until

ALLOWED = OWN_MIN + 80
CONNECTIONS, WEBHOOKS = 60, 20
"""What is left of ALLOWED is divided so."""
HOUR_MS = 3_600_000


@pytest.fixture
def limit(monkeypatch):
    """Lets the processes that are started have no more files open than that."""

    def limit_to(allowed):
        def before():
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, allowed), allowed))

        popen = functools.partial(subprocess.Popen, preexec_fn=before)
        monkeypatch.setattr(subprocess, "Popen", popen)
        monkeypatch.setattr(ForkedServerProcess, "_spawn", process.ServerProcess._spawn)

    return limit_to


@contextlib.contextmanager
def crowd(port, count):
    """Clients that connect and say nothing."""
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            stack.enter_context(socket.create_connection(("127.0.0.1", port)))
        yield


def test_neither_clients_nor_receivers_take_what_the_logs_need(make_api, receiver, limit):
    limit(ALLOWED)
    # Each hour gets its files while the message waits for its answer.
    api = make_api(file_ms=10, checkpoint_ms=20)
    api.start()
    assert f"connections_max={CONNECTIONS}" in api.log
    assert f"webhook_connections_max={WEBHOOKS}" in api.log
    subject, url = unique("slow"), receiver.hook(gate=True)
    definition = {"subject": subject, "type": "webhook", "url": url, "max_in_flight": 1000}
    api.ask("PUT", f"/v1/subscriptions/{subject}", 201, json=definition)
    count = 10 * WEBHOOKS
    batch = [{"subject": subject, "body": number} for number in range(count)]
    api.ask("POST", "/v1/messages/batch", json=batch)
    wait_until(lambda: receiver.count(url) == WEBHOOKS)
    assert api.metric("waiting_webhooks") == 1  # the subscription; its messages are in its queue
    with crowd(api.process.port, 10 * CONNECTIONS):
        for hour in range(1, 40):
            message = {"subject": "later", "delay": hour * HOUR_MS}
            api.ask("POST", "/v1/messages?ack=filed", 201, json=message)
        assert receiver.count(url) == WEBHOOKS
        receiver.open(url)
        arrived = [receiver.next(url) for _ in range(count)]
    # To wait for a socket was no attempt.
    assert {one.headers["delay-attempt"] for one in arrived} == {"1"}
    assert {one.body for one in arrived} == {b"%d" % number for number in range(count)}
    assert api.process.stop() == 0


def test_a_server_that_could_serve_nobody_says_so(make_api, limit):
    limit(OWN_MIN + LEFT_MIN - 1)
    api = make_api()
    with pytest.raises(process.ServerFailed, match="ended with status 1"):
        api.start()
    assert f"{OWN_MIN + LEFT_MIN - 1} open files" in api.log
    assert "LimitNOFILE" in api.log
    assert not api.data_dir.exists()


def test_who_connects_and_does_not_shake_hands_is_counted_and_timed(
    make_api, certificate, trusting, limit
):
    limit(ALLOWED)
    api = make_api(**certificate, head_timeout_ms=500)
    api.launch()
    url = api.process.url.replace("http:", "https:")

    def answers():
        try:
            return httpx.get(f"{url}/readyz", verify=trusting, trust_env=False).is_success
        except httpx.TransportError:
            return False

    wait_until(answers)
    with httpx.Client(base_url=url, verify=trusting, trust_env=False) as known:
        known.get("/readyz").raise_for_status()
        with crowd(api.process.port, 10 * CONNECTIONS):
            for hour in range(1, 40):
                message = {"subject": "later", "delay": hour * HOUR_MS}
                known.post("/v1/messages?ack=filed", json=message).raise_for_status()
            wait_until(answers)
    assert api.process.stop() == 0
