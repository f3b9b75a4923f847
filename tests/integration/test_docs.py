"""The documents as a new user follows them: their commands and programs, in order, as written.

Only the two ports are others, since those may be in use here."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from typer.testing import CliRunner

from delayserver.cli import make_app
from delayserver.cli.demo.process import free_port
from delayserver.wire.messages import PublishModel
from tests.integration.api_support import ApiServer
from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]
SERVER_PORT, RECEIVER_PORT = "127.0.0.1:8080", "9000"
NAMES = ("id", "lease")
"""Fields whose values are other ones in each run, and stand in later commands."""
NO_OPTIONS = {
    *("subject", "key", "body", "body_base64", "delay", "deliver_at", "headers"),
    *("watch", "on_event"),
}
"""Of a message: what has its place in the tour."""
needs_curl = pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")


def document(name: str) -> str:
    """A document of the project."""
    return (ROOT / name).read_text("utf-8")


def blocks(text: str, language: str = "") -> list[str]:
    """The blocks of code in a language."""
    found = re.findall(r"^```(\w*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return [code for name, code in found if name == language]


class Example(NamedTuple):
    """A command of a document, and what it shows as its answer ("": nothing)."""

    command: str
    shown: str

    @property
    def words(self) -> list[str]:
        return shlex.split(self.command.replace("\\\n", " "))


def examples(text: str) -> Iterator[Example]:
    """What follows a dollar sign, with the lines that go on, and the lines behind it."""
    pattern = re.compile(r"^\$ (.*(?:\n    .*)*)\n((?:(?!\$ ).*\n)*)", re.MULTILINE)
    for block in blocks(text):
        for command, shown in pattern.findall(block):
            yield Example(command, shown.strip())


def program(text: str, word: str) -> str:
    """The Python block that has a word in it."""
    (found,) = (one for one in blocks(text, "python") if word in one)
    return found


@pytest.fixture
def here(api: ApiServer) -> Callable[[str], str]:
    """A text with the ports of this test."""
    receiver = str(free_port())
    server = api.process.url.removeprefix("http://")
    return lambda text: text.replace(SERVER_PORT, server).replace(RECEIVER_PORT, receiver)


def run(words: list[str], **options: Any) -> str:
    """What a program prints; it has to end well."""
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False, **options)
    assert done.returncode == 0, (words, done.stdout, done.stderr)
    return done.stdout


def command_line(words: list[str], **variables: str) -> str:
    """What the command `delayserver` prints, in this process."""
    assert words[0] == "delayserver"
    done = CliRunner().invoke(make_app(), words[1:], env=variables, prog_name="delayserver")
    assert done.exit_code == 0, (words, done.output)
    return done.output


def renamed(shown: Any, answer: Any) -> Iterator[tuple[str, str]]:
    """The ids and leases of an answer as a document shows it, and those that came here instead."""
    if isinstance(shown, dict):
        for name, value in shown.items():
            if name in NAMES:
                yield value, answer[name]
            else:
                yield from renamed(value, answer[name])
    elif isinstance(shown, list):
        for one, other in zip(shown, answer, strict=False):
            yield from renamed(one, other)


def assert_same_form(shown: Any, answer: Any, command: str) -> None:
    """The fields that a document shows are those of the answer, in their order."""
    if isinstance(shown, dict):
        assert isinstance(answer, dict) and list(answer) == list(shown), (command, shown, answer)
        for name, value in shown.items():
            assert_same_form(value, answer[name], command)
    elif isinstance(shown, list):
        assert isinstance(answer, list), (command, shown, answer)
        for one, other in zip(shown, answer, strict=False):
            assert_same_form(one, other, command)


def settled(url: str) -> None:
    """A reader of the document has seen what a message is asked about: wait until it is there."""
    message = url[: url.rindex("/")]
    wait_until(lambda: json.loads(run(["curl", "-s", message]))["state"] == "delivered")


def follow(text: str, here: Callable[[str], str]) -> dict[str, Any]:
    """Run every `curl` of a document; the answers by command. Each is as the document shows it."""
    names: dict[str, str] = {}
    answers = {}
    for example in examples(text):
        if example.words[0] != "curl":
            continue
        command = here(example.command)
        for shown, name in names.items():
            command = command.replace(shown, name)
        words = shlex.split(command.replace("\\\n", " "))
        if words[-1].endswith(("/attempts", "/replay")):
            settled(words[-1])
        answer = json.loads(run(words))
        assert "title" not in answer, (example.command, answer)
        if example.shown:
            document = json.loads(example.shown)
            assert_same_form(document, answer, example.command)
            names |= dict(renamed(document, answer))
        answers[example.command] = answer
    return answers


def answer_to(answers: dict[str, Any], *parts: str) -> Any:
    """The answer to the one command that has these parts."""
    (found,) = (answer for command, answer in answers.items() if all(p in command for p in parts))
    return found


@needs_curl
def test_the_readme(here):
    answers = follow(document("README.md"), here)
    assert len(answers) == 5
    batch = answer_to(answers, "/messages/batch")
    assert (batch["count"], batch["duplicates"]) == (2, 0)
    cancelled = answer_to(answers, "-X DELETE")
    assert cancelled == {"id": batch["ids"][1], "state": "cancelled"}
    (message,) = answer_to(answers, "/pull")["messages"]
    assert (message["id"], message["body"]) == (batch["ids"][0], {"order": 1001})
    assert answer_to(answers, "/ack") == {"acked": 1, "expired": []}


@needs_curl
def test_the_tour(api, here, tmp_path):
    tour = document("docs/tour.md")
    receiver_file = tmp_path / "receiver.py"
    receiver_file.write_text(here(program(tour, "verify_webhook")))
    log = (tmp_path / "receiver.log").open("w+")
    receiver = subprocess.Popen([sys.executable, str(receiver_file)], stdout=log, stderr=log)
    try:
        answers = follow(tour, here)
        first = answer_to(answers, "order.unpaid", '"1001"', '"10s"')
        (message,) = answer_to(answers, "/pull")["messages"]
        assert message["id"] == first["id"]
        assert answer_to(answers, "/ack") == {"acked": 1, "expired": []}
        cancelled = answer_to(answers, "-X DELETE", "/keys/1002")
        assert cancelled["state"] == "cancelled"
        (again,) = answer_to(answers, "/messages/cancel")["results"]
        assert (again["id"], again["state"]) == (cancelled["id"], "cancelled")
        moved = answer_to(answers, "-X PATCH")
        found = answers["curl -s 127.0.0.1:8080/v1/subjects/cart.idle/keys/7"]
        listed = answer_to(answers, "limit=100")
        assert found["deliver_at"] == moved["deliver_at"]
        assert [one["key"] for one in listed["messages"]] == ["7", "8", "9"]
        assert answer_to(answers, "/events/") == {"cancelled": 1, "fired": 0}
        made = answer_to(answers, "-X PUT", "/sources/orders")
        assert made["due_header"] == "delay-until" and not made["paused"]
        refund = answer_to(answers, "envelope.refund")
        text = f'received {refund["id"]} {{"envelope": 88, "cents": 500}}'
        wait_until(lambda: text in Path(log.name).read_text())
        assert wait_until(lambda: api.look_up(refund["id"])["state"] == "delivered")
        (shown,) = (json.loads(one) for one in blocks(tour, "json") if '"attempts"' in one)
        (attempt,) = answer_to(answers, "/attempts")["attempts"]
        assert list(attempt) == list(shown["attempts"][0])
        assert answer_to(answers, "/replay")["id"] == refund["id"]
        assert wait_until(lambda: Path(log.name).read_text().count(text) == 2)
        crm = answer_to(answers, "/subscriptions/crm")
        assert (crm["method"], crm["headers"]) == ("PUT", {"authorization": "***"})
        poll = answer_to(answers, "/schedules/poll/resume")
        assert (poll["overlap"], poll["paused"], poll["runs"]) == ("skip", False, 1)
    finally:
        receiver.kill()
        receiver.wait()
        log.close()


def test_the_command_line_of_the_tour(api):
    api.ask("PUT", "/v1/subscriptions/refunds", 201, json={"subject": "envelope.*", "type": "pull"})
    source = {"type": "kafka", "bootstrap": "127.0.0.1:9", "topic": "t", "subject": "order.unpaid"}
    api.ask("PUT", "/v1/sources/orders", 201, json=source)
    commands = [one.words for one in examples(document("docs/tour.md"))]
    commands = [words for words in commands if words[0] == "delayserver"]
    assert len(commands) == 9
    for words in commands:
        command_line(words, DELAYSERVER_URL=api.process.url)


def test_the_client_library(here, tmp_path):
    (tmp_path / "shop.py").write_text(here(program(document("docs/client.md"), "AsyncClient")))
    printed = run([sys.executable, str(tmp_path / "shop.py")])
    assert printed == "not paid yet: 2002\n"
    assert f"`{printed.strip()}`" in document("docs/client.md")
    shown = []
    for word in ("publish_all", "client.schedules", "client.sources", "put_webhook"):
        (tmp_path / "more.py").write_text(here(program(document("docs/client.md"), word)))
        shown += run([sys.executable, str(tmp_path / "more.py")]).splitlines()
    assert shown[0] == "EventResult(cancelled=1, fired=0)"
    assert shown[5:] == ["0 0 {} None", "['orders']", "0 messages wait"]


@needs_curl
def test_the_options_of_a_message(api, here):
    """Each is accepted as it stands there, and what tells of an outcome is as it is shown."""
    page = document("docs/http.md")
    for name in ("invoice.due", "invoice.sent"):
        api.subscribe(name, name)
    answers = follow(page, here)
    due = answer_to(answers, "invoice.due")
    api.pull_all("/v1/subscriptions/invoice.due", 1)
    (told,) = api.pull_all("/v1/subscriptions/invoice.sent", 1)
    (shown,) = (json.loads(block) for block in blocks(page, "json"))
    assert list(told["body"]) == list(shown) and told["body"]["id"] == due["id"]
    options = {*PublishModel.__struct_fields__} - NO_OPTIONS
    headings = re.findall(r"^### (.+)$", page, re.MULTILINE)
    assert {name for one in headings for name in one.split(" and ")} == options
    missing = set(options)
    for command, answer in answers.items():
        given = {name for name in options if f'"{name}":' in command}
        if given:
            shown = {"expires_at" if name == "ttl" else name for name in given - {"jitter"}}
            assert shown <= api.look_up(answer["id"]).keys(), command
            missing -= given
    assert missing == set()


@needs_curl
def test_what_others_call_it(api, here, tmp_path):
    """The message to a URL is accepted, and the consumer that stands in for beat sends the task."""
    page = document("docs/coming-from.md")
    assert {"key", "state"} <= answer_to(follow(page, here), "order.unpaid").keys()
    source = here(program(page, "send_task")).replace("redis://127.0.0.1:6379/0", "memory://")
    (tmp_path / "beat.py").write_text(source)
    daily = {"subject": "report.daily", "body": {"shop": 7}, "cron": "0 9 * * MON-FRI"}
    api.ask("PUT", "/v1/schedules/daily", 201, json=daily)
    consumer = subprocess.Popen([sys.executable, str(tmp_path / "beat.py")])
    try:
        run = api.ask("POST", "/v1/schedules/daily/trigger", 201)
        wait_until(lambda: api.look_up(run["id"])["state"] == "delivered")
    finally:
        consumer.kill()
        consumer.wait()


def test_a_table(here, tmp_path):
    (tmp_path / "table.py").write_text(here(program(document("docs/http.md"), "new_stream")))
    assert run([sys.executable, str(tmp_path / "table.py")]).startswith("{'count': 2, 'dup")


def test_the_tokens(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=":")
    # The last two run at two nodes.
    *ones, export, take = (one.command for one in examples(document("docs/access.md")))
    shown = [run(["bash", "-c", one]) for one in ones]
    assert len(shown) == 4
    assert "shop" in shown[2] and "worker" in shown[2]
    run(["bash", "-c", export.replace("/var/lib/delayserver", "data")])
    taken = run(["bash", "-c", take.replace("/var/lib/delayserver", "other")])
    assert taken == "added: worker\nchanged: -\nremoved: -\n"


def test_brokers(make_api):
    """Their subscriptions are accepted as they stand there, and made by the commands beside them;
    what comes of messages is for tests/sinks."""
    page = document("docs/sinks.md")
    hosts = sorted(set(re.findall(r"[a-z]+\.example\b|\bbroker\d\b", page)))
    api = make_api(webhook_targets=",".join(hosts))
    api.start()
    documents = [json.loads(block) for block in blocks(page, "json")]
    subscriptions = [one for one in documents if "due_header" not in one]
    (source,) = (one for one in documents if "due_header" in one)
    types = ["kafka", "redis", "nats", "amqp"]
    assert [one["type"] for one in subscriptions] == types
    for one in subscriptions:
        api.ask("PUT", f"/v1/subscriptions/{one['type']}", 201, json=one)
    made = api.ask("PUT", "/v1/sources/orders", 201, json=source)
    assert {name: made[name] for name in source} == source
    shown = re.findall(r"`(delayserver subscribe [^`]+)`", page) + blocks(page, "sh")
    commands = [shlex.split(one) for one in shown]
    assert len(commands) == len(types) + 1
    for words in commands:
        variables = {"DELAYSERVER_URL": api.process.url}
        if any("delays@" in word for word in words):
            variables["DELAYSERVER_BROKER_PASSWORD"] = "secret"
        command_line(words, **variables)
        if words[1] == "subscribe":
            due = api.ask("GET", f"/v1/subscriptions/{words[2]}")
            assert due["type"] == types.pop(0)
            api.ask("DELETE", f"/v1/subscriptions/{words[2]}", 204)


@needs_curl
def test_what_operators_ask(api, here):
    operations = document("docs/operations.md")
    shown = {one.words[-1]: run(shlex.split(here(one.command))) for one in examples(operations)}
    assert len(shown) == 3
    metrics = shown[f"{SERVER_PORT}/metrics"]
    found = set(re.findall(r"^# TYPE (delayserver_\w+) (?:counter|gauge|histogram)", metrics, re.M))
    named = set(re.findall(r"`(delayserver_\w+)`", operations))
    assert named == found, "the table of metrics"
