"""A server that cannot start says why, and what is damaged costs only itself."""

import fcntl
import json
import os
import signal
import socket
from pathlib import Path

import pytest

from tests.integration.api_support import unique
from tests.waiting import wait_until


@pytest.fixture
def subject():
    return unique("days")


def ends_with_an_error(api):
    """What a server says that ends by itself."""
    wait_until(lambda: not api.process.is_running)
    assert api.process.stop() not in (0, None)
    assert "Traceback" not in api.log
    return api.log


def test_a_directory_has_one_owner(make_api, subject):
    first, second = make_api(), make_api()
    first.start()
    second.process.data_dir = first.data_dir
    second.launch()
    said = ends_with_an_error(second)
    assert str(first.data_dir) in said
    assert f"process {first.process.pid}" in said
    assert "--data-dir" in said
    first.publish(subject)


def test_a_port_has_one_owner(make_api):
    api = make_api()
    with socket.create_server(("127.0.0.1", api.process.port)):
        api.launch()
        said = ends_with_an_error(api)
    assert f"127.0.0.1:{api.process.port}" in said
    assert "--port" in said
    assert not api.data_dir.exists()


def test_two_servers_that_start_at_once_on_one_port(make_api):
    first, second = make_api(), make_api()
    second.process.port = first.process.port
    first.launch()
    second.launch()
    wait_until(lambda: first.process.is_running != second.process.is_running)
    winner, loser = (first, second) if first.process.is_running else (second, first)
    winner.process.wait_ready()
    assert f"cannot listen on 127.0.0.1:{winner.process.port}" in ends_with_an_error(loser)


def test_a_directory_of_another_format_is_left_alone(api, subject):
    kept = api.publish(subject, delay="1h")
    assert api.process.stop() == 0
    file = api.data_dir / "FORMAT"
    good = file.read_text()
    newer = json.dumps({**json.loads(good), "format": 99})
    without = json.dumps({**json.loads(good), "stamp": None})
    before = modified(api)
    for text, said in ((newer, "99"), (without, "FORMAT"), ("?", "FORMAT"), (None, "FORMAT")):
        file.unlink()
        if text is not None:
            file.write_text(text)
        api.launch()
        assert said in ends_with_an_error(api)
        assert modified(api) == before
        file.write_text(good)
        api.clear_log()
    api.start()
    assert api.look_up(kept["id"])["state"] == "scheduled"


def modified(api):
    """When each file of the directory was written last, but for who owns it."""
    return {
        path: path.stat().st_mtime_ns
        for path in api.data_dir.rglob("*")
        if path.is_file() and path.name not in ("FORMAT", "LOCK")
    }


def flip(path, marker):
    """Change one byte behind a text in a file."""
    data = bytearray(path.read_bytes())
    at = data.index(marker) + len(marker) // 2
    data[at] ^= 0xFF
    path.write_bytes(data)


def files(api, directory):
    return sorted(path for path in (api.data_dir / directory).iterdir() if path.is_file())


@pytest.mark.damaged("a body in a schedule file")
def test_damage_in_a_schedule_file_costs_one_message(api, subject):
    bodies = [f"body number {n} of the damaged file" for n in range(5)]
    batch = [{"subject": subject, "body": body, "delay": "3s"} for body in bodies]
    ids = api.ask("POST", "/v1/messages/batch", json=batch)["ids"]
    api.ask("GET", "/v1/forecast")  # after a checkpoint they are in their hour's file
    assert api.process.stop() == 0
    damaged = [path for path in files(api, "schedule") if bodies[2].encode() in path.read_bytes()]
    for path in damaged:
        flip(path, bodies[2].encode())
    api.start()
    path = api.subscribe("consumer", subject)
    got = [message["body"] for message in api.pull_all(path, 4)]
    assert sorted(got) == [*bodies[:2], *bodies[3:]]
    assert "damage found" in api.log
    assert any(path.name in api.log for path in damaged)
    problem = api.ask("GET", f"/v1/messages/{ids[2]}", 500)
    assert problem["type"] == "urn:delayserver:problem:damaged"
    assert any(path.name in problem["detail"] for path in damaged)
    assert api.look_up(ids[0])["state"] == "delivered"


@pytest.mark.damaged("a group of the message log")
def test_damage_in_the_message_log_is_named_and_costs_one_group(api, subject):
    path = api.subscribe("consumer", subject)
    api.restart(checkpoint_ms=600_000)  # from here on, only the message log has it
    bodies = [f"body number {n} of the damaged log" for n in range(5)]
    ids = [api.publish(subject, body=body, delay="3s")["id"] for body in bodies]
    api.process.kill()
    (damaged,) = [one for one in files(api, "messages") if bodies[2].encode() in one.read_bytes()]
    flip(damaged, bodies[2].encode())
    api.start()
    got = [message["body"] for message in api.pull_all(path, 4)]
    assert sorted(got) == [*bodies[:2], *bodies[3:]]
    assert damaged.name in api.log
    assert "damage found" in api.log
    assert api.get(f"/v1/messages/{ids[2]}").status_code in (404, 500)
    assert api.publish(subject)["id"] not in ids


def test_a_torn_tail_is_no_damage(api, subject):
    kept = api.publish(subject, body="kept", delay="1h")
    api.process.kill()
    log = files(api, "messages")[-1]
    data = log.read_bytes()
    end = -(-len(data.rstrip(b"\0")) // 8) * 8  # a frame ends at a multiple of 8
    log.write_bytes(data[:end] + data[:50])
    api.start()
    assert api.look_up(kept["id"])["body"] == "kept"
    assert "damage found" not in api.log
    again = api.publish(subject, body="again", delay="1h")
    api.restart(kill=True)
    assert api.look_up(again["id"])["body"] == "again"


# ── a log that cannot be written ───────────────────────────────────────────────────────────────


@pytest.mark.parametrize("how", ["the disk is full", "the reader has ended", "nobody reads"])
def test_a_log_that_cannot_be_written_costs_only_its_lines(make_api, tmp_path, subject, how):
    """`nobody reads` goes on until the pipe is full, and a server that waited for it would hang."""
    api, count, reader = make_api(), 60, -1
    api.process.log_path = Path("/dev/full")
    if how != "the disk is full":
        api.process.log_path = tmp_path / "log"
        os.mkfifo(api.process.log_path)
        reader = os.open(api.process.log_path, os.O_RDONLY | os.O_NONBLOCK)
        fcntl.fcntl(reader, fcntl.F_SETPIPE_SZ, 4096)
    api.start()
    if how == "the reader has ended":
        os.close(reader)
    refusing = {"subject": f"{subject}.*", "type": "webhook", "url": "http://127.0.0.1:1/"}
    api.ask("PUT", "/v1/subscriptions/w", 201, json={**refusing, "retry": {"max_attempts": 1}})
    path = api.subscribe("p", f"{subject}")
    batch = [{"subject": f"{subject}.one", "key": f"{n}{'x' * 200}"} for n in range(count)]
    api.ask("POST", "/v1/messages/batch", json=batch)  # A line of the log for each.
    dead = "/v1/subscriptions/w/dead-letters?limit=100"
    wait_until(lambda: len(api.ask("GET", dead)["dead_letters"]) == count)
    api.publish(subject)
    assert len(api.pull_all(path, 1)) == 1
    if how == "nobody reads":
        assert api.metric("log_lines_lost_total") == 0
        os.set_blocking(reader, True)
        data = b""
        while data.count(b"dead letter") < count:
            data += os.read(reader, 1 << 16)
        os.close(reader)
    else:
        wait_until(lambda: api.metric("log_lines_lost_total") >= count)
    assert api.process.stop() == 0


def test_a_hangup_at_any_time_ends_nothing(make_api, subject):
    api = make_api()
    api.launch()
    status = Path(f"/proc/{api.process.pid}/status")
    wait_until(lambda: status.read_text().split("SigBlk:")[1].split()[0].endswith("1"))
    os.kill(api.process.pid, signal.SIGHUP)  # while it starts
    api.process.wait_ready()
    api.publish(subject)
    os.kill(api.process.pid, signal.SIGHUP)
    wait_until(lambda: api.log.count("SIGHUP: there is nothing to read again") == 2)
    os.kill(api.process.pid, signal.SIGTERM)
    os.kill(api.process.pid, signal.SIGHUP)  # while it stops
    assert api.process.stop() == 0
