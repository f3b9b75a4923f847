"""Verifying webhooks, with the published implementation as the sender."""

import time
from datetime import UTC, datetime
from email.message import Message

import pytest
from standardwebhooks import Webhook
from starlette.datastructures import Headers

from delayserver.client import SignatureError, verify_webhook
from delayserver.errors import InputError
from delayserver.security.signing import WebhookSecret, sign

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
OLD = "whsec_" + "b2xk" * 8
NOW_S = 1_795_192_200
BODY = '{"order": 1001, "name": "ü"}'.encode()


def signed(secret=SECRET, body=BODY, at_s=NOW_S, message_id="00ff"):
    """Headers as the published package signs them."""
    signature = Webhook(secret).sign(message_id, datetime.fromtimestamp(at_s, UTC), body.decode())
    return {
        "webhook-id": message_id,
        "webhook-timestamp": str(at_s),
        "webhook-signature": signature,
        "delay-subject": "order.unpaid",
    }


def wsgi(headers):
    """The environ of WSGI."""
    names = {f"HTTP_{name.upper().replace('-', '_')}": text for name, text in headers.items()}
    return {"REQUEST_METHOD": "POST", "wsgi.version": (1, 0), **names}


def asgi(headers):
    """The headers of an ASGI scope."""
    return [(name.encode(), text.encode()) for name, text in headers.items()]


def capitals(headers):
    """Names as some servers write them."""
    return {name.title(): text for name, text in headers.items()}


def http_server(headers):
    """The class of http.server, which is no Mapping."""
    message = Message()
    for name, text in headers.items():
        message[name] = text
    return message


def pairs(headers):
    """Pairs of text."""
    return list(headers.items())


@pytest.mark.parametrize("form", [dict, capitals, asgi, wsgi, http_server, Headers, pairs])
def test_every_form_of_headers(form):
    assert verify_webhook(form(signed()), BODY, SECRET, now_s=NOW_S) == "00ff"
    with pytest.raises(SignatureError):
        verify_webhook(form(signed()), BODY + b" ", SECRET, now_s=NOW_S)


def test_a_binary_body():
    body = b"\xff\x00\xfe"  # which the published package does not take
    value = sign("00ff", NOW_S, body, [WebhookSecret.parse(SECRET)])
    headers = signed() | {"webhook-signature": value}
    assert verify_webhook(headers, body, SECRET, now_s=NOW_S) == "00ff"
    with pytest.raises(SignatureError):
        verify_webhook(headers, body[1:], SECRET, now_s=NOW_S)


def test_one_secret_takes_the_place_of_another():
    for known in ([SECRET, OLD], [OLD, SECRET], iter((OLD, SECRET))):
        assert verify_webhook(signed(), BODY, known, now_s=NOW_S) == "00ff"
    both = signed()
    both["webhook-signature"] += " " + signed(OLD)["webhook-signature"]
    for one in (SECRET, OLD):
        assert verify_webhook(both, BODY, one, now_s=NOW_S) == "00ff"
    with pytest.raises(SignatureError):
        verify_webhook(signed(), BODY, OLD, now_s=NOW_S)
    with pytest.raises(SignatureError):
        verify_webhook(signed(), BODY, [], now_s=NOW_S)


def test_the_tolerance():
    verify_webhook(signed(), BODY, SECRET, now_s=NOW_S + 300)
    for now_s, tolerance_s in ((NOW_S + 301, 300), (NOW_S - 301, 300), (NOW_S + 11, 10)):
        with pytest.raises(SignatureError):
            verify_webhook(signed(), BODY, SECRET, now_s=now_s, tolerance_s=tolerance_s)


def test_the_clock_of_the_day():
    assert verify_webhook(signed(at_s=int(time.time())), BODY, SECRET) == "00ff"
    with pytest.raises(SignatureError):
        verify_webhook(signed(at_s=NOW_S - 10**8), BODY, SECRET)


def test_what_is_no_secret():
    with pytest.raises(InputError):
        verify_webhook(signed(), BODY, "secret", now_s=NOW_S)


def test_other_headers_are_not_looked_at():
    odd = [*asgi(signed()), (b"x", b"\xff"), ("y", "ü")]
    assert verify_webhook(odd, BODY, SECRET, now_s=NOW_S) == "00ff"
