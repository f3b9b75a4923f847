"""A group: it is answered once."""

from __future__ import annotations

from delayserver.decisions.group import Group
from storage.errors import DiskFullError


def test_a_group_tells_its_waiters_once_and_late_ones_at_once() -> None:
    group = Group(1)
    heard: list[object] = []
    group.when_durable(heard.append)
    assert heard == []
    error = DiskFullError("pwrite", "messages", "no space")
    group.tell_waiters(error)
    assert heard == [error]
    group.when_durable(heard.append)
    assert heard == [error, error]
