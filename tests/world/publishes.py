"""Publishing whole objects, as tests and the simulation have them.

The server has no such call: a request of one message is an object, one of many is columns from the
decoder on. Here one message takes the first way and several take the second.

Cost: that of the ways. Threads: those of `Publishing`.
"""

from collections.abc import Sequence

from delayserver.decisions.new_messages import NewMessage, PublishBatch
from delayserver.decisions.publishing import Accepted, Publishing
from delayserver.records.ids import IdCodec
from delayserver.records.message import Content
from delayserver.records.message_id import read_id


def columns_of(messages: Sequence[NewMessage]) -> PublishBatch:
    """The columns of messages."""
    payloads = [message.payload for message in messages]
    options = [payload.options for payload in payloads]
    return PublishBatch(
        [message.subject for message in messages],
        [message.due_ms for message in messages],
        [payload.body for payload in payloads],
        [Content(payload.content) for payload in payloads],
        [payload.key for payload in payloads],
        [payload.headers for payload in payloads],
        [payload.watch for payload in payloads],
        [message.trace for message in messages],
        options if any(options) else [],
    )


def publish_all(
    publishing: Publishing, messages: Sequence[NewMessage], now_ms: int
) -> list[Accepted]:
    """Accept all messages or none. Raises as `Publishing.publish_one` and `publish_batch`."""
    if len(messages) == 1:
        return [publishing.publish_one(messages[0], now_ms)]
    done = publishing.publish_batch(columns_of(messages), now_ms)
    return [
        done.duplicates.get(index)
        or Accepted(text, message.due_ms, False, done.group, read_id(text).seq)
        for index, (message, text) in enumerate(zip(messages, IdCodec.texts(done.ids), strict=True))
    ]
