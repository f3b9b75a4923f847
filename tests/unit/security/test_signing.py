"""Signatures, with the published implementation as the other side."""

import base64
import time

import pytest
from standardwebhooks import Webhook, WebhookVerificationError

from delayserver.errors import InputError
from delayserver.security.signing import (
    SECRET_PREFIX,
    SignatureError,
    WebhookSecret,
    sign,
    verify,
)

# The example of the Standard Webhooks specification and its reference libraries.
SECRET_TEXT = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
MESSAGE_ID = "msg_p5jXN8AQM9LWM0D4loKWxJek"
TIMESTAMP_S = 1614265330
BODY = b'{"test": 2432232314}'
SIGNATURE = "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="

SECRET = WebhookSecret.parse(SECRET_TEXT)
OTHER = WebhookSecret(b"o" * 32)


def received(signature=SIGNATURE, timestamp=str(TIMESTAMP_S), message_id=MESSAGE_ID):
    return {
        "Webhook-Id": message_id,
        "Webhook-Timestamp": timestamp,
        "Webhook-Signature": signature,
    }


def test_the_published_vector():
    assert sign(MESSAGE_ID, TIMESTAMP_S, BODY, [SECRET]) == SIGNATURE
    assert verify(received(), BODY, [SECRET], TIMESTAMP_S) == MESSAGE_ID


def text_of(secret):
    return SECRET_PREFIX + base64.b64encode(secret.key).decode()


def test_two_secrets_make_two_signatures_and_one_of_them_is_enough():
    both = sign(MESSAGE_ID, TIMESTAMP_S, BODY, [OTHER, SECRET])
    assert both.split(" ")[1] == SIGNATURE
    for secrets in ([SECRET], [OTHER], [SECRET, OTHER]):
        assert verify(received(both), BODY, secrets, TIMESTAMP_S) == MESSAGE_ID


@pytest.mark.parametrize("body", [b"{}", b"", '{"名": "ü"}'.encode()])
def test_the_published_receiver_accepts_what_we_sign(body):
    now_s = int(time.time())
    headers = received(sign("m1", now_s, body, [OTHER, SECRET]), str(now_s), "m1")
    for secret in (OTHER, SECRET):
        Webhook(text_of(secret)).verify(body, headers, json_parse=False)
    with pytest.raises(WebhookVerificationError):
        Webhook(SECRET_TEXT).verify(body + b" ", headers, json_parse=False)


@pytest.mark.parametrize(
    ("headers", "body", "secrets"),
    [
        (received(), BODY + b" ", [SECRET]),
        (received(), BODY, [OTHER]),
        (received(), BODY, []),
        (received(message_id="msg_other"), BODY, [SECRET]),
        (received(timestamp=str(TIMESTAMP_S + 1)), BODY, [SECRET]),
        (received(timestamp=f"0{TIMESTAMP_S}"), BODY, [SECRET]),
        (received(SIGNATURE.replace("v1,", "v2,")), BODY, [SECRET]),
        (received(SIGNATURE[:-2]), BODY, [SECRET]),
        (received("é" + SIGNATURE), BODY, [SECRET]),
        (received(""), BODY, [SECRET]),
        (received(timestamp=""), BODY, [SECRET]),
        (received(timestamp="-1"), BODY, [SECRET]),
        (received(timestamp="1e9"), BODY, [SECRET]),
        (received(timestamp="9" * 5000), BODY, [SECRET]),
        (received(message_id=""), BODY, [SECRET]),
        ({}, BODY, [SECRET]),
    ],
)
def test_what_is_not_authentic_is_refused(headers, body, secrets):
    with pytest.raises(SignatureError):
        verify(headers, body, secrets, TIMESTAMP_S)


@pytest.mark.parametrize(
    ("now_s", "accepted"),
    [
        (TIMESTAMP_S + 300, True),
        (TIMESTAMP_S - 300, True),
        (TIMESTAMP_S + 301, False),
        (TIMESTAMP_S - 300.5, False),
    ],
)
def test_an_old_or_future_webhook_is_refused(now_s, accepted):
    if accepted:
        verify(received(), BODY, [SECRET], now_s)
    else:
        with pytest.raises(SignatureError, match="300 s"):
            verify(received(), BODY, [SECRET], now_s)


@pytest.mark.parametrize("size", [24, 25, 32, 64])
def test_a_secret_is_read_with_and_without_padding(size):
    secret = WebhookSecret(bytes(range(size)))
    assert WebhookSecret.parse(text_of(secret)) == secret
    assert WebhookSecret.parse(text_of(secret).rstrip("=")) == secret


@pytest.mark.parametrize(
    "text",
    [
        "",
        "whsec_",
        SECRET_TEXT.removeprefix("whsec_"),
        "whsec_" + base64.b64encode(b"x" * 23).decode(),
        "whsec_" + base64.b64encode(b"x" * 65).decode(),
        "whsec_" + base64.urlsafe_b64encode(b"\xff" * 24).decode(),
        SECRET_TEXT + " ",
        SECRET_TEXT + "é",
    ],
)
def test_what_is_no_secret_is_refused_without_being_repeated(text):
    with pytest.raises(InputError, match="24 to 64") as caught:
        WebhookSecret.parse(text, "/secret")
    assert caught.value.pointer == "/secret"
    assert len(text) < 10 or text not in str(caught.value)


def test_a_secret_is_not_shown():
    assert "M" not in repr(SECRET)
    assert str(SECRET) == "WebhookSecret()"
