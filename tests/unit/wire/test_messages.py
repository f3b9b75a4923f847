"""A message has one set of fields, whether its subject and key stand in it or in the path."""

import msgspec
import pytest

from delayserver.wire.messages import (
    CANCELS_MAX,
    CancelBody,
    PlainMessage,
    PublishModel,
    PublishUnderKeyModel,
    ToModel,
)
from delayserver.wire.reading import decoder_of, readable_fields
from delayserver.wire.subscriptions import RetryModel, WebhookSubscription


def named(form):
    return {one.encode_name: one for one in msgspec.structs.fields(form)}


def test_a_message_under_a_key_has_all_other_fields():
    assert named(PublishModel).keys() - named(PublishUnderKeyModel).keys() == {"subject", "key"}
    assert named(PublishUnderKeyModel).keys() - named(PublishModel).keys() == {"debounce"}
    assert decoder_of(PublishUnderKeyModel)(b"{}").group is None


def test_a_message_without_options_is_read_by_the_shorter_form():
    fields = named(PublishModel)
    assert [*fields][: len(named(PlainMessage))] == [*named(PlainMessage)]
    with pytest.raises(msgspec.ValidationError):
        decoder_of(PlainMessage)(b'{"subject":"a","ttl":1}')


def test_a_destination_has_the_limits_of_a_webhook():
    (webhook, to) = named(WebhookSubscription), named(ToModel)
    assert webhook["retry"].type == RetryModel and RetryModel in to["retry"].type.__args__
    for data in (b'{"url":"u","timeout":"2h"}', b'{"url":"u","retry":{"max_attempts":101}}'):
        _, (error,) = readable_fields(data, ToModel)
        assert error.pointer in ("/timeout", "/retry/max_attempts")


def test_a_call_cancels_a_limited_number():
    (_, errors) = readable_fields(b'{"ids":[%b""]}' % (b'"",' * CANCELS_MAX), CancelBody)
    assert [one.pointer for one in errors] == ["/ids"]
