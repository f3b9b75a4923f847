"""The commands against a real server process on loopback."""

import json
import os
import signal
import socket
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from delayserver.cli import make_app
from delayserver.cli.demo.process import ServerProcess, free_port

TIMEOUT_S = 30


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    directory = tmp_path_factory.mktemp("server")
    log_path = directory / "server.log"
    with ServerProcess(directory / "data", port=free_port(), log_path=log_path) as server:
        server.start()
        server.wait_ready()
        yield server


@pytest.fixture
def run(server, monkeypatch):
    """Runs a command; returns what it printed, and fails unless its status is `status`."""
    monkeypatch.setenv("DELAYSERVER_URL", server.url)
    monkeypatch.delenv("DELAYSERVER_TOKEN", raising=False)

    def run(*arguments, status=0):
        result = CliRunner().invoke(make_app(), arguments)
        assert result.exit_code == status, result.output
        return result

    return run


@pytest.fixture
def ask(run):
    """Runs a command with --json; returns the document."""
    return lambda *arguments: json.loads(run(*arguments, "--json").stdout)


def delayserver(*arguments):
    """The command as a process of its own."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("DELAYSERVER_")}
    return subprocess.run(
        [sys.executable, "-m", "delayserver", *arguments],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env=environment,
        check=False,
    )


def test_the_life_of_a_message(run, ask):
    published = ask("publish", "order.a", '{"order": 1}', "--delay", "1h", "--key", "a/1 ü")
    assert published["state"] == "scheduled"
    again = ask("publish", "order.a", '{"order": 1}', "--delay", "1h", "--key", "a/1 ü")
    assert (again["id"], again["duplicate"]) == (published["id"], True)

    by_key = ("--subject", "order.a", "--key", "a/1 ü")
    assert ask("get", *by_key)["body"] == {"order": 1}
    moved = ask("move", *by_key, "--at", "2026-12-01T00:00:00+01:00")
    assert moved["id"] == published["id"]
    assert ask("get", published["id"])["deliver_at"] == moved["deliver_at"]
    assert ask("cancel", *by_key)["state"] == "cancelled"
    assert ask("cancel", published["id"])["state"] == "cancelled"
    assert "cancelled" in run("get", published["id"]).stdout


def test_pull_and_acknowledge(run, ask):
    ask("subscribe", "wallet", "envelope.refund", "--lease", "30s")
    run("publish", "envelope.refund", '{"cents": 500}', "--header", "x-shop=7")
    (message,) = ask("pull", "wallet", "--no-ack", "--wait", "10s")["messages"]
    assert message["body"] == {"cents": 500}
    assert message["headers"] == {"x-shop": "7"}
    assert ask("ack", "wallet", message["lease"]) == {"acked": 1, "expired": []}
    run("ack", "wallet", message["lease"], status=1)
    assert ask("get", message["id"])["state"] == "delivered"

    run("publish", "envelope.refund", "2")
    assert '"id"' in run("pull", "wallet", "--wait", "10s", "--json").stdout
    assert run("pull", "wallet", "--wait", "0").stdout == "No message is due.\n"


def test_give_back_and_extend(run, ask):
    ask("subscribe", "till", "till.*", "--lease", "30s", "--max-attempts", "2")
    published = ask("publish", "till.a", "1")
    for attempt in (1, 2):
        (message,) = ask("pull", "till", "--no-ack", "--wait", "10s")["messages"]
        assert message["attempt"] == attempt
        lease = message["lease"]
        assert ask("extend", "till", lease, "--lease", "1m") == {"extended": 1, "expired": []}
        assert ask("nack", "till", lease, "--delay", "50ms") == {"nacked": 1, "expired": []}
        run("nack", "till", lease, status=1)
    (letter,) = ask("dead-letters", "list", "till")["dead_letters"]
    assert letter["id"] == published["id"]
    assert published["id"] in run("dead-letters", "list", "till").stdout
    assert ask("dead-letters", "redrive", "till", "--all") == {"redriven": 1}
    assert ask("pull", "till", "--wait", "10s")["messages"][0]["id"] == published["id"]
    run("dead-letters", "delete", "till", published["id"], status=1)


def test_pause_resume_delete(run, ask):
    ask("subscribe", "passing", "passing.a")
    assert ask("subscriptions", "pause", "passing")["paused"] is True
    assert ask("subscriptions", "show", "passing")["paused"] is True
    assert ask("subscriptions", "resume", "passing")["paused"] is False
    assert ask("subscriptions", "delete", "passing") == {"deleted": "passing"}
    run("subscriptions", "show", "passing", status=1)


def test_many_at_once(run, ask, tmp_path):
    file = tmp_path / "messages.ndjson"
    messages = [{"subject": "bulk", "body": n, "key": str(n), "delay": "1h"} for n in range(2500)]
    file.write_text("\n".join(map(json.dumps, messages)))
    assert ask("publish-many", str(file)) == {"published": 2500, "duplicates": 0}
    assert ask("publish-many", str(file)) == {"published": 0, "duplicates": 2500}
    listed = ask("list", "bulk", "--limit", "5000")["messages"]
    assert len(listed) == 2500
    wrong = tmp_path / "wrong.ndjson"
    wrong.write_text(json.dumps({"subject": "bulk", "delay": "soon"}))
    assert "line 1:" in run("publish-many", str(wrong), status=1).stderr
    names = tmp_path / "names.txt"
    keys = [json.dumps({"subject": "bulk", "key": str(n)}) for n in range(1000)]
    names.write_text("\n".join([*keys, *(one["id"] for one in listed[1000:])]))
    assert ask("cancel-many", str(names)) == {"cancelled": 2500, "left": []}
    assert ask("list", "bulk")["messages"] == []
    names.write_text("no such id")
    assert "unknown" in run("cancel-many", str(names), status=1).stdout


def test_replace(run, ask):
    first = ask("replace", "timer", "k", "1", "--delay", "1h")
    second = ask("replace", "timer", "k", "2", "--delay", "1h")
    assert ask("get", first["id"])["state"] == "cancelled"
    assert ask("get", "--subject", "timer", "--key", "k")["id"] == second["id"]


def test_forecast_and_ready(run, ask):
    ask("publish", "order.forecast", "1", "--delay", "5h")
    buckets = ask("forecast")["buckets"]
    assert sum(bucket["count"] for bucket in buckets) >= 1
    assert "█" in run("forecast", "--bucket", "1d").stdout
    assert "whole number of hours" in run("forecast", "--bucket", "1m", status=1).stderr
    assert ask("ready", "--wait", "5s") == {"status": "ready"}


def test_subscriptions_are_listed(run, ask):
    ask("subscribe", "shop", "order.unpaid", "--webhook", "http://127.0.0.1:9/x", "--backoff", "5s")
    listed = {one["name"]: one for one in ask("subscriptions")["subscriptions"]}
    assert listed["shop"]["url"] == "http://127.0.0.1:9/x"
    assert "order.unpaid" in run("subscriptions").stdout
    assert ask("subscriptions", "list") == ask("subscriptions")


def test_stats(run, ask):
    assert "accepted" in ask("stats")
    assert run("stats").stdout


def test_refusals_say_what_is_wrong(run):
    wrong = run("publish", "order.a", "1", "--delay", "soon", status=2)
    assert "Invalid value for --delay" in wrong.stderr
    missing = run("get", "00ff", status=1)
    assert missing.stderr.startswith("error: Not found: ")
    run("publish", "order.a", "1", "--key", "taken", "--delay", "1h")
    conflict = run("publish", "order.a", "2", "--key", "taken", "--delay", "1h", status=1)
    assert "taken" in conflict.stderr


def test_nobody_there(run):
    result = run("stats", "--url", f"http://127.0.0.1:{free_port()}", status=3)
    assert "No server can be reached" in result.stderr


def test_check_beside_the_server(run, ask, server):
    run("publish", "order.checked", "1", "--delay", "1h")
    directory = ("--data-dir", str(server.data_dir))
    assert "Sound" in run("check", *directory).stdout
    assert ask("check", *directory)["is_clean"] is True


@pytest.mark.damaged("a segment of the message log")
def test_check_finds_damage(tmp_path):
    data_dir = tmp_path / "data"
    port = free_port()
    with ServerProcess(data_dir, port=port, log_path=tmp_path / "log") as server:
        server.start()
        server.wait_ready()
        url = ("--url", server.url)
        for number in range(20):
            body = json.dumps({"number": number, "filling": "x" * 500})
            CliRunner().invoke(make_app(), ["publish", "s", body, "--delay", "1h", *url])
        server.kill()
    (segment, *_) = sorted((data_dir / "messages").iterdir())
    with segment.open("r+b") as file:
        file.seek(1500)
        file.write(b"damage")
    result = delayserver("check", "--data-dir", str(data_dir))
    assert result.returncode == 1, result.stdout + result.stderr
    assert segment.name in result.stdout


def test_check_of_something_else(run, tmp_path):
    result = run("check", "--data-dir", str(tmp_path), status=2)
    assert "not a data directory" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_two_servers_never_share_a_directory(server):
    port = str(free_port())
    result = delayserver("serve", "--data-dir", str(server.data_dir), "--port", port)
    assert result.returncode == 1
    assert str(server.data_dir) in result.stderr
    assert "Traceback" not in result.stderr


def test_a_port_in_use(tmp_path):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        result = delayserver("serve", "--data-dir", str(tmp_path / "data"), "--port", port)
    assert result.returncode == 1
    assert "cannot listen" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_the_server_and_loses_nothing(tmp_path, number):
    with ServerProcess(tmp_path / "data", port=free_port(), log_path=tmp_path / "log") as server:
        server.start()
        server.wait_ready()
        url = ("--url", server.url, "--json")
        published = CliRunner().invoke(make_app(), ["publish", "s", "1", "--delay", "1h", *url])
        assert server.stop(number) == 0
        server.start()
        server.wait_ready()
        found = CliRunner().invoke(make_app(), ["get", json.loads(published.stdout)["id"], *url])
        assert json.loads(found.stdout)["state"] == "scheduled"


def test_version():
    result = delayserver("--version")
    assert result.returncode == 0
    assert result.stdout.startswith("delayserver ")
