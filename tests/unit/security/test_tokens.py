"""Tokens: their file, their scopes, and what a running server makes of a change."""

import random
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from delayserver.errors import (
    AccessError,
    ConflictError,
    InputError,
    NotFoundError,
    RateLimitedError,
)
from delayserver.records.direct import Destination
from delayserver.security import tokens as tokens_module
from delayserver.security.tokens import (
    NEW_TOKEN_ITEMS,
    TOKENS_FILE,
    TOKENS_MAX,
    Action,
    Caller,
    Token,
    TokenFile,
    TokenTable,
    check_scope,
    decode_tokens,
    digest_of,
)
from storage.errors import DamageError, FormatVersionError
from storage.files import OsFiles, replace_file
from tests.world.storage.files import SimulatedFiles

NOW_MS = 1_000_000


def counting() -> Callable[[int], bytes]:
    """Random bytes that are none."""
    numbers = iter(range(1, 1000))
    return lambda length: next(numbers).to_bytes(length, "big")


class Fixture:
    def __init__(self, files: SimulatedFiles | OsFiles | None = None) -> None:
        self.files = files or SimulatedFiles("data")
        self.file = TokenFile(self.files)
        self.random_bytes = counting()
        self.now_s = 0.0

    def create(self, name: str = "shop", *scopes: str, **options: float) -> bytes:
        _, text = self.file.create(
            name,
            scopes or ("admin",),
            now_ms=NOW_MS,
            random_bytes=self.random_bytes,
            **options,  # type: ignore[arg-type]
        )
        return text.encode()

    def table(self, setting: str | None = None) -> TokenTable:
        table = TokenTable(self.file, setting, lambda: self.now_s)
        table.refresh(NOW_MS)
        return table


@pytest.fixture
def tokens() -> Fixture:
    return Fixture()


# ---- the file ----------------------------------------------------------------------------------


def test_a_token_is_found_again_and_only_its_digest_is_stored(tokens: Fixture) -> None:
    text = tokens.create("shop", "publish:order.*", "observe", "observe")
    (token,) = tokens.file.read()
    assert (token.name, token.scopes) == ("shop", ("publish:order.*", "observe"))
    assert token.digest == digest_of(text).hex()
    data = tokens.file.read_bytes()
    assert data is not None
    assert text.removeprefix(b"dly_") not in data
    assert tokens.table().caller(text).token == token


def test_the_file_is_for_its_owner_alone(tmp_path: Path) -> None:
    tokens = Fixture(OsFiles(str(tmp_path)))
    left = tmp_path / (TOKENS_FILE + ".new")
    left.write_text("left by a process that was killed")
    left.chmod(0o644)
    tokens.create()
    tokens.create("second")
    assert (tmp_path / TOKENS_FILE).stat().st_mode & 0o777 == 0o600
    assert not left.exists()


def test_a_name_is_given_once(tokens: Fixture) -> None:
    tokens.create("shop")
    with pytest.raises(ConflictError, match="revoke it first"):
        tokens.create("shop")
    assert tokens.file.revoke("shop").name == "shop"
    tokens.create("shop")
    with pytest.raises(NotFoundError, match="'other'"):
        tokens.file.revoke("other")


def test_two_who_change_it_at_once(tokens: Fixture) -> None:
    with tokens.files.lock("TOKENS.lock"), pytest.raises(ConflictError, match="try again"):
        tokens.create()
    tokens.create()


@pytest.mark.parametrize("seed", range(20))
def test_what_was_answered_survives_a_power_loss(seed: int) -> None:
    files = SimulatedFiles("data", random.Random(seed))
    Fixture(files).create("first")
    after = TokenFile(files.crash())
    assert [token.name for token in after.read()] == ["first"]


@pytest.mark.parametrize(
    ("name", "scopes", "options", "named"),
    [
        ("a b", ["admin"], {}, "a name"),
        ("a", [], {}, "at least one scope"),
        ("a", ["admin:order"], {}, "not a scope"),
        ("a", ["admin"], {"rate_per_s": 0}, "a rate"),
        ("a", ["admin"], {"rate_per_s": 1e9}, "a rate"),
        ("a", ["admin"], {"burst": 5}, "a burst"),
        ("a", ["admin"], {"rate_per_s": 1, "burst": 0}, "a burst"),
    ],
)
def test_what_cannot_be(
    tokens: Fixture, name: str, scopes: list[str], options: dict[str, float], named: str
) -> None:
    with pytest.raises(InputError, match=named):
        tokens.file.create(
            name,
            scopes,
            now_ms=NOW_MS,
            random_bytes=tokens.random_bytes,
            **options,  # type: ignore[arg-type]
        )
    assert tokens.file.read_bytes() is None


HOSTS = ["target:*", "target:*.example.com", "target:a.b:80", "target:10.0.0.0/8", "target:[::1]:1"]
SCOPES = ["publish:*", "publish:a.*", "consume:a.b", "observe", "admin", *HOSTS]


@pytest.mark.parametrize("scope", SCOPES)
def test_scopes(scope: str) -> None:
    assert check_scope(scope) == scope


NO_HOSTS = ["target", "target:", "target:http://a", "target:a/b", "target:**"]


@pytest.mark.parametrize(
    "scope",
    ["", "publish", "publish:", "publish:a*", "admin:*", "observe:a", "read:a", "Admin", *NO_HOSTS],
)
def test_what_is_no_scope(scope: str) -> None:
    with pytest.raises(InputError, match="is not a scope"):
        check_scope(scope)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"tokens": []}',
        '{"version": 1}',
        '{"version": "1", "tokens": []}',
        "\xff",
    ],
)
def test_a_file_that_is_damaged_is_named(text: str) -> None:
    with pytest.raises(DamageError, match="TOKENS is damaged"):
        decode_tokens(text.encode("latin-1"), "data")


def test_a_file_of_a_newer_server_is_left_alone(tokens: Fixture) -> None:
    replace_file(tokens.files, TOKENS_FILE, b'{"version": 2, "tokens": "other"}')
    with pytest.raises(FormatVersionError, match="version 2"):
        tokens.create()
    assert tokens.file.read_bytes() == b'{"version": 2, "tokens": "other"}'


def test_there_is_a_limit(tokens: Fixture, monkeypatch: pytest.MonkeyPatch) -> None:
    assert TOKENS_MAX > 1000
    monkeypatch.setattr("delayserver.security.tokens.TOKENS_MAX", 1)
    tokens.create("a")
    with pytest.raises(ConflictError, match="the limit"):
        tokens.create("b")


# ---- what a token may --------------------------------------------------------------------------


def caller(tokens: Fixture, *scopes: str, **options: float) -> Caller:
    text = tokens.create("one", *scopes, **options)
    return tokens.table().caller(text)


def test_a_scope_allows_its_action_for_its_subjects(tokens: Fixture) -> None:
    one = caller(tokens, "publish:order.*", "publish:single", "consume:envelope.refund")
    assert one.may(Action.PUBLISH, "order.unpaid")
    assert one.may(Action.PUBLISH, "order.unpaid.*")
    assert one.may(Action.PUBLISH, "single")
    assert one.may(Action.CONSUME, "envelope.refund")
    assert not one.may(Action.CONSUME, "order.unpaid")
    assert not one.may(Action.PUBLISH, "envelope.refund")
    assert not one.may(Action.PUBLISH, "*")
    assert not one.may(Action.OBSERVE)
    assert not one.may(Action.ADMIN)
    assert not one.is_admin


def test_an_admin_may_everything(tokens: Fixture) -> None:
    one = caller(tokens, "admin")
    assert all(one.may(action, "*") for action in Action)
    one.require((Action.ADMIN,))


@pytest.mark.parametrize(
    ("scopes", "allowed"),
    [
        (["publish:*"], ""),
        (["target:*"], "a.example.com 10.0.0.1 b"),
        (["target:*.example.com"], "a.example.com"),
        (["target:10.0.0.0/8", "target:b:80"], "10.0.0.1 b"),
        (["target:b:81"], ""),
        (["target:b", "target:*"], "a.example.com 10.0.0.1 b"),
        (["admin"], "a.example.com 10.0.0.1 b"),
    ],
)
def test_a_scope_allows_hosts(tokens: Fixture, scopes: list[str], allowed: str) -> None:
    one = caller(tokens, *scopes)
    one.require_target(None)
    for host in ("a.example.com", "10.0.0.1", "b"):
        to = Destination(f"http://{host}/x", "s")
        if host in allowed.split():
            one.require_target(to)
        else:
            with pytest.raises(AccessError, match=f"'one' has no scope for target:{host}$"):
                one.require_target(to)


def test_what_is_missing_is_named(tokens: Fixture) -> None:
    one = caller(tokens, "observe")
    one.require((Action.OBSERVE,))
    with pytest.raises(
        AccessError, match="'one' has no scope for publish:a or consume:a"
    ) as caught:
        one.require((Action.PUBLISH, Action.CONSUME), "a")
    assert caught.value.authenticated
    with pytest.raises(AccessError, match="no scope for admin"):
        one.require((Action.ADMIN,))


def test_a_rate_is_kept(tokens: Fixture) -> None:
    one = caller(tokens, "admin", rate_per_s=10, burst=20)
    for _ in range(20):
        one.admit()
    with pytest.raises(RateLimitedError, match="10 requests") as caught:
        one.admit()
    assert 0 < caught.value.retry_after_ms <= 101
    tokens.now_s += 0.11
    one.admit()
    one.count(100)  # a batch of 100 came with it
    with pytest.raises(RateLimitedError) as caught:
        one.admit()
    assert 9_000 < caught.value.retry_after_ms < 11_000


def test_without_a_rate_nothing_is_counted(tokens: Fixture) -> None:
    one = caller(tokens, "admin")
    for _ in range(100):
        one.admit()
        one.count(10_000)


# ---- a server that runs ------------------------------------------------------------------------


def test_a_server_without_tokens_asks_nobody(tokens: Fixture) -> None:
    assert tokens.table().is_open
    assert not tokens.table("a token of 16 letters").is_open


def test_a_change_is_seen_at_the_next_look(tokens: Fixture) -> None:
    table = tokens.table()
    first = tokens.create("first")
    second = tokens.create("second", rate_per_s=1)
    with pytest.raises(AccessError):
        table.caller(first)
    table.refresh(NOW_MS)
    assert not table.is_open
    kept = table.caller(second)
    tokens.file.revoke("first")
    table.refresh(NOW_MS)
    with pytest.raises(AccessError):
        table.caller(first)
    assert table.caller(second) is kept  # with what is left of its rate


def test_a_token_expires(tokens: Fixture) -> None:
    text = tokens.create("short", expires_ms=NOW_MS + 10)
    lasting = tokens.create("lasting")
    table = tokens.table()
    table.refresh(NOW_MS + 9)
    assert table.caller(text).name == "short"
    table.refresh(NOW_MS + 10)
    with pytest.raises(AccessError):
        table.caller(text)
    assert table.caller(lasting).name == "lasting"


def test_what_stood_in_the_file_before_is_not_decoded_again(
    tokens: Fixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(5):
        tokens.create(f"t{number}", expires_ms=NOW_MS + 10 + number)
    table = tokens.table()
    decoded: list[str] = []
    decode = tokens_module._token_of

    def counting(raw: bytes, index: int) -> Token:
        token = decode(raw, index)
        decoded.append(token.name)
        return token

    monkeypatch.setattr(tokens_module, "_token_of", counting)
    for number in range(3):
        table.refresh(NOW_MS + 10 + number)
        assert (len(table), decoded) == (4 - number, [])
    tokens.create("new")
    decoded.clear()
    work = table.refreshing(NOW_MS + 12)
    assert sum(work) == NEW_TOKEN_ITEMS
    assert (len(table), decoded) == (3, ["new"])
    table.refresh(NOW_MS + 9)  # a clock that is set back lets nobody in again
    assert len(table) == 3


def test_what_changes_holds_at_one_moment(tokens: Fixture) -> None:
    """However long it takes to read."""
    table = tokens.table()
    texts = [tokens.create(f"t{number}") for number in range(5)]
    work = table.refreshing(NOW_MS)
    for _ in range(5):
        next(work)
        assert len(table) == 0
    assert next(work, None) is None
    assert [table.caller(text).name for text in texts] == [f"t{number}" for number in range(5)]


def test_revoking_the_last_one_does_not_open_the_server(tokens: Fixture) -> None:
    tokens.create("only")
    table = tokens.table()
    tokens.file.revoke("only")
    table.refresh(NOW_MS)
    assert not table.is_open
    assert len(table) == 0
    tokens.files.unlink(TOKENS_FILE)
    table.refresh(NOW_MS)
    assert not table.is_open


def test_a_file_that_cannot_be_read_changes_nothing(tokens: Fixture) -> None:
    text = tokens.create("kept")
    table = tokens.table()
    replace_file(tokens.files, TOKENS_FILE, b"garbage")
    with pytest.raises(DamageError):
        table.refresh(NOW_MS)
    assert table.caller(text).name == "kept"


def test_the_token_of_the_settings_is_one_of_them(tokens: Fixture) -> None:
    text = tokens.create("shop", "observe")
    table = tokens.table("a token of 16 letters")
    assert table.caller(b"a token of 16 letters").is_admin
    assert not table.caller(text).is_admin
    with pytest.raises(AccessError, match="not valid"):
        table.caller(digest_of(text).hex().encode())


# ---- calls that wait ---------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["revoked", "expired"])
def test_what_waits_ends_with_its_token_and_with_no_other(tokens: Fixture, end: str) -> None:
    texts = [
        tokens.create("going", **{"expires_ms": NOW_MS + 1} if end == "expired" else {}),
        tokens.create("staying"),
    ]
    table = tokens.table()
    ended: list[str] = []
    ends = [lambda name=name: ended.append(name) for name in ("first", "done", "other")]
    going, staying = (table.caller(text) for text in texts)
    for caller, one in zip((going, going, staying), ends, strict=True):
        table.add_wait(caller, one)
    table.remove_wait(going, ends[1])
    table.refresh(NOW_MS)
    assert ended == []
    if end == "revoked":
        tokens.file.revoke("going")
    for _ in range(2):
        table.refresh(NOW_MS + 1)
        assert ended == ["first"]
    table.remove_wait(going, ends[0])
    table.remove_wait(staying, ends[2])
    assert table._waits == {}


def test_what_waits_without_a_token_ends_when_one_is_asked_for(tokens: Fixture) -> None:
    table = tokens.table()
    ended: list[bool] = []
    table.add_wait(None, lambda: ended.append(True))
    table.refresh(NOW_MS)
    assert ended == []
    tokens.create()
    table.refresh(NOW_MS)
    assert ended == [True]


@pytest.mark.parametrize(
    ("stored", "name", "said"),
    [
        ({"name": "a", "digest": "00" * 32, "scopes": ["operate"], "created_ms": 1}, "a", "scope"),
        ({"name": "a", "digest": "00", "scopes": ["admin"], "created_ms": 1}, "a", "digest"),
        (
            {"name": "a", "digest": "00" * 32, "scopes": [], "created_ms": 1, "from": "10.0.0.0/8"},
            *("a", "`from`"),
        ),
        ({}, "unreadable-0", "missing required field"),
    ],
)
def test_a_token_that_is_not_understood_harms_only_itself(
    stored: dict[str, object], name: str, said: str, tmp_path: Path
) -> None:
    file = TokenFile(OsFiles(str(tmp_path)))
    data = msgspec.json.encode({"version": 1, "tokens": [stored]})
    (tmp_path / TOKENS_FILE).write_bytes(data)
    _, text = file.create("b", ["admin"], now_ms=0, random_bytes=bytes)
    table = TokenTable(file, None, lambda: 0.0)
    table.refresh(0)
    assert table.caller(text.encode()).name == "b" and len(table) == 1
    assert table.not_understood.keys() == {name} and said in table.not_understood[name]
    kept = msgspec.json.decode((tmp_path / TOKENS_FILE).read_bytes())["tokens"]
    assert kept[0] == stored and kept[1]["name"] == "b"
    assert file.revoke(name).name == name
    table.refresh(0)
    assert not table.not_understood


def test_tokens_of_one_directory_are_the_same_in_another() -> None:
    first, second = Fixture(), Fixture()
    text = first.create("shop", "publish:order.*")
    first.file.create(
        "short", ["observe"], now_ms=1, random_bytes=first.random_bytes, expires_ms=9, rate_per_s=2
    )
    assert second.file.take(first.file.export()) == (["shop", "short"], [], [])
    assert second.file.read() == first.file.read()
    assert second.table().caller(text).name == "shop"
    assert second.file.take(first.file.export()) == ([], [], [])


@pytest.mark.parametrize("prune", [False, True])
def test_a_token_of_the_same_name_is_replaced_and_others_stay_unless_they_are_pruned(
    prune: bool,
) -> None:
    first, second = Fixture(), Fixture()
    second.random_bytes = bytes
    old = second.create("shop", "observe")
    second.random_bytes = lambda length: b"\1" * length
    second.create("here", "observe")
    first.create("shop", "admin")
    taken = second.file.take(first.file.export(), prune=prune)
    assert taken == ([], ["shop"], ["here"] if prune else [])
    with pytest.raises(AccessError):
        second.table().caller(old)
    assert [token.name for token in second.file.read()] == ["shop"] + ["here"] * (not prune)


def test_tokens_that_cannot_be_taken_change_nothing() -> None:
    first, second = Fixture(), Fixture()
    first.create("shop", "admin")
    second.create("other", "admin")  # the same random bytes
    before = second.file.read()
    exported = first.file.export()
    with pytest.raises(ConflictError, match="is the token 'other' already"):
        second.file.take(exported)
    for data, said in (
        (b"", "not what `token export` prints"),
        (b'{"version": 9, "tokens": []}', "not what `token export` prints"),
        (b'{"version": 1, "tokens": []}', "no tokens"),
        (exported.replace(b'"admin"', b'"paint"'), "'shop' is not understood"),
        (exported.replace(b'"shop"', b'"a b"'), "is no name"),
    ):
        with pytest.raises(InputError, match=said):
            second.file.take(data)
    assert second.file.read() == before
