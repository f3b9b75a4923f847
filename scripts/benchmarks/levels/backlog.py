"""What waiting messages cost: in memory, on the disk, and at a restart."""

from pathlib import Path

from report import Figure
from servers import Memory, Served

from levels.bench import (
    DAY_MS,
    HOUR_MS,
    MIB,
    MINUTE_MS,
    Bench,
    Size,
    batches_tomorrow,
    now_ms,
    prebuild,
    publish,
    random_batches,
    rate_of,
    settled_memory,
)

BACKLOG = 1_000_000
BACKLOG_QUICK = 4_000
SOON = 100_000
SOON_QUICK = 2_000
DISK_MAX_BYTES = 300
LARGE = 10


def backlog(bench: Bench) -> None:
    """What waiting messages cost: a million, and ten of them."""
    _backlog(bench)
    if bench.size is Size.FULL:
        _large(bench)


def _backlog(bench: Bench) -> None:
    later_count = bench.size.of(quick=BACKLOG_QUICK, usual=BACKLOG)
    soon_count = bench.size.of(quick=SOON_QUICK, usual=SOON)
    # The server's clock shows five minutes past an hour, so that this hour is loaded, and no other.
    offset_ms = HOUR_MS - now_ms() % HOUR_MS + 5 * MINUTE_MS
    options = ("--clock-offset-ms", str(offset_ms))
    hour_ms = (now_ms() + offset_ms) // HOUR_MS * HOUR_MS
    later = batches_tomorrow(hour_ms, keyed=True)
    soon = random_batches(hour_ms + HOUR_MS // 2, hour_ms + HOUR_MS - MINUTE_MS)

    name = f"backlog-{later_count}"
    with bench.server(name, *options) as server:
        empty, empty_ready_s = settled_memory(bench, server), server.ready_s
        bench.step(f"backlog: {later_count:,} due tomorrow")
        disk = allocated_bytes(bench.directory / name)
        rate = rate_of(publish(bench, server.port, later, count=later_count))
        after = settled_memory(bench, server)
        figure = _growth_figure(bench, f"memory, {later_count:,} due tomorrow", empty, after)
        figure.demand("< 50 MB", figure.value < 50)
        figure.note += f"; published at {rate:,.0f}/s; empty: {empty.resident / MIB:.0f} MB"
        figure.expect("pending later", server.stats()["pending_later"], later_count)
        disk = allocated_bytes(bench.directory / name) - disk
        catalog, log = (
            allocated_bytes(bench.directory / name / part) for part in ("catalog", "messages")
        )
        figure = bench.add(Figure(f"disk, {later_count:,} pending", disk / later_count, "B/msg"))
        figure.demand(f"≤ {DISK_MAX_BYTES} B", figure.value <= DISK_MAX_BYTES)
        figure.note = (
            "blocks of all files: each message is a body of 200 bytes under a key of 12; "
            f"of it the catalog {catalog / later_count:.0f} B, "
            f"segments of the message log {log / later_count:.0f} B"
        )

        bench.step(f"backlog: {soon_count:,} in the loaded hour, kill -9")
        publish(bench, server.port, soon, count=soon_count)
        server.kill()

    bench.step("backlog: restart")
    with bench.server(name, *options) as server:
        _restart_figure(bench, server, later_count, soon_count, soon_count, restart_max_s=1)
        bench.figures[-1].note += f"; empty: {empty_ready_s:.2f} s"

        bench.step(f"backlog: {later_count:,} in the loaded hour")
        publish(bench, server.port, soon, count=later_count - soon_count)
        after = settled_memory(bench, server)
        _per_message_figure(bench, later_count, "as they came", empty, after)

    bench.step(f"backlog: restart with {later_count:,} in the loaded hour")
    with bench.server(name, *options) as server:
        after = settled_memory(bench, server)
        figure = _per_message_figure(bench, later_count, "restarted", empty, after)
        figure.demand("≤ 24 B", round(figure.value) <= 24)
        figure.note += f"; ready in {server.ready_s:.2f} s"
        stats = server.stats()
        figure.expect("pending in loaded hours", stats["pending_loaded"], later_count)
        figure.expect("pending later", stats["pending_later"], later_count)


def _large(bench: Bench) -> None:
    """Ten million, one of them in the loaded hour; the last of it comes just before the kill."""
    later_count, soon_count = BACKLOG * (LARGE - 1), BACKLOG
    offset_ms = HOUR_MS - now_ms() % HOUR_MS + 5 * MINUTE_MS
    options = ("--clock-offset-ms", str(offset_ms))
    hour_ms = (now_ms() + offset_ms) // HOUR_MS * HOUR_MS
    stretch = hour_ms + HOUR_MS // 2, hour_ms + HOUR_MS - MINUTE_MS
    name = f"backlog-{later_count + soon_count}"
    bench.step(f"backlog: {later_count:,} due tomorrow")
    directory = bench.directory / name
    prebuild(
        bench,
        name,
        (later_count, hour_ms + DAY_MS, hour_ms + 2 * DAY_MS),
        (soon_count - SOON, *stretch),
    )
    with bench.server(name, *options) as server:
        after = settled_memory(bench, server)
        figure = bench.add(Figure(f"memory, {later_count:,} later", after.anonymous / MIB, "MB"))
        figure.note = f"anonymous, of all; {soon_count - SOON:,} of them in the loaded hour"
        disk = allocated_bytes(directory) / (later_count + soon_count - SOON)
        figure = bench.add(Figure(f"disk, {later_count:,} pending", disk, "B/msg"))
        figure.note = "without keys"
        bench.step("backlog: the last of them, kill -9")
        publish(bench, server.port, random_batches(*stretch), count=SOON)
        server.kill()
    bench.step("backlog: restart")
    with bench.server(name, *options) as server:
        _restart_figure(bench, server, later_count, soon_count, SOON, restart_max_s=2)


def _restart_figure(
    bench: Bench,
    server: Served,
    later_count: int,
    soon_count: int,
    last_count: int,
    *,
    restart_max_s: float,
) -> None:
    what = f"restart after kill -9, {later_count:,} later"
    figure = bench.add(Figure(what, server.ready_s, "s", group="restart"))
    figure.demand(f"≤ {restart_max_s:.0f} s", server.ready_s <= restart_max_s)
    figure.note = (
        f"{soon_count:,} more in the loaded hour, {last_count:,} of them published just before; "
        f"the server's processor time until then: {server.ready_cpu_s:.2f} s"
    )
    stats = server.stats()
    figure.expect("pending in loaded hours", stats["pending_loaded"], soon_count)
    figure.expect("pending later", stats["pending_later"], later_count)


def allocated_bytes(directory: Path) -> int:
    """Blocks that the files of a directory take, the catalog's holes not counted."""
    return sum(path.stat().st_blocks * 512 for path in directory.rglob("*") if path.is_file())


def _growth_figure(bench: Bench, case: str, before: Memory, after: Memory) -> Figure:
    grown = (after.anonymous - before.anonymous) / MIB
    figure = bench.add(Figure(case, grown, "MB"))
    figure.note = f"anonymous; file-backed {(after.file - before.file) / MIB:+.0f} MB"
    return figure


def _per_message_figure(bench: Bench, count: int, how: str, empty: Memory, after: Memory) -> Figure:
    case = f"memory, {count:,} in a loaded hour, {how}"
    figure = _growth_figure(bench, case, empty, after)
    figure.note += f", {figure.value:.0f} MB in all over an empty server, {count:,} later included"
    figure.value, figure.unit = figure.value * MIB / count, "B/msg"
    return figure
