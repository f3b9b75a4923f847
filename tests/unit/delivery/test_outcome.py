"""What an answer means, when the next attempt comes, and what may stand in headers."""

from typing import Any

import pytest

from delayserver.delivery.sink import (
    HOLD_MS_MIN,
    Confirmed,
    Delivered,
    GiveUp,
    Hold,
    PauseSubscription,
    Recorded,
    RetryLater,
    ReturnToQueue,
    Tried,
    Untried,
    outcome,
)
from delayserver.delivery.webhook import (
    WebhookRequest,
    WebhookResponse,
    parse_retry_after_ms,
    request_headers,
)
from delayserver.errors import InputError
from delayserver.records.message import HEADERS_BYTES_MAX, check_headers
from delayserver.records.subscriptions import RETRY_DELAY_MS_MAX, RetrySchedule
from delayserver.security.signing import WebhookSecret, verify

POLICY = RetrySchedule(max_attempts=4, backoff_ms=(5_000, 30_000))
NOW_S = 1_795_192_200  # Friday, 20 November 2026, 16:30:00 UTC


def no_jitter():
    return 0.0


def decide(status=None, *, attempt=1, retry_after_ms=None, error=None, random=no_jitter):
    response = WebhookResponse(status, retry_after_ms, error)
    return outcome(response.result(0, 0), attempt, POLICY, random)


@pytest.mark.parametrize("status", [200, 201, 202, 204, 299])
@pytest.mark.parametrize("attempt", [1, 4, 5])
def test_2xx_is_delivered(status, attempt):
    assert decide(status, attempt=attempt) == Delivered(tried=Tried(0, 0, status))


@pytest.mark.parametrize("attempt", [1, 4, 5])
def test_what_was_not_tried_is_no_attempt(attempt):
    assert outcome(Untried(), attempt, POLICY, no_jitter) == ReturnToQueue()


def test_what_is_recorded_already_is_said_to_be():
    recorded = Recorded(1, 2)
    assert outcome(Confirmed(recorded), 1, POLICY, no_jitter) == Delivered(recorded)


@pytest.mark.parametrize("attempt", [1, 4, 5])
def test_410_pauses_even_at_the_last_attempt(attempt):
    assert isinstance(decide(410, attempt=attempt), PauseSubscription)


@pytest.mark.parametrize(
    "status", [300, 301, 302, 307, 308, 400, 401, 404, 429, 500, 503, 599, 999]
)
def test_every_other_status_is_retried(status):
    result = decide(status)
    assert isinstance(result, RetryLater)
    assert result.delay_ms == 5_000
    assert f"HTTP {status}" in result.reason
    assert ("redirects" in result.reason) == (status < 400)


def test_a_missing_answer_is_retried_with_its_reason():
    assert decide(error="no answer within 50 ms") == RetryLater(5_000, "no answer within 50 ms")


def test_the_last_attempt_is_followed_by_the_dead_letters():
    assert isinstance(decide(500, attempt=3), RetryLater)
    assert decide(500, attempt=4) == GiveUp("HTTP 500 (attempt 4 of 4)")
    assert decide(429, attempt=9) == GiveUp("HTTP 429 (attempt 9 of 4)")


@pytest.mark.parametrize(
    ("status", "retry_after_ms", "follows"),
    [
        (429, 60_000, Hold(60_000)),
        (503, 60_000, Hold(60_000)),
        (503, 0, Hold(HOLD_MS_MIN)),
        (503, 10**15, Hold(RETRY_DELAY_MS_MAX)),
        (500, 60_000, RetryLater(5_000, "HTTP 500")),  # only where the contract says so
    ],
)
@pytest.mark.parametrize("attempt", [1, 3])
def test_retry_after_holds_the_queue_and_is_no_attempt(status, retry_after_ms, follows, attempt):
    found = decide(status, retry_after_ms=retry_after_ms, attempt=attempt)
    if isinstance(follows, Hold):
        assert found == follows
    else:
        assert isinstance(found, RetryLater)


def test_retry_after_holds_the_queue_also_at_the_last_attempt():
    assert decide(429, attempt=9, retry_after_ms=5_000) == Hold(5_000)


@pytest.mark.parametrize(("random", "delay_ms"), [(0.0, 60_000), (0.5, 66_000), (0.999, 71_988)])
def test_jitter_only_adds(random, delay_ms):
    assert decide(503, retry_after_ms=60_000, random=lambda: random) == Hold(delay_ms)
    assert decide(500, random=lambda: random).delay_ms == delay_ms // 12


def test_backoff_grows_beyond_its_list_up_to_a_day():
    policy = RetrySchedule(max_attempts=100, backoff_ms=(1_000, 10_000))
    assert [policy.delay_ms(n) for n in range(1, 6)] == [1_000, 10_000, 20_000, 40_000, 80_000]
    assert policy.delay_ms(99) == RETRY_DELAY_MS_MAX
    assert RetrySchedule(100, (1,)).delay_ms(99) == RETRY_DELAY_MS_MAX
    default = RetrySchedule()
    total_ms = sum(default.delay_ms(n) for n in range(1, default.max_attempts))
    assert total_ms // 3_600_000 == 31


@pytest.mark.parametrize(
    ("value", "retry_after_ms"),
    [
        ("0", 0),
        (" 120 ", 120_000),
        ("Fri, 20 Nov 2026 16:31:30 GMT", 90_000),
        ("Fri, 20 Nov 2026 16:31:30 -0000", 90_000),
        ("Friday, 20-Nov-26 16:31:30 GMT", 90_000),
        ("Fri Nov 20 16:31:30 2026", 90_000),
        ("Fri, 20 Nov 2026 16:00:00 GMT", 0),
        ("", None),
        ("-5", None),
        ("1.5", None),
        ("soon", None),
        ("٣", None),
        ("Fri, 99 Nov 2026 16:31:30 GMT", None),
    ],
)
def test_a_retry_after_header_is_read(value, retry_after_ms):
    assert parse_retry_after_ms(value, NOW_S) == retry_after_ms


def test_a_retry_after_of_any_length_is_read():
    retry_after_ms = parse_retry_after_ms("9" * 10_000, NOW_S)
    assert retry_after_ms is not None
    assert retry_after_ms > RETRY_DELAY_MS_MAX


def request(**changes):
    fields: dict[str, Any] = {
        "url": "http://127.0.0.1/",
        "message_id": "m1",
        "subject": "order.unpaid",
        "key": None,
        "due_ms": NOW_S * 1000,
        "attempt": 2,
        "headers": {},
        "body": b"{}",
        "content_type": "application/json",
        "secrets": (),
        "timeout_ms": 1000,
        "timestamp_s": NOW_S + 1,
    }
    return WebhookRequest(**(fields | changes))


def test_the_headers_of_a_webhook():
    secret = WebhookSecret(b"s" * 32)
    headers = request_headers(request(key="1001", secrets=(secret,), headers={"X-Shop": "7"}))
    signature = headers.pop("webhook-signature")
    assert list(headers.items()) == [
        ("user-agent", "delayserver"),
        ("content-type", "application/json"),
        ("webhook-id", "m1"),
        ("webhook-timestamp", str(NOW_S + 1)),
        ("delay-subject", "order.unpaid"),
        ("delay-key", "1001"),
        ("delay-due", "2026-11-20T16:30:00.000Z"),
        ("delay-attempt", "2"),
        ("x-shop", "7"),
    ]
    assert verify(headers | {"webhook-signature": signature}, b"{}", [secret], NOW_S) == "m1"


def test_without_a_secret_or_a_key_there_is_no_header_for_it():
    assert not {"webhook-signature", "delay-key"} & request_headers(request()).keys()


@pytest.mark.parametrize(
    ("key", "header"),
    [
        ("", ""),
        ("order:1001/a~b_c-d.e", "order:1001/a~b_c-d.e"),
        ("100%", "100%25"),
        ("a b", "a%20b"),
        ("a\r\nb", "a%0D%0Ab"),
        ("订单", "%E8%AE%A2%E5%8D%95"),
        ("é", "%C3%A9"),
        ("\x7f", "%7F"),
    ],
)
def test_a_key_is_percent_encoded(key, header):
    assert request_headers(request(key=key))["delay-key"] == header


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"x-shop": "7", "Authorization": "Bearer x", "user-agent": "shop"},
        {"x-empty": "", "x-inner": "a b\tc", "x-latin": "café", "!#$%&'*+-.^_`|~09azAZ": "v"},
        {"x": "v" * (HEADERS_BYTES_MAX - 1)},
    ],
)
def test_headers_that_may_be_sent(headers):
    check_headers(headers)


@pytest.mark.parametrize(
    ("headers", "pointer"),
    [
        ({"": "v"}, "/headers/"),
        ({"a b": "v"}, "/headers/a b"),
        ({"a:": "v"}, "/headers/a:"),
        ({"a/b~": "v"}, "/headers/a~1b~0"),
        ({"é": "v"}, "/headers/é"),
        ({"x\n": "v"}, "/headers/x\n"),
        ({"x": "a\r\nb: c"}, "/headers/x"),
        ({"x": "a\nb"}, "/headers/x"),
        ({"x": "a\0"}, "/headers/x"),
        ({"x": "\x7f"}, "/headers/x"),
        ({"x": "\x85"}, "/headers/x"),
        ({"x": " a"}, "/headers/x"),
        ({"x": "a "}, "/headers/x"),
        ({"x": "a\n"}, "/headers/x"),
        ({"x": "订"}, "/headers/x"),
        ({"X-A": "1", "x-a": "2"}, "/headers/x-a"),
        ({"Host": "evil"}, "/headers/Host"),
        ({"Content-Length": "0"}, "/headers/Content-Length"),
        ({"content-type": "a/b"}, "/headers/content-type"),
        ({"transfer-encoding": "chunked"}, "/headers/transfer-encoding"),
        ({"Connection": "close"}, "/headers/Connection"),
        ({"webhook-id": "x"}, "/headers/webhook-id"),
        ({"Webhook-Signature": "x"}, "/headers/Webhook-Signature"),
        ({"delay-anything": "x"}, "/headers/delay-anything"),
        ({"x": "v" * HEADERS_BYTES_MAX}, "/headers"),
    ],
)
def test_headers_that_may_not_be_sent(headers, pointer):
    with pytest.raises(InputError) as caught:
        check_headers(headers)
    assert caught.value.pointer == pointer
