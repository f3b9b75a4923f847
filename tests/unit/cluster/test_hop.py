"""The next hop of a request: the headers that go along, and a body that can be sent again."""

import asyncio
from typing import Any

import pytest

from delayserver.cluster import hop
from delayserver.cluster.hop import CallBody, beyond_hop, chunk


def test_headers_of_one_connection_stay_behind() -> None:
    headers = [(b"connection", b"Keep-Alive, x-mine, Content-Length"), (b"keep-alive", b"5")]
    kept = [(b"host", b"h"), (b"content-length", b"2"), (b"x-yours", b"1")]
    assert beyond_hop([*headers, (b"x-mine", b"1"), *kept]) == kept
    assert beyond_hop([*kept, (b"te", b"trailers")]) == kept


def test_a_part_in_chunks_says_its_length_and_an_empty_one_is_not_the_last() -> None:
    assert chunk(b"x" * 17) == b"11\r\n" + b"x" * 17 + b"\r\n"
    assert not chunk(b"")


@pytest.mark.parametrize(("kept_max_bytes", "again"), [(4, True), (3, False)])
def test_a_short_body_can_be_sent_again(
    kept_max_bytes: int, again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hop, "KEPT_MAX_BYTES", kept_max_bytes)
    parts = [{"body": part, "more_body": part != b"ef"} for part in (b"ab", b"cd", b"ef")]

    async def whole() -> None:
        waiting = iter(parts)

        async def receive() -> dict[str, Any]:
            return next(waiting)

        body = CallBody(receive)
        assert [await body.receive() for _ in parts[:2]] == parts[:2]
        assert body.rewind() is again
        if again:
            assert [await body.receive() for _ in parts] == parts

    asyncio.run(whole())
