"""Subjects, and the patterns that stand for many of them: one rule for subscriptions and scopes.

A pattern is a subject (`order.unpaid`), a prefix that ends in `.*` (`order.*`, any depth), or `*`.

Cost: a comparison of text. Threads: pure.
"""

import re
from collections.abc import Iterator

from delayserver.wire.fields import ANY_PATTERN, SUBJECT_PATTERN

_SUBJECT = re.compile(SUBJECT_PATTERN)
_ANY_PATTERN = re.compile(ANY_PATTERN)


def is_subject(text: str) -> bool:
    """Whether a subject may have that name."""
    return _SUBJECT.fullmatch(text) is not None


def is_pattern(text: str) -> bool:
    """Whether that is a subject, a prefix with `.*`, or `*`."""
    return _ANY_PATTERN.fullmatch(text) is not None


def matches(pattern: str, subject: str) -> bool:
    """Whether a pattern stands for a subject; or, with a pattern as `subject`, for all that it
    stands for."""
    if pattern in ("*", subject):
        return True
    return pattern.endswith(".*") and subject.startswith(pattern[:-1])


def patterns_of(subject: str) -> Iterator[str]:
    """All patterns that stand for a subject (`matches`)."""
    yield subject
    yield "*"
    at = subject.find(".")
    while at >= 0:
        yield subject[: at + 1] + "*"
        at = subject.find(".", at + 1)
