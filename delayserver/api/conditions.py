"""Conditional requests (RFC 9110 §13): a change that happens only to the version that was seen.

Every answer that shows a message carries its version as `ETag`. `If-Match` on PATCH, PUT and DELETE
names the versions that the caller wants to change, or `*` for any; `If-None-Match: *` on PUT wants
no message to be waiting under the key. Whether it holds is decided by
`delayserver.decisions.messages`, in one step with the change.

Cost: a regular expression per header. Threads: pure.
"""

import re
from collections.abc import Container
from typing import Final

from delayserver.errors import InputError

_TAG = re.compile(r'(W/)?"([\x21\x23-\x7e\x80-\xff]*)"')


class _AnyVersion:
    def __contains__(self, version: object) -> bool:
        return True


ANY_VERSION: Final = _AnyVersion()


def entity_tag(version: str) -> str:
    """The value of `ETag`."""
    return f'"{version}"'


def expected_versions(if_match: str | None) -> Container[str] | None:
    """The versions that `If-Match` names; None without it. Raises InputError.

    A weak tag (`W/"…"`) matches nothing: it does not say which version was seen."""
    if if_match is None:
        return None
    if if_match.strip() == "*":
        return ANY_VERSION
    versions: set[str] = set()
    for part in if_match.split(","):
        tag = _TAG.fullmatch(part.strip())
        if tag is None:
            raise InputError(
                'If-Match is *, or tags in double quotes, as ETag gave them: "17"',
                "/header/if-match",
            )
        if not tag[1]:
            versions.add(tag[2])
    return versions


def is_known(if_none_match: str | None, version: str) -> bool:
    """Whether a caller that names versions by `If-None-Match` has this one. Raises InputError.

    A weak tag is as good as any: nothing is changed by it (RFC 9110, 13.1.2)."""
    if if_none_match is None:
        return False
    if if_none_match.strip() == "*":
        return True
    tags = [_TAG.fullmatch(part.strip()) for part in if_none_match.split(",")]
    if None in tags:
        raise InputError(
            'If-None-Match is *, or tags in double quotes, as ETag gave them: "17"',
            "/header/if-none-match",
        )
    return any(tag is not None and tag[2] == version for tag in tags)


def wants_new(if_none_match: str | None) -> bool:
    """Whether there must be none yet. Raises InputError."""
    if if_none_match is None:
        return False
    if if_none_match.strip() != "*":
        raise InputError("only If-None-Match: * is understood here", "/header/if-none-match")
    return True
