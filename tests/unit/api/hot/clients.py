"""Who is answered by the hot calls, in tests of what is decided together."""

from collections.abc import Callable

from delayserver.decisions.group import Group
from delayserver.security.tokens import Caller


class OnlyShard:
    """`Shards` of a server alone: no call belongs to another one."""

    own, count = 0, 1

    def publish(
        self, shard: int, data: bytes, caller: Caller | None, told: Callable[[bytes], None]
    ) -> None:
        raise AssertionError(shard)

    def cancel(
        self,
        shard: int,
        subject: str | None,
        text: str,
        caller: Caller | None,
        told: Callable[[bytes], None],
    ) -> None:
        raise AssertionError(shard)


class Client:
    """Takes the answer that it is given."""

    def __init__(self) -> None:
        self.told: list[bytes] = []
        self.errors: list[Exception] = []
        self.last_group: Group | None = None

    @property
    def is_waiting(self) -> bool:
        return not self.told and not self.errors and self.last_group is None

    def respond(self, wire: bytes, group: Group | None) -> None:
        if group is None:
            self.told.append(wire)
        else:
            self.last_group = group
            group.when_durable(lambda error: self.tell(wire, error))

    def tell(self, wire: bytes, error: Exception | None) -> None:
        if error is None:
            self.told.append(wire)
        else:
            self.errors.append(error)
