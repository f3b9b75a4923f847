"""The headers and properties that a message carries to a broker besides its body.

Every kind of broker has the same: `delay-id`, `delay-subject`, `delay-key`, `delay-due`,
`delay-attempt`, `delay-replay` where a client asked for it again, and then the message's own
headers. Unlike in HTTP values are UTF-8 as they are, unless the module of a kind says otherwise.

Cost: 2 µs. Threads: pure functions.
"""

import re
from typing import Final

from delayserver.records.message import REPLAY_HEADER, DueDelivery
from delayserver.times import format_time

_PLACE: Final = re.compile(r"\{(?:key|subject|id)\}")


def headers(delivery: DueDelivery) -> list[tuple[str, str]]:
    """All headers of a message, in order."""
    payload = delivery.payload
    carried = [
        ("delay-id", delivery.message_id),
        ("delay-subject", delivery.subject),
        ("delay-due", format_time(delivery.origin.due_ms)),
        ("delay-attempt", str(delivery.told_attempt)),
    ]
    if payload.key is not None:
        carried.insert(2, ("delay-key", payload.key))
    if payload.is_replay:
        carried.append((REPLAY_HEADER, "1"))
    if payload.headers:
        carried += payload.headers.items()
    return carried


def filled(template: str, delivery: DueDelivery) -> str | None:
    """Fill in a template: `{key}`, `{subject}` and `{id}` in it are those of the message. None: it
    is only `{key}`, and the message has no key."""
    key = delivery.payload.key
    if template == "{key}":
        return key
    values = {"{key}": key or "", "{subject}": delivery.subject, "{id}": delivery.message_id}
    return _PLACE.sub(lambda match: values[match[0]], template)
