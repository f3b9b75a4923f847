"""Where the server is, who asks, and what is said when it does not work."""

import json

import httpx
import pytest


def test_defaults_and_options(cli):
    for arguments in ((), ("--url", "http://host:1", "--token", "t" * 16)):
        cli.answer(200, {})
        cli.run("stats", *arguments)
    first, second = cli.clients
    assert first["base_url"] == "http://127.0.0.1:8080"
    assert first["headers"] == {}
    assert second["base_url"] == "http://host:1"
    assert second["headers"] == {"authorization": "Bearer " + "t" * 16}


def test_environment(cli, monkeypatch):
    monkeypatch.setenv("DELAYSERVER_URL", "http://host:2")
    monkeypatch.setenv("DELAYSERVER_TOKEN", "from the environment")
    cli.answer(200, {})
    cli.run("stats")
    assert cli.clients[0]["base_url"] == "http://host:2"
    assert cli.clients[0]["headers"] == {"authorization": "Bearer from the environment"}


def problem(status, title, detail, **more):
    return {"type": "urn:x", "title": title, "status": status, "detail": detail, **more}


@pytest.mark.parametrize(
    ("status", "document", "sentence"),
    [
        (
            404,
            problem(404, "Not found", "there is no message '00ff'"),
            "error: Not found: there is no message '00ff'. Give the id or the key as",
        ),
        (
            409,
            problem(409, "The state does not allow it", "the message is delivered"),
            "error: The state does not allow it: the message is delivered.\n",
        ),
        (
            422,
            problem(
                422,
                "The request is invalid",
                "no such time",
                errors=[{"pointer": "/delay", "detail": "no such time"}],
            ),
            "error: The request is invalid: no such time (/delay). Correct it",
        ),
        (
            422,
            problem(
                422,
                "The request is invalid",
                "2 of 2 are invalid",
                errors=[{"pointer": "/0", "detail": "one"}, {"pointer": "/1", "detail": "two"}],
            ),
            "2 of 2 are invalid\n  /0: one\n  /1: two\nCorrect it",
        ),
        (401, problem(401, "A token is needed", "send it"), "Give the token with --token"),
    ],
)
def test_a_refusal_is_one_clear_sentence(cli, status, document, sentence):
    cli.answer(status, document)
    result = cli.run("get", "00ff")
    assert result.exit_code == 1
    assert sentence in result.stderr
    assert result.stdout == ""


def test_a_refusal_with_json_is_the_problem_document(cli):
    document = problem(409, "The state does not allow it", "…", state="delivered")
    cli.answer(409, document)
    result = cli.run("cancel", "00ff", "--json")
    assert result.exit_code == 1
    assert json.loads(result.stderr) == document


def test_retry_after_is_told(cli):
    cli.answer(503, problem(503, "Too much at once", "full"), **{"retry-after": "3"})
    assert "Try again in 3 s." in cli.run("stats").stderr


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        (httpx.ConnectError("refused"), "No server can be reached at http://127.0.0.1:8080"),
        (httpx.ReadTimeout("slow"), "did not answer within 30 s"),
        (httpx.Response(200, text="hello"), "is not a delay server (status 200"),
        (httpx.Response(404, json={"detail": "Not Found"}), "is not a delay server (status 404"),
    ],
)
def test_no_server_there(cli, answer, sentence):
    cli.answers.append(answer)
    result = cli.run("stats")
    assert result.exit_code == 3
    assert sentence in result.stderr


def test_not_an_address(cli):
    cli.answers.append(httpx.UnsupportedProtocol("no"))
    result = cli.run("stats", "--url", "127.0.0.1:8080")
    assert result.exit_code == 2
    assert "--url" in result.stderr


def test_the_server_may_be_said_before_the_command(cli):
    for arguments in (
        ("--url", "http://host:1", "stats"),
        ("--url", "http://host:0", "--token", "t" * 16, "stats", "--url", "http://host:2"),
    ):
        cli.answer(200, {})
        assert cli.run(*arguments).exit_code == 0
    first, second = cli.clients
    assert (first["base_url"], first["headers"]) == ("http://host:1", {})
    assert second["base_url"] == "http://host:2"
    assert second["headers"] == {"authorization": "Bearer " + "t" * 16}


def test_the_advice_fits_what_was_asked_for(cli):
    cli.answer(404, problem(404, "Not found", "there is no subscription 'x'"))
    result = cli.run("subscriptions", "show", "x")
    assert "`delayserver subscriptions` lists" in result.stderr
    assert "publish" not in result.stderr


@pytest.mark.parametrize(
    ("option", "arguments"),
    [
        ("--delay", ("publish", "a", "1", "--delay", "5x")),
        ("--at", ("publish", "a", "1", "--at", "tomorrow")),
        ("milliseconds, not seconds", ("publish", "a", "1", "--at", "1795192200")),
        ("milliseconds, not seconds", ("move", "00ff", "--at", "1795192200")),
        ("--lease", ("subscribe", "p", "a", "--lease", "5x")),
        ("--lease", ("pull", "p", "--lease", "5x")),
        ("--delay", ("nack", "p", "lease", "--delay", "5x")),
    ],
)
def test_a_wrong_duration_names_its_option_and_asks_nobody(cli, option, arguments):
    result = cli.run(*arguments)
    assert result.exit_code == 2
    assert option in " ".join(result.stderr.replace("│", " ").split())
    assert not cli.requests
