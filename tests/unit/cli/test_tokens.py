"""token create, list, revoke, export, import."""

import json

import pytest

from delayserver.security.tokens import TokenFile, TokenTable
from storage.files import OsFiles
from storage.shards import fix_shard_count


def table(directory):
    tokens = TokenTable(TokenFile(OsFiles(str(directory))), None, lambda: 0.0)
    tokens.refresh(0)
    return tokens


def test_a_token_works_as_it_is_printed(cli, tmp_path):
    directory = tmp_path / "not there yet"
    result = cli.run(
        *("token", "create", "shop", "--scope", "publish:order.*", "--scope", "observe"),
        *("--rate", "5", "--burst", "9", "--expires", "90d", "--data-dir", str(directory)),
    )
    assert result.exit_code == 0
    (text,) = [line for line in result.stdout.splitlines() if line.startswith("dly_")]
    assert "only time" in result.stdout
    token = table(directory).caller(text.encode()).token
    assert token.scopes == ("publish:order.*", "observe")
    assert (token.rate_per_s, token.burst) == (5, 9)
    assert token.expires_ms == token.created_ms + 90 * 86_400_000


def test_the_token_of_another_node_is_the_same_here(cli, tmp_path):
    first, second = tmp_path / "n1", tmp_path / "n2"
    made = cli.run(
        "token", "create", "shop", "--scope", "admin", "--json", "--data-dir", str(first)
    )
    text = json.loads(made.stdout)["token"]
    again = ("token", "create", "shop", "--scope", "observe", "--stdin", "--data-dir", str(second))
    taken = cli.run(*again, stdin=f" {text}\n")
    assert taken.exit_code == 0, taken.stderr
    assert text in taken.stdout
    assert table(second).caller(text.encode()).token.scopes == ("observe",)
    for given, said in ((text, "already"), ("dly_guess", "hexadecimal"), ("", "hexadecimal")):
        refused = cli.run(*again[:2], "other", *again[3:], stdin=given)
        assert refused.exit_code == 1 and said in refused.stderr


def test_the_tokens_of_one_node_are_brought_to_another(cli, tmp_path):
    first, second = tmp_path / "n1", tmp_path / "n2"
    made = cli.run(
        "token", "create", "shop", "--scope", "admin", "--json", "--data-dir", str(first)
    )
    text = json.loads(made.stdout)["token"]
    cli.run("token", "create", "here", "--scope", "admin", "--data-dir", str(second))
    exported = cli.run("token", "export", "--data-dir", str(first))
    assert exported.exit_code == 0 and text not in exported.stdout
    take = ("token", "import", "--data-dir", str(second))
    taken = cli.run(*take, stdin=exported.stdout)
    assert taken.stdout == "added: shop\nchanged: -\nremoved: -\n"
    assert table(second).caller(text.encode()).name == "shop"
    pruned = cli.run(*take, "--prune", "--json", stdin=exported.stdout)
    assert json.loads(pruned.stdout) == {"added": [], "changed": [], "removed": ["here"]}
    refused = cli.run(*take, stdin="tokens")
    assert refused.exit_code == 1 and "token export" in refused.stderr


def test_as_json(cli, tmp_path):
    def ask(*arguments):
        result = cli.run("token", *arguments, "--json", "--data-dir", str(tmp_path))
        assert result.exit_code == 0, result.stderr
        return json.loads(result.stdout)

    created = ask("create", "worker", "--scope", "consume:*")
    text = created.pop("token")
    assert table(tmp_path).caller(text.encode()).name == "worker"
    assert ask("list") == {"tokens": [created]}
    assert created["scopes"] == ["consume:*"]
    assert created["expired"] is False
    assert ask("revoke", "worker") == {"revoked": "worker"}
    assert ask("list") == {"tokens": []}


def test_a_table_without_the_tokens(cli, tmp_path):
    where = ("--data-dir", str(tmp_path))
    assert "There are no tokens" in cli.run("token", "list", *where).stdout
    created = cli.run("token", "create", "shop", "--scope", "admin", "--json", *where)
    cli.run("token", "create", "short", "--scope", "observe", "--expires", "1ms", *where)
    listed = cli.run("token", "list", *where).stdout
    assert "shop" in listed
    assert listed.count("expired") == 1
    assert json.loads(created.stdout)["token"] not in listed
    assert "is revoked" in cli.run("token", "revoke", "shop", *where).stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("create", "a", "--scope", "all"), "is not a scope"),
        (("create", "a b", "--scope", "admin"), "a name looks like"),
        (("create", "a", "--scope", "admin", "--expires", "soon"), "duration"),
        (("create", "a", "--scope", "admin", "--expires", "0"), "--expires"),
        (("create", "a", "--scope", "admin", "--rate", "-1"), "a rate"),
        (("revoke", "nobody"), "there is no token 'nobody'"),
    ],
)
def test_what_is_refused(cli, tmp_path, arguments, said):
    result = cli.run("token", *arguments, "--data-dir", str(tmp_path))
    assert result.exit_code == 1
    assert said in result.stderr
    result = cli.run("token", *arguments, "--json", "--data-dir", str(tmp_path))
    assert said in json.loads(result.stderr)["title"]


def test_a_scope_is_needed(cli, tmp_path):
    result = cli.run("token", "create", "a", "--data-dir", str(tmp_path))
    assert result.exit_code == 2
    assert "--scope" in result.stderr


def test_only_create_makes_a_directory(cli, tmp_path):
    for arguments in (("list",), ("revoke", "a")):
        result = cli.run("token", *arguments, "--data-dir", str(tmp_path / "typo"))
        assert result.exit_code == 1
        assert "typo" in result.stderr
        assert not (tmp_path / "typo").exists()


def test_the_commands_say_what_they_do(cli):
    shown = cli.run("token", "--help").stdout
    for name in ("create", "list", "revoke"):
        assert name in shown
        assert "$ delayserver token" in cli.run("token", name, "--help").stdout


def test_tokens_of_one_shard_are_refused(cli, tmp_path):
    fix_shard_count(OsFiles(str(tmp_path)), 2)
    (tmp_path / "shard-0001").mkdir()
    create = ("token", "create", "shop", "--scope", "admin", "--data-dir")
    result = cli.run(*create, str(tmp_path / "shard-0001"))
    assert result.exit_code == 1
    assert f"give {tmp_path}" in " ".join(result.stderr.split())
    assert cli.run(*create, str(tmp_path)).exit_code == 0
    assert (tmp_path / "TOKENS").is_file()
