"""publish-many and cancel-many: lines, chunks, and what is said about wrong ones."""

import json

import pytest


def lines(count, first=0):
    return [json.dumps({"subject": "s", "body": n}) for n in range(first, first + count)]


def batch(count, duplicates=0):
    return {"count": count, "duplicates": duplicates, "ids": [str(n) for n in range(count)]}


def test_lines_go_out_a_thousand_at_a_time_as_they_are(cli, tmp_path):
    file = tmp_path / "messages.ndjson"
    texts = lines(2500)
    file.write_text("\n".join(texts) + "\n")
    for count, duplicates in ((1000, 0), (1000, 400), (500, 0)):
        cli.answer(200, batch(count, duplicates))
    result = cli.run("publish-many", str(file), "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout) == {"published": 2100, "duplicates": 400}
    assert [request.content.decode() for request in cli.requests] == [
        "\n".join(texts[at : at + 1000]) for at in (0, 1000, 2000)
    ]
    assert cli.requests[0].headers["content-type"] == "application/x-ndjson"
    assert cli.requests[0].url.path == "/v1/messages/batch"


def test_standard_input_and_empty_lines(cli):
    cli.answer(200, batch(1))
    cli.answer(200, batch(1))
    result = cli.run("publish-many", stdin=f"\n{lines(1)[0]}\n\n  \n{lines(1)[0]}")
    assert result.exit_code == 0, result.output
    assert "published   2" in result.stdout
    assert len(cli.requests) == 2


def test_a_chunk_is_bounded_in_bytes_too(cli, monkeypatch):
    monkeypatch.setattr("delayserver.cli.bulk.BYTES_MAX", 100)
    for count in (2, 1):
        cli.answer(200, batch(count))
    cli.run("publish-many", stdin="\n".join(json.dumps("x" * 40) for _ in range(3)))
    assert [len(request.content.splitlines()) for request in cli.requests] == [2, 1]


def test_nothing_to_do(cli):
    assert "published   0" in cli.run("publish-many", stdin="").stdout


def test_wrong_lines_are_named_by_their_numbers_in_the_file(cli):
    cli.answer(200, batch(1000))
    errors = [{"pointer": "/1/delay", "detail": "no delay"}, {"pointer": "/2", "detail": "no JSON"}]
    problem = {"title": "The request is invalid", "status": 422, "detail": "2 of 4"}
    cli.answer(422, {**problem, "errors": errors})
    text = "\n\n" + "\n".join(lines(1004))
    result = cli.run("publish-many", stdin=text)
    assert result.exit_code == 1
    assert "The first 1,000 messages were taken, nothing behind them. 2 lines" in result.stderr
    assert "line 1004: no delay (/delay)" in result.stderr
    assert "line 1005: no JSON\n" in result.stderr
    cli.answer(422, {**problem, "errors": errors * 20})
    assert "and 20 more" in cli.run("publish-many", stdin=text).stderr
    cli.answer(422, {**problem, "errors": errors})
    document = json.loads(cli.run("publish-many", "--json", stdin=text).stderr)
    assert (document["taken"], document["first_line"], document["errors"]) == (0, 3, errors)


def test_a_refusal_that_names_no_line(cli):
    cli.answer(507, {"title": "The disk is nearly full", "status": 507, "detail": "no space"})
    result = cli.run("publish-many", stdin=lines(1)[0])
    assert result.exit_code == 1
    assert "first 0 messages were taken, nothing behind them. The disk is nearly" in result.stderr


def cancelled(**name):
    return {"id": None, "subject": None, "key": None, "state": "cancelled", "error": None, **name}


def test_cancel_by_ids_and_keys(cli):
    cli.answer(200, {"results": [cancelled(id="00ff"), cancelled(subject="s", key="k")]})
    result = cli.run("cancel-many", stdin='00ff\n{"subject": "s", "key": "k"}\n')
    assert result.exit_code == 0, result.output
    assert cli.asked == (
        "POST",
        "/v1/messages/cancel",
        {"ids": ["00ff"], "keys": [{"subject": "s", "key": "k"}]},
    )
    assert "cancelled  2" in result.stdout


def test_what_could_not_be_cancelled_is_listed(cli):
    results = [
        cancelled(id="00ff"),
        cancelled(id="00aa", state="delivered", error="the message is delivered"),
        cancelled(id="00bb", state=None, error="there is no message"),
    ]
    cli.answer(200, {"results": results})
    result = cli.run("cancel-many", stdin="00ff\n00aa\n00bb")
    assert result.exit_code == 1
    assert "00aa" in result.stdout
    assert "unknown    1" in result.stdout
    cli.answer(200, {"results": results})
    answer = json.loads(cli.run("cancel-many", "--json", stdin="00ff\n00aa\n00bb").stdout)
    assert {name: answer[name] for name in ("cancelled", "delivered", "unknown")} == {
        "cancelled": 1,
        "delivered": 1,
        "unknown": 1,
    }
    assert [one["id"] for one in answer["left"]] == ["00aa", "00bb"]


@pytest.mark.parametrize(
    ("stdin", "complaint"),
    [
        ("{", "line 1"),
        ('00ff\n{"subject": "s"}', "line 2"),
        ('{"subject": "s", "key": 1}', "line 1"),
    ],
)
def test_a_line_that_names_nothing(cli, stdin, complaint):
    result = cli.run("cancel-many", stdin=stdin)
    assert result.exit_code == 2
    assert complaint in result.stderr
    assert not cli.requests


@pytest.mark.parametrize("command", ["publish-many", "cancel-many"])
def test_a_file_that_cannot_be_read(cli, tmp_path, command):
    assert "cannot read" in cli.run(command, str(tmp_path / "none")).stderr
    (tmp_path / "binary").write_bytes(b"\xff\xfe\n")
    result = cli.run(command, str(tmp_path / "binary"))
    assert result.exit_code == 2
    assert "not UTF-8" in result.stderr


@pytest.mark.parametrize(
    ("command", "line", "answer"),
    [
        ("publish-many", '{"subject": "s", "body": 1}', {"count": 1000, "duplicates": 10}),
        ("cancel-many", "00ff", {"results": [{"state": "cancelled", "error": None}] * 1000}),
    ],
)
def test_ctrl_c_says_how_far_it_got(cli, tmp_path, command, line, answer):
    file = tmp_path / "lines"
    file.write_text(f"{line}\n" * 3000)
    cli.answer(200, answer)
    cli.answers.append(KeyboardInterrupt())
    result = cli.run(command, str(file))
    assert result.exit_code == 130
    assert "the first 1,000 lines were" in result.stderr
