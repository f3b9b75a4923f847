"""Webhooks: the request, and the meaning of an answer.

    WebhookRequest ── request_headers, sign ──► WebhookSender.send ──► WebhookResponse.result
                                                                          │ (pure)
                                              Confirmed │ Failed │ Later │ Gone │ Untried

Cost: 10 µs to make the headers and sign them. Threads: pure functions and values; the sender that
carries them is in `delayserver.delivery.sender`.
"""

from collections.abc import Callable, Mapping
from datetime import UTC
from email.utils import parsedate_to_datetime
from typing import Final, Protocol
from urllib.parse import quote

import msgspec

from delayserver.delivery.batch import batch_body, batch_id
from delayserver.delivery.sink import Confirmed, Failed, Gone, Later, Result, Tried, Untried
from delayserver.records.message import REPLAY_HEADER, Content, DueDelivery
from delayserver.records.subscriptions import Subscription, for_message
from delayserver.security.signing import WebhookSecret, sign
from delayserver.times import format_time

# ---- the request -------------------------------------------------------------------------------


# Characters that may stand in `delay-key` as they are, besides letters, digits and "_.-~": all
# visible ASCII but the percent sign.
KEY_SAFE = "!\"#$&'()*+,/:;<=>?@[\\]^`{|}"


class WebhookRequest(msgspec.Struct, frozen=True):
    """One attempt to deliver one message, or a batch of them."""

    url: str
    message_id: str
    subject: str
    key: str | None
    due_ms: int
    attempt: int
    """1 for the first."""
    headers: Mapping[str, str]
    """The message's own."""
    body: bytes
    content_type: str
    secrets: tuple[WebhookSecret, ...]
    """Newest first; none: not signed."""
    timeout_ms: int
    """For all of it: resolving, connecting, sending, and reading the answer."""
    timestamp_s: int
    """When the attempt is made, s since the epoch. `Retry-After` dates are relative to it."""
    count: int = 0
    """Messages in a batch, which says the rest of each in its body; 0: one message, by itself."""
    is_replay: bool = False
    method: str = "POST"
    subscription_headers: Mapping[str, str] = {}
    """Those of the subscription, names in lower case: no publisher changes them."""


def request_headers(request: WebhookRequest) -> dict[str, str]:
    """All headers but those of the connection, names in lower case; the message's own come last,
    and before them those of the subscription, which stand for theirs of the same name.

    `delay-key` is the key in UTF-8 with every byte but visible ASCII, and `%`, percent-encoded:
    usual keys stand there as they are, and any library's percent-decoding returns all of them."""
    headers = {
        "user-agent": "delayserver",
        "content-type": request.content_type,
        "webhook-id": request.message_id,
        "webhook-timestamp": str(request.timestamp_s),
    }
    if request.secrets:
        headers["webhook-signature"] = sign(
            request.message_id, request.timestamp_s, request.body, request.secrets
        )
    if request.count:
        headers["delay-count"] = str(request.count)
        headers.update(request.subscription_headers)
        return headers
    headers["delay-subject"] = request.subject
    if request.key is not None:
        headers["delay-key"] = quote(request.key, KEY_SAFE)
    headers["delay-due"] = format_time(request.due_ms)
    headers["delay-attempt"] = str(request.attempt)
    if request.is_replay:
        headers[REPLAY_HEADER] = "1"
    own = request.subscription_headers
    headers.update(own)
    for name, value in request.headers.items():
        if (lower := name.lower()) not in own:
            headers[lower] = value
    return headers


# ---- the meaning of an answer ------------------------------------------------------------------


class WebhookResponse(msgspec.Struct, frozen=True):
    """The answer. Either a `status`, or the `error` that says why there was none."""

    status: int | None
    retry_after_ms: int | None = None
    error: str | None = None
    body: bytes = b""
    """The beginning of the answer, as far as the sender keeps it."""
    is_withheld: bool = False
    """Nothing was sent: when it could have been, it was not to begin any more."""

    def result(self, began_ms: int, duration_ms: int) -> Result:
        """2xx confirms it, 410 ends it, 429 and 503 may say how long to wait; all else, redirects
        and missing answers included, has failed."""
        if self.is_withheld:
            return Untried()
        status = self.status
        answer = self.body.decode(errors="replace") if self.body else ""
        tried = Tried(began_ms, duration_ms, status or 0, answer)
        if status is None:
            return Failed(self.error or "no answer", tried=tried)
        if 200 <= status < 300:
            return Confirmed(tried=tried)
        if status == 410:
            return Gone("HTTP 410: the receiver is gone")
        if 300 <= status < 400:
            return Failed(f"HTTP {status}: redirects are not followed", tried=tried)
        if status in (429, 503) and self.retry_after_ms is not None:
            return Later(f"HTTP {status} with Retry-After", self.retry_after_ms)
        return Failed(f"HTTP {status}", tried)


def parse_retry_after_ms(value: str, now_s: int) -> int | None:
    """`Retry-After` as ms from now, never negative: seconds or an HTTP date (RFC 9110 §10.2.3).
    None when it is neither."""
    value = value.strip()
    if value.isascii() and value.isdigit():
        # Twelve digits are beyond any limit already, and int() of more is work for nothing.
        return int(value[:12]) * 1000
    try:
        date = parsedate_to_datetime(value)
        # An HTTP date is GMT even where it fails to say so.
        time_s = date.replace(tzinfo=date.tzinfo or UTC).timestamp()
    except (ValueError, OverflowError, TypeError, IndexError):
        return None
    return max(0, int((time_s - now_s) * 1000))


class WebhookSender(Protocol):
    """Sends webhooks. A test may have one that answers by itself."""

    async def send(self, request: WebhookRequest, may_begin: Callable[[], bool]) -> WebhookResponse:
        """One attempt, if it `may_begin` when a connection is there. The response tells whatever
        the receiver or the network does; nothing of it is an exception."""

    async def close(self) -> None:
        """Close idle connections. Finish or cancel sends before."""


CONTENT_TYPES: Final[dict[int, str]] = {
    Content.JSON: "application/json",
    Content.BINARY: "application/octet-stream",
}


def webhook_request(
    subscription: Subscription, deliveries: list[DueDelivery], timestamp_s: int
) -> WebhookRequest:
    """The request for one message, or for a batch of them."""
    first, as_batch = deliveries[0], bool(subscription.batch_max)
    subscription = for_message(subscription, first.payload)
    return WebhookRequest(
        url=subscription.url,
        message_id=batch_id(deliveries) if as_batch else first.message_id,
        subject=first.subject,
        key=first.payload.key,
        due_ms=first.origin.due_ms,
        attempt=first.told_attempt,
        headers={} if as_batch else first.payload.headers or {},
        body=batch_body(deliveries) if as_batch else first.payload.body,
        content_type=CONTENT_TYPES[Content.JSON if as_batch else first.payload.content],
        secrets=tuple(WebhookSecret.parse(secret) for secret in subscription.secrets),
        timeout_ms=subscription.timeout_ms,
        timestamp_s=timestamp_s,
        count=len(deliveries) if as_batch else 0,
        is_replay=not as_batch and first.payload.is_replay,
        method=subscription.method,
        subscription_headers=subscription.headers,
    )
