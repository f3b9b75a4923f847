"""The hot calls of a shard among others: publishes and cancels of one message go where they belong,
and consumers get the due messages of all of them (`consuming`).

    body ──▶ subject and key ──▶ own? ──▶ decided together with others, as by a server alone
                             ──▶ else ──▶ link ──▶ decided together with others there ──▶ answer

A body that cannot be read stays here, where it is refused. Cost: 1 µs for a call that stays, 5 µs
and the turn of a loop for one that goes. Threads: belongs to the event loop.
"""

from collections.abc import Callable
from typing import cast

import msgspec

from delayserver.api.hot.answers import Client, Responder
from delayserver.api.hot.cancel import HotCancel
from delayserver.api.hot.publish import Hot
from delayserver.api.intake import Intake
from delayserver.errors import NotFoundError
from delayserver.records.sharding import shard_of, shard_of_id, shard_of_message
from delayserver.security.tokens import Caller
from delayserver.server.calls import Calls
from delayserver.shards.consuming import SharedConsuming
from delayserver.shards.link import Links
from delayserver.wire.reading import UNREADABLE


class RoutingFields(msgspec.Struct):
    """The fields that decide where a message belongs; the rest of it is not looked at."""

    subject: str
    key: str | None = None
    group: str | None = None

    def shard(self, count: int) -> int | None:
        """Where it belongs, of `count`; None: anywhere."""
        return shard_of_message(self.subject, self.key, self.group, count)


decode_named = msgspec.json.Decoder(RoutingFields).decode


class RoutedHot(Hot):
    """`Hot` of one shard of several."""

    links: Links
    consuming: SharedConsuming
    check_whole: Callable[[], None]
    """Raises the error that keeps this shard from being ready though it is there."""

    def __init__(self, calls: Calls, intake: Intake) -> None:
        super().__init__(calls, intake)
        self.routes = True
        self.cancels: RoutedCancel = RoutedCancel(calls)

    def link(self, links: Links) -> None:
        """Before the first call: where the others are."""
        self.links = self.cancels.links = links
        self.consuming = SharedConsuming(self._calls, self.intake, links)

    def check_ready(self) -> None:
        super().check_ready()
        self.check_whole()

    def gather(self, responder: Responder, data: bytes, caller: Caller | None) -> None:
        links = self.links
        try:
            named = decode_named(data)
        except UNREADABLE:
            named = None
        if named is not None:
            shard = named.shard(links.count)
            if shard is not None and shard != links.own:
                client = cast(Client, responder)
                client.go_elsewhere()
                links.publish(shard, data, caller, client.come_back)
                return
        self.gather_own(responder, data, caller)


class RoutedCancel(HotCancel):
    """`HotCancel` of one shard of several."""

    links: Links

    def gather(
        self, responder: Responder, subject: str | None, text: str, caller: Caller | None
    ) -> None:
        links = self.links
        try:
            shard = shard_of_id(text) if subject is None else shard_of(subject, text, links.count)
        except NotFoundError:
            shard = links.own
        if shard == links.own or shard >= links.count:
            self.gather_own(responder, subject, text, caller)
            return
        client = cast(Client, responder)
        client.go_elsewhere()
        links.cancel(shard, subject, text, caller, client.come_back)
