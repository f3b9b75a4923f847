"""Copies of a replica are given to nodes of the cluster, sealed, and to nobody else."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, MutableMapping
from typing import Any, NamedTuple

import google_crc32c
import pytest

from delayserver.api.hot.answers import header
from delayserver.api.hot.consume import WHEN_GONE
from delayserver.cluster.proofs import HEADER, NONCE_HEADER, WINDOW_MS, Guard, Proofs
from delayserver.cluster.sharing import COPIES_MAX, FROM_HEADER, PIECE_BYTES, Sharing
from delayserver.errors import LinkError
from delayserver.recovery.snapshots import decode_manifest
from storage.errors import DamageError, StorageError
from tests.unit.recovery.test_incoming import Source

SECRET = bytes(range(32))
NOW_MS = 1_000_000
ROOT = "/internal/shards/0/snapshot"


class Answered(NamedTuple):
    """What the application has sent."""

    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes


class Node:
    """An application that shares a source, and another node that asks it."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.proofs = Proofs(SECRET, "c")
        self.error: StorageError | None = None
        self.gone: Callable[[], object] | None = None
        self.app = Sharing(
            self._other, 0, self.proofs, source.snapshots, self._want, lambda: NOW_MS
        )

    async def _other(self, scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 299, "headers": []})
        await send({"type": "http.response.body", "body": b"another call"})

    def _want(self, take: Any, told: Any) -> None:
        told(None if self.error else take(self.source.server.store), self.error)

    async def ask(
        self,
        method: str,
        target: str,
        shown: bytes = b"",
        on_piece: Callable[[int], object] = lambda count: None,
    ) -> Answered:
        path, _, query = target.partition("?")
        sent: list[MutableMapping[str, Any]] = []

        async def send(message: MutableMapping[str, Any]) -> None:
            sent.append(message)
            on_piece(len(sent))

        def when_gone(gone: Callable[[], object] | None) -> None:
            self.gone = gone

        scope = {
            "type": "http",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "headers": [(HEADER, shown)] if shown else [],
            WHEN_GONE: when_gone,
        }
        await self.app(scope, None, send)  # type: ignore[arg-type]
        body = b"".join(message.get("body", b"") for message in sent[1:])
        return Answered(sent[0]["status"], sent[0]["headers"], body)

    async def asked(self, method: str, target: str) -> tuple[Answered, bytes]:
        """With a proof; and what the answer says."""
        shown = self.proofs.show(method, target, NOW_MS)
        answered = await self.ask(method, target, shown.header)
        if answered.status != 200:
            return answered, b""
        own_nonce = bytes.fromhex(header(answered.headers, NONCE_HEADER).decode())
        opener = self.proofs.opener(shown.nonce, own_nonce)
        return answered, b"".join(opener.open(answered.body))


@pytest.fixture(scope="module")
def source() -> Source:
    return Source(4)


@pytest.fixture
def node(source: Source) -> Node:
    return Node(source)


def test_other_calls_go_on(node: Node) -> None:
    assert asyncio.run(node.ask("GET", "/v1/messages")).body == b"another call"


@pytest.mark.parametrize("shown", [b"", b"x", b"1 2 3", b"1 00 00", b"\xff \xff \xff", b"9" * 9])
def test_without_a_proof_there_is_nothing(node: Node, shown: bytes) -> None:
    answered = asyncio.run(node.ask("GET", ROOT, shown))
    assert answered.status == 404
    assert b"snapshot" not in answered.body
    assert not node.source.snapshots._kept


def test_a_proof_of_something_else_is_none(node: Node) -> None:
    for proofs, method, target, at_ms in (
        (Proofs(bytes(32), "c"), "GET", ROOT, NOW_MS),
        (Proofs(SECRET, "d"), "GET", ROOT, NOW_MS),
        (node.proofs, "DELETE", ROOT, NOW_MS),
        (node.proofs, "GET", ROOT + "?have=1", NOW_MS),
        (node.proofs, "GET", ROOT, NOW_MS - WINDOW_MS - 1),
        (node.proofs, "GET", ROOT, NOW_MS + WINDOW_MS + 1),
    ):
        shown = proofs.show(method, target, at_ms).header
        assert asyncio.run(node.ask("GET", ROOT, shown)).status == 404


def test_a_proof_counts_once(node: Node) -> None:
    shown = node.proofs.show("GET", ROOT, NOW_MS).header
    assert asyncio.run(node.ask("GET", ROOT, shown)).status == 200
    assert asyncio.run(node.ask("GET", ROOT, shown)).status == 404


def test_nonces_are_forgotten_when_their_time_is_over() -> None:
    now_ms = NOW_MS
    proofs = Proofs(SECRET, "c")
    guard = Guard(proofs, lambda: now_ms)
    shown = proofs.show("GET", "/x", now_ms).header
    assert guard.nonce_of(b"GET", b"/x", shown)
    now_ms += 2 * WINDOW_MS + 1
    assert guard.nonce_of(b"GET", b"/x", shown) is None
    assert guard.nonce_of(b"GET", b"/x", proofs.show("GET", "/x", now_ms).header)
    assert len(guard._seen) == len(guard._order) == 1


def test_a_snapshot_and_its_files(node: Node) -> None:
    async def run() -> None:
        answered, text = await node.asked("GET", ROOT)
        assert answered.status == 200 and b"schedule" not in answered.body
        manifest = decode_manifest(text)
        for file in manifest.files:
            answered, data = await node.asked("GET", f"{ROOT}/{manifest.id}/{file.path}")
            assert len(data) == file.length
        path, length = manifest.files[-1]
        # ── from where the other has come already, if it is the same ──
        where = f"{ROOT}/{manifest.id}/{path}?have=100&checksum="
        checksum = google_crc32c.value(data[:100])
        answered, rest = await node.asked("GET", f"{where}{checksum}")
        assert (header(answered.headers, FROM_HEADER), rest) == (b"100", data[100:])
        for other in (checksum ^ 1, "x", ""):
            answered, rest = await node.asked("GET", f"{where}{other}")
            assert (header(answered.headers, FROM_HEADER), rest) == (b"0", data)
        whole = google_crc32c.value(data)
        _, rest = await node.asked(
            "GET", f"{ROOT}/{manifest.id}/{path}?have={length}&checksum={whole}"
        )
        assert rest == b""
        # ── what it does not have ──
        for other in ("FORMAT", "../../FORMAT", "", "schedule/2030-01-01.schedule"):
            assert (await node.asked("GET", f"{ROOT}/{manifest.id}/{other}"))[0].status == 404
        assert (await node.asked("GET", f"{ROOT}/another/{path}"))[0].status == 404
        assert (await node.asked("GET", "/internal/shards/1/snapshot"))[0].status == 404
        # ── and when it is not needed any more ──
        assert (await node.asked("DELETE", f"{ROOT}/{manifest.id}"))[0].status == 204
        assert (await node.asked("GET", f"{ROOT}/{manifest.id}/{path}"))[0].status == 404

    asyncio.run(run())


def test_what_is_wrong_at_the_source_is_told(node: Node) -> None:
    node.error = DamageError("schedule/x", 0, "the catalog names it, and it is not there")
    answered, _ = asyncio.run(node.asked("GET", ROOT))
    assert answered.status >= 500
    assert "schedule/x" in json.loads(answered.body)["detail"]


def test_an_answer_that_was_changed_is_refused(node: Node) -> None:
    async def run() -> None:
        shown = node.proofs.show("GET", ROOT, NOW_MS)
        answered = await node.ask("GET", ROOT, shown.header)
        own_nonce = bytes.fromhex(header(answered.headers, NONCE_HEADER).decode())
        changed = answered.body[:20] + bytes([answered.body[20] ^ 1]) + answered.body[21:]
        with pytest.raises(LinkError):
            list(node.proofs.opener(shown.nonce, own_nonce).open(changed))
        with pytest.raises(LinkError):
            list(node.proofs.opener(shown.nonce, bytes(32)).open(answered.body))

    asyncio.run(run())


def test_who_has_hung_up_gets_no_more(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = _with_long_file(node, monkeypatch)

    async def run() -> None:
        target = f"{ROOT}/{manifest}/long"
        shown = node.proofs.show("GET", target, NOW_MS).header

        def on_piece(count: int) -> None:
            if count == 3 and node.gone is not None:
                node.gone()

        answered = await node.ask("GET", target, shown, on_piece)
        assert len(answered.body) < 4 * PIECE_BYTES
        assert node.app._copies == 0 and node.gone is None

    asyncio.run(run())


def test_no_more_than_a_few_files_at_once(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = _with_long_file(node, monkeypatch)

    async def run() -> None:
        target = f"{ROOT}/{manifest}/long"
        asked = [node.asked("GET", target) for _ in range(COPIES_MAX + 1)]
        answers = await asyncio.gather(*asked)
        assert sorted(answered.status for answered, _ in answers) == [200] * COPIES_MAX + [503]

    asyncio.run(run())


def _with_long_file(node: Node, monkeypatch: pytest.MonkeyPatch) -> str:
    """The id of a snapshot that has one."""
    snapshots, disk = node.source.snapshots, node.source.disk
    manifest = node.source.make()
    length = 10 * PIECE_BYTES
    disk.open(f"snapshots/{manifest.id}/long", create=True).truncate(length)
    monkeypatch.setitem(snapshots._kept[manifest.id], "long", length)
    return manifest.id
