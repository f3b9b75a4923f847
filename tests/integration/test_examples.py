"""The examples run, and do what they say."""

import os
import signal
import subprocess
import sys

import httpx
import pytest

from delayserver.cli.demo.process import free_port
from tests.waiting import wait_until


@pytest.mark.parametrize(
    ("name", "arguments", "lines"),
    [
        (
            "order_unpaid",
            ("--orders", "60", "--pay-within", "1"),
            ["60 orders were placed", "30 of them were paid", "closed, unpaid: 30", "paid: 30"],
        ),
        (
            "red_envelope_refund",
            ("--envelopes", "30", "--open-within", "1"),
            ["30 envelopes were sent", "10 of them were opened", "opened: 88.80, refunded: 177.60"],
        ),
    ],
)
def test_example(shared_api, name, arguments, lines):
    module = f"delayserver.examples.{name}"
    done = subprocess.run(
        [sys.executable, "-m", module, "--server", shared_api.process.url, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == lines
    assert done.stderr == ""


@pytest.fixture
def start(tmp_path):
    """Starts examples that run until they are told to stop."""
    running: list[subprocess.Popen[bytes]] = []

    def start(name, *arguments, **environment):
        with (tmp_path / "log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", f"delayserver.examples.{name}", *map(str, arguments)],
                cwd=tmp_path,
                env={**os.environ, **environment},
                stdout=log,
                stderr=log,
            )
        running.append(process)
        return process

    yield start
    for process in running:
        process.send_signal(signal.SIGTERM)
    for process in running:
        process.wait(20)


class ShopClient(httpx.Client):
    """A customer of one of the shops."""

    def __init__(self, port, log_path):
        super().__init__(base_url=f"http://127.0.0.1:{port}", timeout=20)
        self._log_path = log_path

    def is_there(self):
        try:
            return self.get("/orders/nothing").status_code == 404
        except httpx.TransportError:
            return False

    def place(self):
        answer = self.post("/orders")
        assert answer.status_code == 201, self._log_path.read_text()
        assert answer.json()["state"] == "waiting for payment"
        return answer.json()["id"]

    def pay(self, order):
        return self.post(f"/orders/{order}/pay").status_code

    def state(self, order):
        return self.get(f"/orders/{order}").json()["state"]


def shops_work(shop, api, subject):
    """One order is paid, and the other is cancelled in time."""
    paid, unpaid = shop.place(), shop.place()
    assert shop.pay(paid) == 200
    assert shop.pay(paid) == 409
    assert api.ask("GET", f"/v1/subjects/{subject}/keys/{paid}")["state"] == "cancelled"
    wait_until(lambda: shop.state(unpaid) == "cancelled, unpaid")
    assert shop.state(paid) == "paid"
    assert shop.pay(unpaid) == 409


def test_the_shop_on_django(shared_api, start, tmp_path):
    environment = {"DELAYSERVER_URL": shared_api.process.url, "SHOP_PAY_WITHIN": "3s"}
    for _ in range(2):
        assert start("django_shop", "migrate", **environment).wait(20) == 0
    port = free_port()
    start("django_shop", "runserver", f"127.0.0.1:{port}", **environment)
    consumer = start("django_shop", "consume", **environment)
    with ShopClient(port, tmp_path / "log") as shop:
        wait_until(shop.is_there)
        shops_work(shop, shared_api, "shop.order.unpaid")
    consumer.send_signal(signal.SIGTERM)
    assert consumer.wait(20) == 0


def test_the_shop_on_fastapi(shared_api, start, tmp_path):
    port = free_port()
    options = ("--server", shared_api.process.url, "--port", port, "--pay-within", "3s")
    start("fastapi_shop", *options)
    with ShopClient(port, tmp_path / "log") as shop:
        wait_until(shop.is_there)
        order = shop.place()
        forged = {"webhook-id": "1", "webhook-timestamp": "1", "webhook-signature": "v1,AAAA"}
        for headers in ({}, forged):
            answer = shop.post("/hooks/late", json={"order": order}, headers=headers)
            assert answer.status_code == 401
        assert shop.state(order) == "waiting for payment"
        shops_work(shop, shared_api, "shop.order.late")
        wait_until(lambda: shop.state(order) == "cancelled, unpaid")


NAMES = ["order_unpaid", "red_envelope_refund", "django_shop", "fastapi_shop"]


@pytest.mark.parametrize("name", NAMES)
def test_help(name):
    module = f"delayserver.examples.{name}"
    done = subprocess.run(
        [sys.executable, "-m", module, "--help"], capture_output=True, text=True, check=True
    )
    assert f"python -m {module}" in done.stdout
