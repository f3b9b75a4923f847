"""Signatures of webhooks, after the Standard Webhooks specification, version 1.

HMAC-SHA256 signs `id.timestamp.body`:

    webhook-id: 01JD…                  the same in every attempt: receivers drop repeats by it
    webhook-timestamp: 1795192200      when this attempt was sent, s since the epoch
    webhook-signature: v1,K5o… v1,Zb8… one for each secret, so that a secret is rotated by
                                       having both for a while

Both sides are here: the server signs, receivers written in Python verify. Any library for Standard
Webhooks may take the receiver's place.

Cost: 2 µs for each secret and 1 KiB of body. Threads: pure functions of immutable values.
"""

import base64
import hmac
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

from delayserver.errors import DelayServerError, InputError

SECRET_PREFIX = "whsec_"
SECRET_BYTES_MIN = 24
SECRET_BYTES_MAX = 64
TOLERANCE_S = 300

_VERSION = "v1"
_TIMESTAMP_DIGITS_MAX = 15


class SignatureError(DelayServerError):
    """A webhook that was received is not authentic, or too old to be trusted: answer 4xx."""


@dataclass(frozen=True, slots=True)
class WebhookSecret:
    """A secret that a subscription shares with its receiver. Its repr does not show it."""

    key: bytes = field(repr=False)

    @classmethod
    def parse(cls, text: str, pointer: str = "") -> Self:
        """The secret written as `whsec_` and base64 of 24 to 64 bytes. Raises InputError, which
        does not repeat the text."""
        encoded = text.removeprefix(SECRET_PREFIX)
        try:
            # Padding is optional, as it is to the reference implementations.
            key = base64.b64decode(encoded + "=" * (-len(encoded) % 4), validate=True)
        except ValueError:
            key = b""
        if encoded == text or not SECRET_BYTES_MIN <= len(key) <= SECRET_BYTES_MAX:
            raise InputError(
                f"a secret is {SECRET_PREFIX} followed by the base64 of "
                f"{SECRET_BYTES_MIN} to {SECRET_BYTES_MAX} random bytes",
                pointer,
            )
        return cls(key)


def sign(message_id: str, timestamp_s: int, body: bytes, secrets: Iterable[WebhookSecret]) -> str:
    """The value of `webhook-signature`: one signature for each secret, space separated."""
    content = f"{message_id}.{timestamp_s}.".encode() + body
    return " ".join(_signature(content, secret) for secret in secrets)


def _signature(content: bytes, secret: WebhookSecret) -> str:
    digest = hmac.digest(secret.key, content, "sha256")
    return f"{_VERSION},{base64.b64encode(digest).decode()}"


def verify(
    headers: Mapping[str, str],
    body: bytes,
    secrets: Sequence[WebhookSecret],
    now_s: float,
    tolerance_s: int = TOLERANCE_S,
) -> str:
    """The message id of a webhook that was received, by which repeats are dropped.

    `body` is the body as it came over the wire, before any parsing. A signature by any of `secrets`
    will do. Raises SignatureError when none fits, or when the webhook was sent more than
    `tolerance_s` seconds before or after `now_s`. Comparison takes constant time."""
    fields = {name.lower(): value for name, value in headers.items()}
    message_id, timestamp, signatures = (
        fields.get(name, "") for name in ("webhook-id", "webhook-timestamp", "webhook-signature")
    )
    if not (message_id and timestamp and signatures):
        raise SignatureError("webhook-id, webhook-timestamp or webhook-signature is missing")
    if not (timestamp.isascii() and timestamp.isdigit() and len(timestamp) < _TIMESTAMP_DIGITS_MAX):
        raise SignatureError("webhook-timestamp is not a number of seconds")
    if abs(now_s - int(timestamp)) > tolerance_s:
        raise SignatureError(f"webhook-timestamp is more than {tolerance_s} s away from now")

    # A signature is ASCII. Any other character becomes a "?", which no signature contains.
    given = [text.encode("ascii", "replace") for text in signatures.split(" ")]
    # The timestamp goes in as it was received, because the sender signed it in that form.
    content = f"{message_id}.{timestamp}.".encode("utf-8", "replace") + body
    fits = False
    for secret in secrets:
        expected = _signature(content, secret).encode()
        for signature in given:
            fits |= hmac.compare_digest(expected, signature)
    if not fits:
        raise SignatureError("no signature fits")
    return message_id
