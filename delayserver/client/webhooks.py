"""For receivers of webhooks: is this from our server, and unchanged?

    message_id = verify_webhook(headers, body, secrets)     raises SignatureError: answer 401

Headers come in whatever form the framework has: a mapping, pairs (ASGI), the environ of WSGI.

Any library for Standard Webhooks does the same; this one needs no other package.

Cost: that of `signing.verify`. Threads: pure, but for the clock, which may be
given.
"""

import time
from collections.abc import Iterable
from functools import lru_cache
from typing import Any, Protocol

from delayserver.security.signing import TOLERANCE_S, SignatureError, WebhookSecret, verify

__all__ = ["SignatureError", "verify_webhook"]

Pairs = Iterable[tuple[Any, Any]]


class HasItems(Protocol):
    """The methods that mappings and the header classes of frameworks share."""

    def items(self) -> Pairs:
        """Names and values."""


Headers = HasItems | Iterable[tuple[str | bytes, str | bytes]]
"""The headers of Flask, Django, Starlette or http.server, pairs of text or bytes (ASGI), or the
environ of WSGI (`HTTP_WEBHOOK_ID` and so on)."""


def verify_webhook(
    headers: Headers,
    body: bytes,
    secrets: str | Iterable[str],
    *,
    tolerance_s: int = TOLERANCE_S,
    now_s: float | None = None,
) -> str:
    """The message id of a webhook that was received: the same in every attempt, so drop a message
    whose id was seen before.

    `body` holds the bytes that came over the wire, before any parsing. `secrets`: `whsec_…`, one,
    or several while one takes the place of another; a signature by any of them will do. `now_s`
    replaces the clock of the day.

    Raises SignatureError when no signature fits, or when it was sent more than `tolerance_s` ago
    (or ahead); InputError when a secret is none."""
    texts = (secrets,) if isinstance(secrets, str) else secrets
    known = [_secret(text) for text in texts]
    return verify(
        _fields(headers), body, known, time.time() if now_s is None else now_s, tolerance_s
    )


_secret = lru_cache(maxsize=64)(WebhookSecret.parse)


def _fields(headers: Headers) -> dict[str, str]:
    """Names as HTTP writes them, in lower case."""
    pairs: Pairs = headers.items() if hasattr(headers, "items") else headers
    found: dict[str, str] = {}
    for name, value in pairs:
        text = _text(name).lower()
        if text.startswith("http_webhook_"):
            text = text.removeprefix("http_").replace("_", "-")
        if text.startswith("webhook-"):
            found[text] = _text(value)
    return found


def _text(value: Any) -> str:
    # The environ of WSGI holds other things, too.
    return value.decode("latin-1") if isinstance(value, bytes) else str(value)
