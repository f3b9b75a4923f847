"""The examples run, and do what they say."""

import subprocess
import sys

import pytest


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


@pytest.mark.parametrize("name", ["order_unpaid", "red_envelope_refund"])
def test_help(name):
    module = f"delayserver.examples.{name}"
    done = subprocess.run(
        [sys.executable, "-m", module, "--help"], capture_output=True, text=True, check=True
    )
    assert "--server" in done.stdout
