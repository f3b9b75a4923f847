"""Who is answered by the hot calls, in tests of what is decided together."""

from delayserver.decisions.group import Group


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
