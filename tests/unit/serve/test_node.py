"""A process of a node: whom it takes for the owner of its shard."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from delayserver.cluster.membership import Address, entry_of
from delayserver.serve.node import NodeShard
from delayserver.shards.book import OwnerBook


@pytest.mark.parametrize(
    ("urls", "known"),
    [
        ([], None),
        (["http://a:1"], "http://a:1"),
        (["http://a:1", "http://b:1"], "http://b:1"),
        (["http://a:1", "http://own:1"], None),
    ],
)
def test_an_office_that_the_node_held_before_it_was_started_again_is_not_asked(
    urls: list[str], known: str | None
) -> None:
    told: list[bytes] = []
    book = OwnerBook(1)
    node = SimpleNamespace(
        book=book, place=SimpleNamespace(shard=0), own_url="http://own:1", _tell=told.append
    )
    for epoch, url in enumerate(urls, 1):
        entry = entry_of(0, epoch, Address("n1", url, "host:2", tunnels=True).pack())
        for _ in range(2):
            NodeShard.on_owner(cast("NodeShard", node), entry)
    assert len(told) == len(urls), "what is known already is not told again"
    assert NodeShard.owner_url(cast("NodeShard", node)) == known
