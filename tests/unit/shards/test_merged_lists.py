"""Lists of all shards are one list."""

from __future__ import annotations

from typing import Any

import pytest

from delayserver.api.documents import PLACES_HEADER
from delayserver.shards.peers import PeerAnswer, PeerCall
from tests.unit.shards.shards import ToldPeers, body_of, document_answer

COUNT = 4
HOURS = [[1, 2, 3], [], [2, 3, 4], [1, 4]]


FIRST_HOUR = 498_768
"""2026-11-25T00."""


def hour(number: int) -> dict[str, Any]:
    return {"hour": f"2026-11-20T0{number}", "count": number}


def archives(shard: int, call: PeerCall) -> PeerAnswer:
    assert (PLACES_HEADER.encode(), b"1") in call.headers
    query = dict(part.split("=") for part in call.query.decode().split("&"))
    limit = int(query["limit"])
    first = int(query.get("cursor", "x0")[-1]) + FIRST_HOUR * ("cursor" in query)
    rows = [FIRST_HOUR + n for n in HOURS[shard] if FIRST_HOUR + n >= first]
    return document_answer(
        {
            "items": [hour(one - FIRST_HOUR) for one in rows[:limit]],
            "places": [(one,) for one in rows[:limit]],
            "following": (rows[limit],) if len(rows) > limit else None,
            "limit": limit,
        }
    )


@pytest.mark.parametrize("limit", [1, 2, 3, 100])
def test_hours_of_all_shards_by_hour(limit: int) -> None:
    peers = ToldPeers(COUNT, archives, 2)
    found: list[tuple[int, int]] = []
    cursor: str | None = ""
    while cursor is not None:
        query = f"limit={limit}" + (f"&cursor={cursor}" if cursor else "")
        page = body_of(peers.route(PeerCall("GET", "/v1/archives", query.encode()), archive=True))
        assert page["archive"] is True and len(page["hours"]) <= limit
        found += [(one["count"], one["shard"]) for one in page["hours"]]
        cursor = page["cursor"]
    assert found == sorted((n, shard) for shard, hours in enumerate(HOURS) for n in hours)


def test_counts_by_name_are_added_up_as_far_as_all_pages_reach() -> None:
    """Of behind `c`, where the page of one shard ends, others may have shown more than it has."""
    pages = {
        0: ([("a", 1), ("c", 1)], "c"),
        1: ([("b", 2), ("d", 2)], None),
        2: ([], None),
        3: ([("a", 4)], None),
    }

    def lists(shard: int, call: PeerCall) -> PeerAnswer:
        rows, cursor = pages[shard]
        subjects = [{"name": name, "accepted": count} for name, count in rows]
        return document_answer({"subjects": subjects, "cursor": cursor})

    def page(query: bytes) -> tuple[list[tuple[str, int]], str | None]:
        answer = body_of(ToldPeers(COUNT, lists).route(PeerCall("GET", "/v1/subjects", query)))
        rows = [(one["name"], one["accepted"]) for one in answer["subjects"]]
        return rows, answer["cursor"]

    assert page(b"") == ([("a", 5), ("b", 2), ("c", 1)], "c")
    assert page(b"limit=2") == ([("a", 5), ("b", 2)], "b")
