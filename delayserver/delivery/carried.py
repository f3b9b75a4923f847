"""What a message carries to a broker besides its body.

Every kind of broker has the same: `delay-id`, `delay-subject`, `delay-key`, `delay-due`,
`delay-attempt`, and then the message's own headers. Unlike in HTTP values are UTF-8 as they are,
unless the module of a kind says otherwise.

Cost: 2 µs. Threads: pure functions.
"""

from delayserver.records.message import DueDelivery
from delayserver.times import format_time


def headers(delivery: DueDelivery) -> list[tuple[str, str]]:
    """All headers of a message, in order."""
    payload = delivery.payload
    carried = [
        ("delay-id", delivery.message_id),
        ("delay-subject", delivery.subject),
        ("delay-due", format_time(delivery.origin.due_ms)),
        ("delay-attempt", str(delivery.attempt)),
    ]
    if payload.key is not None:
        carried.insert(2, ("delay-key", payload.key))
    if payload.headers:
        carried += payload.headers.items()
    return carried


def filled(template: str, delivery: DueDelivery) -> str | None:
    """What a template stands for: `{key}`, `{subject}` or `{id}` of the message (None: it has no
    key), or the text itself."""
    match template:
        case "{key}":
            return delivery.payload.key
        case "{subject}":
            return delivery.subject
        case "{id}":
            return delivery.message_id
        case text:
            return text
