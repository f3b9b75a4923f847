"""Backups of a server that goes on, from being asked for to a server on what was restored."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import uvloop

from delayserver.backup.backing_up import BackingUp
from delayserver.backup.log_shipping import LogShipper
from delayserver.backup.restoring import SKIPPED_SEQS, restore
from delayserver.backup.shelf import BackupView
from delayserver.backup.shipped_log import LATEST_MS
from delayserver.clocks import wall_clock_ms
from delayserver.config import MIB, Settings
from delayserver.decisions.new_messages import NewMessage
from delayserver.delivery.delayed_fetch import Pulled, PullRequest
from delayserver.errors import ConflictError, InputError, NotFoundError
from delayserver.parts.imports.rest import adopt
from delayserver.records.message import Payload
from delayserver.server.server import Server
from delayserver.times import parse_time_ms
from storage.errors import BackupError, DamageError, DirectoryKindError, DiskFullError
from storage.message_log import MessageLog
from storage.rows import HOUR_MS
from tests.unit.fakes import subscription
from tests.waiting import until
from tests.world.server import stage

Body = Callable[[Server], Coroutine[Any, Any, None]]


def serve(directory: Path, body: Body, **settings: Any) -> None:
    """Run `body` beside a server."""

    def fatal(error: BaseException) -> None:
        raise error

    async def main() -> None:
        server = Server(
            Settings(
                data_dir=directory / "data",
                disk_reserve_bytes=0,
                segment_bytes=1 << 16,
                **settings,
            ),
            fatal=fatal,
        )
        await server.start()
        try:
            await body(server)
        finally:
            await server.stop()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())


async def publish(server: Server, *keys: str, delay_ms: int = HOUR_MS) -> list[int]:
    """Messages with these keys, durable; their seqs."""
    seqs = []
    for key in keys:
        message = NewMessage("orders", wall_clock_ms() + delay_ms, Payload(b"{}", key=key))
        seqs.append(server.calls.publish_one(message, server.clock()).seq)
    await server.calls.all_durable()
    return seqs


async def made(server: Server, name: str | None = None, *, is_verified: bool = True) -> BackupView:
    """A backup, when it has ended."""
    begun = await server.backups.begin(name, is_verified=is_verified)
    return await ended(server, begun.name)


async def ended(server: Server, name: str) -> BackupView:
    task = server.backups._task
    assert task is not None
    await task
    return await server.backups.get(name)


def keys_in(directory: Path) -> set[str]:
    """What waits in a data directory."""
    found: set[str] = set()

    async def look(server: Server) -> None:
        for key in ("a", "b", "c", "d"):
            try:
                entry = server.calls.by_key("orders", key)
            except NotFoundError:
                continue
            found.add(key)
            del entry

    serve(directory, look)
    return found


OF_THE_DIRECTORY = {"KIND", "_lock-0000"}
"""They stay, whatever backups there are."""


def files_below(directory: Path) -> list[str]:
    found = {str(path.relative_to(directory)) for path in directory.rglob("*")}
    return sorted(found - OF_THE_DIRECTORY)


def names_in(directory: Path) -> list[str]:
    return sorted({path.name for path in directory.iterdir()} - OF_THE_DIRECTORY)


def test_a_backup_has_all_that_was_answered_before_it_and_nothing_else(tmp_path: Path) -> None:
    async def body(server: Server) -> None:
        await publish(server, "a", "b")
        first = await made(server, "first")
        assert (first.state, first.checkpoint_seq, first.is_verified) == ("complete", 3, True)
        await publish(server, "c")
        second = await made(server)
        assert second.copied_bytes > 0 and second.name.endswith("Z")
        third = await made(server, "third")
        # The files are those of the second: nothing has changed.
        assert (third.copied_bytes, third.total_bytes) == (0, second.total_bytes)
        names = [one.name for one in await server.backups.list()]
        assert names == ["first", second.name, "third"]
        assert server.backups.last is not None and server.backups.last.name == "third"
        await server.backups.delete(second.name)
        await publish(server, "d")

    backups = tmp_path / "backups"
    serve(tmp_path, body, backup_dir=backups)
    assert keys_in(tmp_path) == {"a", "b", "c", "d"}
    for name, keys in (("first", {"a", "b"}), ("third", {"a", "b", "c"})):
        (restored,) = restore(backups / name, tmp_path / name / "data", now_ms=wall_clock_ms())
        assert restored.problem == "" and restored.last_seq == 1 + len(keys)
        assert keys_in(tmp_path / name) == keys


def test_a_restored_server_gives_out_no_seq_that_the_other_one_has(tmp_path: Path) -> None:
    seqs: list[int] = []

    async def body(server: Server) -> None:
        seqs.extend(await publish(server, "a"))
        await made(server, "one")
        seqs.extend(await publish(server, "b"))

    serve(tmp_path, body, backup_dir=tmp_path / "backups")
    restore(tmp_path / "backups/one", tmp_path / "new/data", now_ms=wall_clock_ms())

    async def go_on(server: Server) -> None:
        seqs.extend(await publish(server, "b"))

    serve(tmp_path / "new", go_on)
    assert seqs == [2, 3, 3 + SKIPPED_SEQS]


def test_what_was_settled_before_is_not_pending(tmp_path: Path) -> None:
    async def pull(server: Server, count: int) -> None:
        worker = server.calls.subscription("worker")
        found: list[str] = []
        answered = asyncio.Event()

        def answer(pulled: Pulled) -> None:
            found.extend(pulled.tokens)
            answered.set()

        server.calls.consumers.pull(
            worker, PullRequest(10, 60_000, 20_000, answer, min_messages=count)
        )
        await answered.wait()
        acked: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        server.calls.consumers.ack(worker.id, found, lambda expired, error: acked.set_result(None))
        await acked

    async def body(server: Server) -> None:
        await server.calls.subscriptions.put(
            "worker", lambda known, registry: subscription(name="worker", subject="orders")
        )
        await publish(server, "a", "b", delay_ms=0)
        await pull(server, 2)
        await publish(server, "c", delay_ms=0)
        await made(server, "one")

    serve(tmp_path, body, backup_dir=tmp_path / "backups")
    restore(tmp_path / "backups/one", tmp_path / "new/data", now_ms=wall_clock_ms())

    async def look(server: Server) -> None:
        await pull(server, 1)
        assert server.engine.hours.unsettled() == 0

    serve(tmp_path / "new", look)


def test_what_is_refused(tmp_path: Path) -> None:
    async def without(server: Server) -> None:
        for call in (
            server.backups.begin("one", is_verified=True),
            server.backups.list(),
            server.backups.delete("one"),
        ):
            with pytest.raises(ConflictError, match="backup_dir"):
                await call

    serve(tmp_path, without)

    async def body(server: Server) -> None:
        for name in ("../up", "a/b", "", ".hidden", "x" * 101):
            with pytest.raises(InputError):
                await server.backups.begin(name, is_verified=True)
            with pytest.raises(NotFoundError):
                await server.backups.delete(name)
        begun = await server.backups.begin("one", is_verified=False)
        with pytest.raises(ConflictError, match="one is being made"):
            await server.backups.begin("two", is_verified=True)
        await ended(server, begun.name)
        assert not (await server.backups.get("one")).is_verified
        for taken in ("one", "theirs"):
            with pytest.raises(ConflictError, match=f"there is a backup {taken}"):
                await server.backups.begin(taken, is_verified=True)
        with pytest.raises(NotFoundError):
            await server.backups.get("theirs")

    (tmp_path / "backups/theirs").mkdir(parents=True)
    (tmp_path / "backups/theirs/file").touch()
    serve(tmp_path, body, backup_dir=tmp_path / "backups")


@pytest.mark.damaged("a byte of the schedule log is flipped")
def test_what_is_damaged_at_the_source_is_named_and_nothing_is_left(tmp_path: Path) -> None:
    async def body(server: Server) -> None:
        await publish(server, "a")
        await made(server, "one")
        (path,) = (tmp_path / "data/schedule").iterdir()
        data = bytearray(path.read_bytes())
        data[-9] ^= 1
        path.write_bytes(data)
        failed = await made(server, "two")
        assert failed.state == "failed" and failed.error is not None
        assert f"schedule/{path.name}" in failed.error and "--no-verify" in failed.error
        assert server.backups.failed_total == 1
        assert names_in(tmp_path / "backups") == ["_log", "one"]
        # It takes what is there, and says so.
        assert (await made(server, "three", is_verified=False)).state == "complete"
        assert [one.name for one in await server.backups.list()] == ["one", "three"]

    serve(tmp_path, body, backup_dir=tmp_path / "backups")
    (restored,) = restore(tmp_path / "backups/three", tmp_path / "x", now_ms=wall_clock_ms())
    assert "schedule/" in restored.problem
    shutil.rmtree(tmp_path / "x")
    shutil.rmtree(tmp_path / "backups/three")


def test_one_that_is_being_made_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By whoever deletes it, and by a server that stops."""
    begun: asyncio.Event
    loop: asyncio.AbstractEventLoop
    piece = BackingUp._piece

    def slow(self: BackingUp, *arguments: Any) -> bytes:
        self._pace._free_s = self._pace._monotonic() + 60
        loop.call_soon_threadsafe(begun.set)
        return piece(self, *arguments)

    monkeypatch.setattr(BackingUp, "_piece", slow)

    async def begin(server: Server) -> None:
        nonlocal begun, loop
        begun, loop = asyncio.Event(), asyncio.get_running_loop()
        await publish(server, "a")
        await server.backups.begin("one", is_verified=True)
        await begun.wait()

    async def delete(server: Server) -> None:
        await begin(server)
        assert (await server.backups.get("one")).step == "copying"
        await server.backups.delete("one")
        assert await server.backups.list() == []

    for body in (delete, begin):
        serve(tmp_path, body, backup_dir=tmp_path / "backups")
        assert files_below(tmp_path / "backups") == []
    assert not any((tmp_path / "data/snapshots").rglob("*.schedule"))


def test_what_a_killed_process_has_left_is_deleted(tmp_path: Path) -> None:
    async def one(server: Server) -> None:
        await made(server, "one")

    backups = tmp_path / "backups"
    serve(tmp_path, one, backup_dir=backups)
    shutil.copytree(backups / "one", backups / "two")
    (backups / "two/PARTIAL").write_text((backups / "two/FORMAT").read_text())

    async def look(server: Server) -> None:
        await server.backups.look()
        assert [view.name for view in await server.backups.list()] == ["one"]
        assert server.backups.last is not None

    serve(tmp_path, look, backup_dir=backups)
    assert names_in(backups) == ["_log", "one"]


def test_nothing_is_restored_of_what_is_not_as_the_manifest_says(tmp_path: Path) -> None:
    async def body(server: Server) -> None:
        await publish(server, "a", "b")
        await made(server, "one")

    serve(tmp_path, body, backup_dir=tmp_path / "backups")
    one, target = tmp_path / "backups/one", tmp_path / "new"

    def refused(match: str, error: type[Exception] = BackupError) -> None:
        with pytest.raises(error, match=match):
            restore(one, target, now_ms=wall_clock_ms())
        assert not target.exists() or list(target.iterdir()) == [target / "mine"]

    for path in sorted(one.rglob("*")):
        if path.is_dir() or path.name in ("lock.mdb", "KIND"):
            continue
        data = path.read_bytes()
        flipped = bytearray(data)
        flipped[len(data) // 2] ^= 1
        for broken in (bytes(flipped), data[:-2]):
            path.write_bytes(broken)
            refused(path.name, DamageError)
        path.unlink()
        if path.name == "BACKUP":
            refused("it has no manifest")
        else:
            refused(path.name, DamageError)
        path.write_bytes(data)
    (one / "PARTIAL").touch()
    refused("never finished")
    (one / "PARTIAL").unlink()
    target.mkdir()
    (target / "mine").touch()
    refused("is not empty", DirectoryKindError)
    with pytest.raises(BackupError, match="there is no directory"):
        restore(tmp_path / "backups/two", target, now_ms=wall_clock_ms())


# ── the log behind them ──────────────────────────────────────────────────────────────────────────


async def moment(server: Server) -> int:
    """Now; what is accepted from here on is later, and so is the millisecond before it: that far
    reaches a log that has it."""
    now_ms = server.clock()
    await until(lambda: server.clock() > now_ms + 1)
    return now_ms


def keys_until(tmp_path: Path, backup: Path, until_ms: int) -> set[str]:
    """What waits in what is restored to a moment."""
    new = tmp_path / f"until-{until_ms}-{backup.name}"
    (restored,) = restore(backup, new / "data", now_ms=wall_clock_ms(), until_ms=until_ms)
    assert restored.problem == ""
    assert not list((new / "data/messages").iterdir())
    return keys_in(new)


def test_a_backup_is_brought_forward_to_any_moment(tmp_path: Path) -> None:
    moments: list[int] = []

    async def body(server: Server) -> None:
        shipper = server.backups.shipper
        assert shipper is not None
        await publish(server, "a")
        await made(server, "one")
        assert shipper.reach_ms and (await server.backups.get("one")).log_reaches_ms
        for key in "bc":
            moments.append(await moment(server))
            await publish(server, key)
        await made(server, "two")
        moments.append(await moment(server))
        await publish(server, "d")
        await server.backups.ship()
        assert shipper.reach_ms > moments[-1] and not shipper.broken

    backups = tmp_path / "backups"
    serve(tmp_path, body, backup_dir=backups, backup_log_ms=60_000)
    wanted = dict(zip(moments, ("a", "ab", "abc"), strict=True))
    for until_ms, keys in wanted.items():
        for backup in (backups, backups / "one"):
            assert keys_until(tmp_path, backup, until_ms) == set(keys)
    for backup in (backups, backups / "one", backups / "two"):
        assert keys_until(tmp_path, backup, LATEST_MS) == set("abcd")


def refusal(backup: Path, target: Path, until_ms: int) -> str:
    with pytest.raises(BackupError) as caught:
        restore(backup, target, now_ms=wall_clock_ms(), until_ms=until_ms)
    assert not target.exists()
    return str(caught.value)


def test_the_log_goes_on_after_a_restart_and_is_whole_after_a_stop(tmp_path: Path) -> None:
    async def first(server: Server) -> None:
        await publish(server, "a")
        await made(server, "one")
        await publish(server, "b")

    async def second(server: Server) -> None:
        await publish(server, "c")
        await server.backups.ship()
        await publish(server, "d")
        assert server.backups.shipper is not None and server.backups.shipper.timeline == 1

    backups = tmp_path / "backups"
    for body in (first, second):
        serve(tmp_path, body, backup_dir=backups, backup_log_ms=60_000)
    assert keys_until(tmp_path, backups, LATEST_MS) == set("abcd")


def test_what_the_log_does_not_have_is_refused(tmp_path: Path) -> None:
    moments: list[int] = []

    async def body(server: Server) -> None:
        await publish(server, "a")
        moments.append(await moment(server))
        await made(server, "one")
        for key in "bcd":
            await publish(server, key)
            moments.append(await moment(server))
            # A file of its own for each.
            server.store.message_log._end_tail()  # type: ignore[attr-defined]
        await server.backups.ship()

    backups, new = tmp_path / "backups", tmp_path / "new"
    serve(tmp_path, body, backup_dir=backups, backup_log_ms=60_000)
    assert "the oldest backup" in refusal(backups, new, moments[0])
    assert "the newest that fits" in refusal(backups / "one", new, moments[0])
    assert "reaches to" in refusal(backups, new, wall_clock_ms() + 1000)
    segments = sorted(backups.rglob("*.messages"))
    assert len(segments) >= 3
    data = segments[-2].read_bytes()
    segments[-2].write_bytes(data[:-3] + bytes([data[-3] ^ 1]) + data[-2:])
    error = refusal(backups, new, LATEST_MS)
    assert "it is damaged at" in error and "--until latest" not in error
    # The time that it names can be restored; who knows what else came between that and the next.
    named = error.partition("reaches to ")[2].partition(",")[0]
    assert keys_until(tmp_path, backups, parse_time_ms(named)) == set("ab")
    segments[-2].unlink()
    assert "are missing behind that" in refusal(backups, new, moments[3])
    shutil.rmtree(backups / "_log")
    assert "there is no message log behind the backup one" in refusal(backups, new, moments[1])
    assert "neither a backup that counts nor" in refusal(tmp_path / "data", new, moments[1])


def test_a_log_goes_with_the_last_backup_that_needs_it(tmp_path: Path) -> None:
    async def body(server: Server) -> None:
        for name in ("one", "two"):
            await publish(server, "a" if name == "one" else "b")
            await made(server, name)
            server.store.message_log._end_tail()  # type: ignore[attr-defined]
        await publish(server, "c")
        await server.backups.ship()
        before = len([*backups.rglob("*.messages")])
        await server.backups.delete("one")
        assert 0 < len([*backups.rglob("*.messages")]) < before
        await server.backups.delete("two")
        assert names_in(backups) == []
        shipper = server.backups.shipper
        assert shipper is not None and (shipper.timeline, shipper.reach_ms) == (0, 0)
        # It begins anew with the next one.
        await made(server, "three")
        assert shipper.timeline == 2

    backups = tmp_path / "backups"
    serve(tmp_path, body, backup_dir=backups, backup_log_ms=60_000)


def test_a_restored_server_never_shares_the_backups_of_the_one_before(tmp_path: Path) -> None:
    async def before(server: Server) -> None:
        await publish(server, "a")
        await made(server, "one")
        await publish(server, "b")

    async def after(server: Server) -> None:
        await publish(server, "c")
        await server.backups.look()
        shipper = server.backups.shipper
        assert shipper is not None
        for call in (
            server.backups.begin("two", is_verified=True),
            server.backups.list(),
            server.backups.delete("one"),
        ):
            with pytest.raises(ConflictError, match=r"before it was restored.*--backup-dir"):
                await call
        await asyncio.gather(server.backups.ship(), server.backups.ship())
        assert not shipper.timeline and shipper.breaks_total == 1
        assert "before it was restored" in shipper.broken
        log = server.store.message_log
        assert isinstance(log, MessageLog) and log._held_from is None

    async def before_again(server: Server) -> None:
        await publish(server, "d")
        await server.backups.ship()
        shipper = server.backups.shipper
        assert shipper is not None and (shipper.timeline, shipper.broken) == (1, "")

    async def with_a_directory_of_its_own(server: Server) -> None:
        await publish(server, "d")
        await made(server, "two")

    backups, new = tmp_path / "backups", tmp_path / "new"
    settings: dict[str, Any] = {"backup_dir": backups, "backup_log_ms": 60_000}
    serve(tmp_path, before, **settings)
    restore(backups, new / "data", now_ms=wall_clock_ms(), until_ms=LATEST_MS)
    known = files_below(backups)
    serve(new, after, **settings)
    assert files_below(backups) == known
    serve(tmp_path, before_again, **settings)
    assert keys_until(tmp_path, backups, LATEST_MS) == set("abd")
    others = tmp_path / "others"
    serve(new, with_a_directory_of_its_own, backup_dir=others, backup_log_ms=60_000)
    assert keys_until(tmp_path, others, LATEST_MS) == set("abcd")
    # An operator who puts both into one directory names the one that is wanted.
    shutil.copytree(others / "two", backups / "two")
    with pytest.raises(BackupError, match="before and after it was restored"):
        keys_until(tmp_path, backups, LATEST_MS)
    with pytest.raises(BackupError, match="not that behind the backup two"):
        keys_until(tmp_path, backups / "two", LATEST_MS)
    assert keys_until(tmp_path, backups / "one", LATEST_MS) == set("abd")


def test_a_copy_of_a_server_that_runs_does_not_share_its_backups(tmp_path: Path) -> None:
    async def body(server: Server) -> None:
        await made(server, "one")
        shutil.copytree(tmp_path / "data", tmp_path / "copy", ignore=lambda *_: ["snapshots"])
        other = Server(
            server.settings.model_copy(update={"data_dir": tmp_path / "copy"}),
            fatal=server._fatal,
        )
        with pytest.raises(ConflictError, match="in use by another server"):
            await other.backups.begin("two", is_verified=True)
        other.close()

    serve(tmp_path, body, backup_dir=tmp_path / "backups")


def test_a_directory_that_takes_nothing_holds_up_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until more has to wait for it than may; then the next backup begins anew."""

    def full(self: LogShipper, through_ms: int) -> None:
        raise DiskFullError("pwrite", "_log", "No space left on device")

    async def body(server: Server) -> None:
        shipper, log = server.backups.shipper, server.store.message_log
        assert shipper is not None and isinstance(log, MessageLog)
        await made(server, "one")
        step = LogShipper.step
        monkeypatch.setattr(LogShipper, "step", full)
        for _ in range(40):
            for _ in range(4):
                message = NewMessage("orders", wall_clock_ms() + HOUR_MS, Payload(bytes(15_000)))
                server.calls.publish_one(message, server.clock())
            await server.calls.checkpoint()
            await server.backups.ship()
        assert len(log.written().first_seqs) * 65_536 < 1 << 21
        monkeypatch.setattr(LogShipper, "step", step)
        await server.backups.ship()
        assert shipper.breaks_total == 1 and "deleted before it was copied" in shipper.broken
        await made(server, "two")
        await publish(server, "a")

    backups = tmp_path / "backups"
    serve(tmp_path, body, backup_dir=backups, backup_log_ms=60_000, backup_log_held_max_bytes=MIB)
    assert keys_until(tmp_path, backups, LATEST_MS) == {"a"}


def test_a_bulk_load_is_not_passed_over(tmp_path: Path) -> None:
    moments: list[int] = []

    async def body(server: Server) -> None:
        await made(server, "one")
        await publish(server, "a")
        moments.append(await moment(server))
        load = stage(
            server.files,
            "load",
            [
                [
                    (
                        wall_clock_ms() + HOUR_MS,
                        server.engine.sequencer.subjects["orders"],
                        Payload(b"x"),
                    )
                ]
            ],
            lambda subject_id, key: bytes(16),
        )
        await adopt(server.calls, load)
        await publish(server, "b")
        await made(server, "two")
        await publish(server, "c")

    backups = tmp_path / "backups"
    serve(tmp_path, body, backup_dir=backups, backup_log_ms=60_000)
    assert keys_until(tmp_path, backups, moments[0]) == {"a"}
    assert "takes over a bulk load" in refusal(backups / "one", tmp_path / "new", LATEST_MS)
    assert keys_until(tmp_path, backups, LATEST_MS) == set("abc")


def test_nothing_is_shipped_where_nobody_wants_it(tmp_path: Path) -> None:
    async def body(server: Server) -> None:
        await made(server, "one")
        assert server.backups.shipper is None
        assert (await server.backups.get("one")).log_reaches_ms is None

    serve(tmp_path, body, backup_dir=tmp_path / "backups", backup_log_ms=0)
    assert names_in(tmp_path / "backups") == ["one"]
