"""Tokens: the rights of each caller, and its rate.

    DIR/TOKENS    JSON, mode 0600: names, scopes and SHA-256 digests; never a token itself

The command `delayserver token` writes the file, before the first start as well as while a server
runs. The server looks at the file once a second, so a new token works, and a revoked one stops
working, without a restart. A token is 32 random bytes, so its digest needs no salt and no slow
hash. Digests are found by a hash whose key is secret to the process, and then compared in constant
time.

Once a server has had a token, it asks every caller for one. Revoking the last token closes the
server; it does not open it.

Each node of a cluster has its own file. An operator brings a changed file to the other nodes
(`TokenFile.export`, `TokenFile.take`). The file holds digests, so a token is the same everywhere,
and its text need not be kept.

Cost: one SHA-256 and one dictionary access per request, 1 µs. A token that expires takes as long
with 10,000 others as alone. When the file has changed, its new tokens are decoded, 20 µs each.
Threads: belongs to the event loop.
"""

import hashlib
import hmac
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from enum import StrEnum
from heapq import heapify, heappop
from typing import Any, Final, NamedTuple

import msgspec

from delayserver.errors import (
    AccessError,
    ConflictError,
    InputError,
    NotFoundError,
    RateLimitedError,
)
from delayserver.records.direct import Destination
from delayserver.records.subjects import is_pattern, matches
from delayserver.records.understanding import reason_of
from delayserver.security.targets import TargetPolicy, split_url
from delayserver.slices import Work, at_once
from delayserver.timers.rates import TokenBucket
from delayserver.wire.fields import SUBJECT_PATTERN
from storage.errors import DamageError, DirectoryLockedError, FormatVersionError
from storage.files import PRIVATE_MODE, Files, replace_file

TOKENS_FILE: Final = "TOKENS"
TOKENS_LOCK_FILE: Final = "TOKENS.lock"
TOKENS_MAX: Final = 10_000
FILE_MAX_BYTES: Final = 64 * 1024 * 1024
TOKEN_PREFIX: Final = "dly_"
"""Lets a scanner of source code recognise a token."""
TOKEN_RANDOM_BYTES: Final = 32
SETTING_NAME: Final = "--token"
"""The name of the token in the settings. No token of a file may have it."""
RATE_MAX: Final = 1_000_000
NEW_TOKEN_ITEMS: Final = 2
"""The cost of a token that is new in the file, as `slices` counts."""
_VERSION = 1
_NAME = re.compile(SUBJECT_PATTERN)
_TEXT = re.compile(rf"{TOKEN_PREFIX}[0-9a-f]{{{2 * TOKEN_RANDOM_BYTES}}}")


class Action(StrEnum):
    """The right that a scope gives."""

    PUBLISH = "publish"
    """Publish, look up, move and cancel messages of a subject."""
    CONSUME = "consume"
    """Subscribe to a subject, receive its messages, look them up."""
    TARGET = "target"
    """Name the hosts that the caller's messages may go to."""
    OBSERVE = "observe"
    """Metrics, statistics and the forecast."""
    ADMIN = "admin"
    """Everything."""


SCOPE_HELP: Final = "publish:PATTERN, consume:PATTERN, target:HOST, observe or admin"


def check_scope(text: str) -> str:
    """The scope itself. Raises InputError."""
    action, colon, pattern = text.partition(":")
    match action:
        case Action.PUBLISH | Action.CONSUME:
            is_scope = bool(colon) and is_pattern(pattern)
        case Action.TARGET:
            is_scope = _is_hosts(pattern)
        case Action.OBSERVE | Action.ADMIN:
            is_scope = not colon
        case _:
            is_scope = False
    if is_scope:
        return text
    raise InputError(
        f"{text!r} is not a scope: {SCOPE_HELP}, where PATTERN is a subject, a prefix that ends "
        "in .*, or *, and HOST is hooks.example.com, *.example.com, 10.0.0.0/8 or *"
    )


def _is_hosts(pattern: str) -> bool:
    try:
        TargetPolicy((pattern,))
    except InputError:
        return pattern == "*"
    return True


class Token(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """A token as the file has it."""

    name: str
    digest: str
    """SHA-256 of the token, hexadecimal."""
    scopes: tuple[str, ...]
    created_ms: int
    expires_ms: int | None = None
    rate_per_s: float | None = None
    """Requests, or messages of a batch, per second; None: no limit."""
    burst: int | None = None
    """How many requests may come at once; None: as many as in a second, and at least one."""

    def is_valid(self, now_ms: int) -> bool:
        """Whether it has not expired."""
        return self.expires_ms is None or now_ms < self.expires_ms


class StandInToken(Token, frozen=True):
    """Stands for a token that is not understood here (a scope of a newer server), with the fields
    that can be read. It admits no caller, is kept as it is stored, and can be revoked."""

    stored: bytes = b""
    problem: str = ""
    """Why it is not understood."""

    def is_valid(self, now_ms: int) -> bool:
        """A stand-in is never valid."""
        return False


class _Document(msgspec.Struct):
    version: int
    tokens: tuple[msgspec.Raw, ...]


class TakenTokens(NamedTuple):
    """The names of tokens that changed when the tokens of another file were taken."""

    added: list[str]
    changed: list[str]
    removed: list[str]


class TokenFile:
    """The tokens of one data directory. A writer reads the file first, under a lock."""

    def __init__(self, files: Files) -> None:
        self._files = files

    def read_bytes(self) -> bytes | None:
        """The file as it is; None if there is none. Raises DiskError."""
        try:
            file = self._files.open(TOKENS_FILE)
        except FileNotFoundError:
            return None
        try:
            return file.pread(FILE_MAX_BYTES, 0)
        finally:
            file.close()

    def read(self) -> tuple[Token, ...]:
        """All tokens, oldest first. Raises DiskError, DamageError, FormatVersionError."""
        data = self.read_bytes()
        return () if data is None else decode_tokens(data, self._files.root)

    def create(
        self,
        name: str,
        scopes: Sequence[str],
        *,
        now_ms: int,
        random_bytes: Callable[[int], bytes],
        expires_ms: int | None = None,
        rate_per_s: float | None = None,
        burst: int | None = None,
        text: str | None = None,
    ) -> tuple[Token, str]:
        """Add a token; returns it and its text, which cannot be read again later. `text`: the text
        of a token that was made before, for another node of a cluster, say.

        Raises InputError, ConflictError, StorageError."""
        if not _NAME.fullmatch(name):
            raise InputError(f"a name looks like {SUBJECT_PATTERN}", "/name")
        if not scopes:
            raise InputError(f"give at least one scope: {SCOPE_HELP}", "/scopes")
        if rate_per_s is not None and not 0 < rate_per_s <= RATE_MAX:
            raise InputError(f"a rate is more than 0 and at most {RATE_MAX} a second", "/rate")
        if burst is not None and (rate_per_s is None or not 1 <= burst <= RATE_MAX):
            raise InputError(f"a burst is 1 to {RATE_MAX}, and goes with a rate", "/burst")
        secret = TOKEN_PREFIX + random_bytes(TOKEN_RANDOM_BYTES).hex() if text is None else text
        if not _TEXT.fullmatch(secret):
            # Any other text could be guessed, and its digest has no salt.
            digits = 2 * TOKEN_RANDOM_BYTES
            reason = f"a token is {TOKEN_PREFIX} and {digits} hexadecimal digits, as it was made"
            raise InputError(reason, "/token")
        token = Token(
            name,
            digest_of(secret.encode()).hex(),
            tuple(dict.fromkeys(check_scope(scope) for scope in scopes)),
            now_ms,
            expires_ms,
            rate_per_s,
            burst,
        )

        def add(tokens: tuple[Token, ...]) -> tuple[Token, ...]:
            if any(one.name == name for one in tokens):
                raise ConflictError(f"there is a token {name!r} already; revoke it first")
            if same := next((one.name for one in tokens if one.digest == token.digest), None):
                raise ConflictError(f"it is the token {same!r} already")
            if len(tokens) >= TOKENS_MAX:
                raise ConflictError(f"there are {TOKENS_MAX} tokens, the limit; revoke some")
            return (*tokens, token)

        self._change(add)
        return token, secret

    def revoke(self, name: str) -> Token:
        """Remove a token and return it. Raises NotFoundError, StorageError."""
        revoked: list[Token] = []

        def remove(tokens: tuple[Token, ...]) -> tuple[Token, ...]:
            revoked.extend(one for one in tokens if one.name == name)
            if not revoked:
                raise NotFoundError(f"there is no token {name!r}")
            return tuple(one for one in tokens if one.name != name)

        self._change(remove)
        return revoked[0]

    def export(self) -> bytes:
        """All tokens, in the form of the file, for `take` of another directory. Raises
        StorageError."""
        return _encoded(self.read())

    def take(self, data: bytes, *, prune: bool = False) -> TakenTokens:
        """Take over the tokens of a file that `export` has written, each as it is there, in place
        of one of the same name. `prune`: delete all other tokens.

        Raises InputError, ConflictError, StorageError; nothing is changed then."""
        try:
            found = decode_tokens(data, "the input")
        except (DamageError, FormatVersionError) as error:
            raise InputError(f"the input is not what `token export` prints: {error}") from error
        for token in found:
            if isinstance(token, StandInToken):
                raise InputError(f"the token {token.name!r} is not understood: {token.problem}")
            if not _NAME.fullmatch(token.name):
                raise InputError(f"{token.name!r} is no name: it looks like {SUBJECT_PATTERN}")
        if not found:
            raise InputError("the input has no tokens; revoke those of here one by one")
        taken = TakenTokens([], [], [])

        def replaced(tokens: tuple[Token, ...]) -> tuple[Token, ...]:
            by_name = {} if prune else {token.name: token for token in tokens}
            by_name |= {token.name: token for token in found}
            names: dict[str, str] = {}
            for token in by_name.values():
                if not isinstance(token, StandInToken):
                    other = names.setdefault(token.digest, token.name)
                    if other != token.name:
                        raise ConflictError(f"{token.name!r} is the token {other!r} already")
            if len(by_name) > TOKENS_MAX:
                raise ConflictError(f"there are {TOKENS_MAX} tokens, the limit; revoke some")
            before = {token.name: token for token in tokens}
            taken.added.extend(by_name.keys() - before.keys())
            taken.removed.extend(before.keys() - by_name.keys())
            taken.changed.extend(
                name for name, one in by_name.items() if before.get(name, one) != one
            )
            return tuple(by_name.values())

        self._change(replaced)
        return TakenTokens(*map(sorted, taken))

    def _change(self, change: Callable[[tuple[Token, ...]], tuple[Token, ...]]) -> None:
        try:
            with self._files.lock(TOKENS_LOCK_FILE):
                data = _encoded(change(self.read()))
                replace_file(self._files, TOKENS_FILE, data, mode=PRIVATE_MODE)
        except DirectoryLockedError as error:
            raise ConflictError("another command is changing the tokens; try again") from error


def _encoded(tokens: Iterable[Token]) -> bytes:
    document = _Document(_VERSION, tuple(map(_stored, tokens)))
    return msgspec.json.format(msgspec.json.encode(document), indent=1) + b"\n"


def decode_tokens(data: bytes, where: str) -> tuple[Token, ...]:
    """The content of a token file. Raises DamageError, FormatVersionError."""
    tokens = enumerate(_split_tokens(data, where))
    return tuple(_token_of(data, index) for index, data in tokens)


def _split_tokens(data: bytes, where: str) -> list[bytes]:
    """Each token of a file as it stands there. Raises DamageError, FormatVersionError."""
    try:
        version = msgspec.json.decode(data, type=dict[str, msgspec.Raw])["version"]
        if (found := msgspec.json.decode(version, type=int)) > _VERSION:
            raise FormatVersionError(f"{where}/{TOKENS_FILE}", found, _VERSION)
        return list(map(bytes, msgspec.json.decode(data, type=_Document).tokens))
    except (KeyError, ValueError, msgspec.MsgspecError) as error:
        raise DamageError(TOKENS_FILE, 0, f"not a token file ({error})") from error


def _token_of(data: bytes, index: int) -> Token:
    """The token from its stored form, number `index` of the file, or a stand-in. Never raises."""
    try:
        token = msgspec.json.decode(data, type=Token)
        if len(bytes.fromhex(token.digest)) != hashlib.sha256().digest_size:
            raise ValueError("its digest is none")
        for scope in token.scopes:
            check_scope(scope)
    except Exception as error:
        return _stand_in(data, index, reason_of(error))
    return token


def _stand_in(data: bytes, index: int, problem: str) -> StandInToken:
    known: dict[str, Any] = {"name": f"unreadable-{index}", "digest": "", "scopes": ()}
    known |= {"created_ms": 0}
    with suppress(msgspec.MsgspecError, ValueError):
        parts = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
        for field in msgspec.structs.fields(Token):
            with suppress(KeyError, msgspec.MsgspecError, ValueError):
                known[field.name] = msgspec.json.decode(parts[field.name], type=field.type)
    return StandInToken(**known, stored=data, problem=problem)


def _stored(token: Token) -> msgspec.Raw:
    if isinstance(token, StandInToken):
        return msgspec.Raw(token.stored)
    return msgspec.Raw(msgspec.json.encode(token))


def digest_of(token: bytes) -> bytes:
    """The digest under which the server knows a token."""
    return hashlib.sha256(token).digest()


class Caller:
    """A caller that showed a valid token."""

    def __init__(
        self,
        token: Token,
        monotonic_s: Callable[[], float],
        taken: Callable[[bytes, int], None] | None = None,
    ) -> None:
        """`taken`: gets the digest and the count of each request that a rate counts here."""
        self.token = token
        self._monotonic_s = monotonic_s
        self.name = token.name
        self.digest = bytes.fromhex(token.digest)
        patterns: dict[str, list[str]] = {}
        for scope in token.scopes:
            action, _, pattern = scope.partition(":")
            patterns.setdefault(action, []).append(pattern or "*")
        self.is_admin = Action.ADMIN in patterns
        self._patterns = patterns
        hosts = patterns.get(Action.TARGET, [])
        self._targets = TargetPolicy(hosts) if hosts and "*" not in hosts else None
        """Hosts that a message may be sent to; None: all or none, as `patterns` says."""
        rate = token.rate_per_s
        self._bucket = TokenBucket(rate, token.burst or max(1.0, rate)) if rate else None
        self._taken = taken

    def may(self, action: Action, subject: str = "") -> bool:
        """Whether a scope allows that, with a subject or a pattern of subjects."""
        if self.is_admin:
            return True
        for pattern in self._patterns.get(action, ()):  # noqa: SIM110 (any() takes twice as long)
            if matches(pattern, subject):
                return True
        return False

    def patterns(self, action: Action) -> tuple[str, ...]:
        """The patterns of the subjects with which that is allowed; empty: with all, to `admin`."""
        patterns = self._patterns.get(action, ())
        return () if self.is_admin or "*" in patterns else tuple(patterns)

    def require_some(self, action: Action) -> None:
        """Raises AccessError (403) unless that is allowed with some subject."""
        if not self.is_admin and action not in self._patterns:
            raise AccessError(
                f"the token {self.name!r} has no scope for {action}", authenticated=True
            )

    def require(self, actions: Iterable[Action], subject: str = "") -> None:
        """Raises AccessError (403) unless one of these is allowed."""
        for action in actions:
            if self.may(action, subject):
                return
        needed = " or ".join(f"{action}:{subject}" if subject else action for action in actions)
        raise AccessError(f"the token {self.name!r} has no scope for {needed}", authenticated=True)

    def require_target(self, to: Destination | None) -> None:
        """Raises AccessError (403) if a message may not say that it goes there; None: it does not
        say."""
        if to is None or self.is_admin:
            return
        target = split_url(to.url)[0]
        if self._targets is None:
            if Action.TARGET in self._patterns:
                return
        else:
            with suppress(InputError):
                self._targets.check_target(target)
                return
        raise AccessError(
            f"the token {self.name!r} has no scope for {Action.TARGET}:{target.host}",
            authenticated=True,
        )

    def admit(self) -> None:
        """Count one request. Raises RateLimitedError."""
        self.check_rate()
        self._take(1)

    def check_rate(self) -> None:
        """Raises RateLimitedError if no request may be counted now."""
        if self._bucket is not None:
            wait_s = self._bucket.wait_s(self._monotonic_s())
            if wait_s:
                raise RateLimitedError(
                    f"the token {self.name!r} may make {self.token.rate_per_s:g} requests, or "
                    "publish as many messages, per second",
                    int(wait_s * 1000) + 1,
                )

    def count(self, messages: int) -> None:
        """Count the messages of a batch, one of which is counted already; the requests after this
        one pay for them."""
        self._take(max(0, messages - 1))

    def count_elsewhere(self, count: int) -> None:
        """Count requests that another process has let in."""
        if self._bucket is not None:
            self._bucket.take(count, self._monotonic_s())

    def _take(self, count: int) -> None:
        if self._bucket is not None and count:
            self._bucket.take(count, self._monotonic_s())
            if self._taken is not None:
                self._taken(self.digest, count)


class TokenTable:
    """The tokens that are valid now. `setting`: one with all rights that is not in the file.

    `monotonic_s`: a clock that cannot be set, for the rates."""

    def __init__(
        self, file: TokenFile, setting: str | None, monotonic_s: Callable[[], float]
    ) -> None:
        self._file = file
        self._monotonic_s = monotonic_s
        self._data: bytes | None = None
        self._by_raw: dict[bytes, Caller] = {}
        """All tokens of the file that are understood, expired ones too, by their stored form."""
        self._expiries: list[tuple[int, int, Caller]] = []
        """A heap of the expiry times of valid tokens; equal times stand in the order of the
        file."""
        self.not_understood: dict[str, str] = {}
        """By name, why a token of the file is not understood: it admits no caller."""
        self._callers: dict[bytes, Caller] = {}
        """The callers with a valid token, by digest."""
        self._waits: dict[Caller | None, set[Callable[[], None]]] = {}
        self._setting: Caller | None = None
        self.on_taken: Callable[[bytes, int], None] | None = None
        """If other processes count with us, they are told here of each count against the rate of a
        token, by its digest."""
        self.is_open = setting is None
        """Whether the server asks for no token."""
        if setting is not None:
            digest = digest_of(setting.encode()).hex()
            self._setting = Caller(Token(SETTING_NAME, digest, (Action.ADMIN,), 0), monotonic_s)
            self._callers[self._setting.digest] = self._setting

    def refresh(self, now_ms: int) -> None:
        """Look at the file again. Raises StorageError: then all is as it was before."""
        at_once(self.refreshing(now_ms))

    def refreshing(self, now_ms: int) -> Work[None]:
        """As `refresh`, in slices; all changes take effect at one moment, after the last of them.

        A token that stood in the file before is not decoded again."""
        data = self._file.read_bytes()
        if data is not None:
            self.is_open = False
        if data != self._data:
            callers: dict[bytes, Caller] = {}
            not_understood: dict[str, str] = {}
            for index, raw in enumerate([] if data is None else _split_tokens(data, TOKENS_FILE)):
                caller = self._by_raw.get(raw)
                if caller is None:
                    token = _token_of(raw, index)
                    yield NEW_TOKEN_ITEMS
                    if isinstance(token, StandInToken):
                        not_understood[token.name] = token.problem
                        continue
                    caller = self._caller_of(token)
                callers[raw] = caller
            self._data, self._by_raw, self.not_understood = data, callers, not_understood
            self._take_over([one for one in callers.values() if one.token.is_valid(now_ms)])
        self._expire(now_ms)

    def _caller_of(self, token: Token) -> Caller:
        known = self._callers.get(bytes.fromhex(token.digest))
        if known is not None and known.token == token:
            return known  # with the tokens that its bucket still holds
        return Caller(token, self._monotonic_s, self._on_taken)

    def _take_over(self, callers: list[Caller]) -> None:
        self._expiries = [
            (one.token.expires_ms, place, one)
            for place, one in enumerate(callers)
            if one.token.expires_ms is not None
        ]
        heapify(self._expiries)
        if self._setting is not None:
            callers.append(self._setting)
        self._callers = {caller.digest: caller for caller in callers}
        self._end_waits()

    def _expire(self, now_ms: int) -> None:
        """Drop the tokens that have expired, and no others."""
        expired = False
        while self._expiries and self._expiries[0][0] <= now_ms:
            caller = heappop(self._expiries)[-1]
            if self._callers.get(caller.digest) is caller:
                del self._callers[caller.digest]
                expired = True
        if expired:
            self._end_waits()

    def _end_waits(self) -> None:
        for caller in [one for one in self._waits if not self._is_valid(one)]:
            for end in self._waits.pop(caller):
                end()

    def _on_taken(self, digest: bytes, count: int) -> None:
        if self.on_taken is not None:
            self.on_taken(digest, count)

    def count_elsewhere(self, digest: bytes, count: int) -> None:
        """Count requests that another process has let in with a token, if it is valid here."""
        caller = self._callers.get(digest)
        if caller is not None:
            caller.count_elsewhere(count)

    def _is_valid(self, caller: Caller | None) -> bool:
        """Whether a caller that showed a token, or none, would still be admitted."""
        return self.is_open if caller is None else self._callers.get(caller.digest) is caller

    def add_wait(self, caller: Caller | None, end: Callable[[], None]) -> None:
        """Call `end` when the token of a waiting call is not valid any more, or when calls without
        a token are refused. Call `remove_wait` when the call does not wait any more."""
        self._waits.setdefault(caller, set()).add(end)

    def remove_wait(self, caller: Caller | None, end: Callable[[], None]) -> None:
        """Undo `add_wait`: the call does not wait any more."""
        waits = self._waits.get(caller)
        if waits is not None:
            waits.discard(end)
            if not waits:
                del self._waits[caller]

    def __len__(self) -> int:
        return len(self._callers)

    def __iter__(self) -> Iterator[Caller]:
        """All callers with a valid token."""
        return iter(self._callers.values())

    def caller(self, token: bytes) -> Caller:
        """The caller that showed this token. Raises AccessError (401)."""
        digest = digest_of(token)
        caller = self._callers.get(digest)
        if caller is None or not hmac.compare_digest(caller.digest, digest):
            raise AccessError("the token is not valid")
        return caller
