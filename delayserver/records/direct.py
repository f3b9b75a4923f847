"""Direct deliveries: of messages that name their own address (`to`).

No subscription gets such a message. It goes to one of a few direct subscriptions, which always
exist and which no client defines. The host in its URL decides which, so that a slow host delays few
others. The message itself holds its address, its signature and the number of its attempts, so there
is nothing to be made before it, and nothing to be removed behind it.

The numbers stand in the logs, and the number of a host must not change.

Cost: 1 µs for the number of a URL. Threads: pure.
"""

from typing import Final
from urllib.parse import urlsplit
from zlib import crc32

import msgspec

DIRECT_NAME: Final = "_to"
"""The one name of all direct subscriptions in answers. No other may have such a name."""
DIRECT_COUNT: Final = 64
DIRECT_FIRST_ID: Final = (1 << 25) - DIRECT_COUNT
"""The last numbers for which a route has room; others are given from 1 on."""

WEBHOOK_TIMEOUT_MS: Final = 15_000
ATTEMPTS_DEFAULT: Final = 10


class Destination(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Where a message goes (`to`), and how."""

    url: str
    subject: str
    """The subject of the message: its row has the number of its receiver in that place."""
    secret: str = ""
    """The secret with which the request is signed; empty: it is not."""
    timeout_ms: int = WEBHOOK_TIMEOUT_MS
    max_attempts: int = ATTEMPTS_DEFAULT
    backoff_ms: tuple[int, ...] = ()
    """Empty: the default delays of RetrySchedule."""

    @property
    def subscription_id(self) -> int:
        """The direct subscription that has the messages to this host."""
        authority = urlsplit(self.url).netloc.lower()
        return DIRECT_FIRST_ID + crc32(authority.encode()) % DIRECT_COUNT


def is_direct(subscription_id: int) -> bool:
    """Whether this is a direct subscription."""
    return subscription_id >= DIRECT_FIRST_ID
