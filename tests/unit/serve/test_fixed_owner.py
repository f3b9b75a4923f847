"""The owner of a shard outside of a cluster: a server alone, and one shard of several."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest

from delayserver.serve import fixed_owner
from delayserver.serve.fixed_owner import FixedOwner
from delayserver.serve.owner import OwnerNode
from delayserver.shards.place import ShardPlace

if TYPE_CHECKING:
    from delayserver.server.server import Server

NOWHERE = Path("/nowhere")
ALONE = ShardPlace.alone(NOWHERE)
OF_SEVERAL = ShardPlace(1, 3, NOWHERE, NOWHERE)


class Supervisor:
    """Notes who listens to it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.listeners: list[tuple[object, object]] = []
        monkeypatch.setattr(fixed_owner, "Lines", self._lines)

    def _lines(self, fd: int, rest: bytes, book: object) -> Any:
        supervisor = self

        class Listening:
            def begin(self, on_gone: object, on_news: object) -> None:
                supervisor.listeners.append((on_gone, on_news))

        return Listening()


@pytest.mark.parametrize("place", [ALONE, OF_SEVERAL])
def test_a_server_alone_has_no_supervisor_and_a_shard_of_several_has(
    place: ShardPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The end of a terminal is not that of a supervisor.
    supervisor = Supervisor(monkeypatch)
    owner = FixedOwner(place)

    def on_gone() -> None: ...
    def on_news() -> None: ...

    owner.serving(cast("Server", None), on_gone, on_news)
    assert supervisor.listeners == [(on_gone, on_news)] * (place is OF_SEVERAL)


def test_no_book_names_another_owner() -> None:
    owner = FixedOwner(OF_SEVERAL)
    assert (owner.book, owner.epoch) == (None, 0)


def test_it_is_asked_the_same_questions_as_an_owner_in_a_cluster() -> None:
    asked = {name for name in vars(FixedOwner) if not name.startswith("_")} - {"book"}
    assert {"around", "leave", "serving", "successor"} < asked <= {*vars(OwnerNode)}
