"""The wiring: from settings to a process that serves until it is told to stop.

    bind the port → lock and recover → start the threads → listen → … → drain → checkpoint → end

The port is bound first, so that a port in use is known before anything is touched, but no client
can connect before recovery has ended. Imports are most of a start, so those that readiness does not
need come behind it (`delayserver.serve.app`), and the collector is off until then.
"""

import asyncio
import contextlib
import ctypes
import gc
import os
import signal
import socket
import sys
from collections.abc import Coroutine, Iterator
from dataclasses import replace
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any

import structlog
import uvicorn
from uvicorn.server import ServerState

from delayserver.api.hot.answers import Always
from delayserver.api.moving import Moving
from delayserver.cluster.membership import Membership
from delayserver.config import Settings
from delayserver.errors import DelayServerError, InputError
from delayserver.log_writer import LogWriter
from delayserver.recovery.memory_faults import MemoryFaults
from delayserver.serve.acceptor import Acceptor
from delayserver.serve.app import REST_AFTER_S, App, make_app
from delayserver.serve.certificates import Certificates
from delayserver.serve.fixed_owner import FixedOwner
from delayserver.serve.hangups import Hangups, block
from delayserver.serve.listening import BACKLOG, bind, listen, url_of
from delayserver.serve.logs import finish_logging, set_up_logging
from delayserver.serve.reporting import (
    EXIT_FATAL,
    EXIT_FENCED,
    EXIT_REFUSED,
    READY,
    RECOVERED,
    tell_line,
    tell_supervisor,
)
from delayserver.serve.uvicorn_interface import check_uvicorn
from delayserver.server.descriptors import Budget, within_limit
from delayserver.server.server import Server, of_this_machine
from delayserver.shards.exposition import Figure
from delayserver.shards.place import ShardPlace
from storage.directory import CATALOG_DIRECTORY
from storage.errors import FencedError, StorageError
from storage.files import OsFiles
from storage.kinds import require_servable
from storage.shards import find_directory_above, fix_shard_count

if TYPE_CHECKING:
    from delayserver.serve.node import NodeShard
    from delayserver.serve.owner import OwnerNode

    Owner = FixedOwner | OwnerNode

GRACE_S = 5
GIVE_AWAY_MS = 1000
"""Deliveries on their way have so long when another is to own the shard; then it repeats them."""
LAST_LINES_S = 0.5
"""A process that must end at once waits so long for its last lines to be written."""
SWITCH_INTERVAL_S = 0.0005
"""A thread that wants the GIL waits so long for it, not 5 ms as by default: the committer is back
from the disk, and the event loop has much to do. With 10 µs a turn of the loop beside a checkpoint
takes longer: most of its time goes into changing hands."""

_M_MMAP_THRESHOLD = -3
MMAP_THRESHOLD_BYTES = 128 * 1024

log = structlog.get_logger()


def serve(
    settings: Settings,
    place: ShardPlace | None = None,
    membership: Membership | None = None,
    rest: bytes = b"",
) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit status. `place`: as one shard of several;
    `membership`: as one of a cluster, which may be on standby first. `rest`: the bytes that the
    supervisor has sent besides."""
    block()
    log_writer = set_up_logging(settings, place)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    _tune_allocator()
    try:
        check_uvicorn()
        certificates = Certificates(settings, is_node=membership is not None)
        figures = _figures(log_writer, certificates)
        Hangups(partial(_on_hangup, certificates), certificates.renew_if_changed)
        budget = within_limit(settings)
        settings = budget.settings
        place = place or ShardPlace.alone(settings.data_dir)
        listeners = _open_listeners(settings, place)
        node = None
        if membership is not None:
            from delayserver.serve.node import NodeShard

            node = NodeShard(
                settings,
                place,
                membership,
                rest,
                certificates,
                listeners=listeners,
                figures=figures,
                tell=tell_line,
                fatal=_end,
            )
        faults = MemoryFaults(settings.data_dir / CATALOG_DIRECTORY)
        faults.watch()
        if faults.was_seen:
            log.critical("the last run ended with a memory fault: the whole catalog is verified")
        moving = Moving()
        goes_on = True
        while goes_on:
            owner = FixedOwner(place) if node is None else _stand_by(node, moving)
            if owner is None:
                break
            server = _make_server(budget, owner, figures, faults)
            for listener in listeners:
                listen(settings, listener)
            serving = _serve(settings, server, listeners, certificates, owner, moving)
            goes_on = _run_until_end(serving)
        moving.close()
    except FencedError as error:
        log.critical("cannot go on", error=str(error))
        return EXIT_FENCED
    except (StorageError, DelayServerError, OSError) as error:
        log.critical("cannot start", error=str(error))
        return EXIT_REFUSED
    return 0


def _open_listeners(settings: Settings, place: ShardPlace) -> list[socket.socket]:
    """The sockets that clients will connect to: of the server, and of the shard alone if it is one
    of several. Raises OSError, and for a server alone InputError, StorageError: it cannot serve
    the directory."""
    listeners = [bind(settings, shares=not place.is_alone)]
    if not place.is_alone:
        return [*listeners, bind(settings.model_copy(update={"port": 0}))]
    data_dir = str(settings.data_dir)
    require_servable(data_dir)
    if (above := find_directory_above(data_dir)) is not None:
        raise InputError(
            f"{data_dir} is one shard of {above}: start the server of all of them, "
            f"--data-dir {above} --shards N"
        )
    fix_shard_count(OsFiles(data_dir), 1)
    return listeners


def _make_server(
    budget: Budget,
    owner: "Owner",
    figures: list[Figure],
    faults: MemoryFaults,
) -> Server:
    """A server that has recovered. Raises StorageError, AccessError."""
    surroundings = replace(
        of_this_machine(budget.settings, owner.place.shard),
        progress=_progress,
        schedule_hours_max=budget.schedule_hours_max,
    )
    server = Server(
        budget.settings,
        owner.around(surroundings),
        fatal=_end,
        verify_catalog=faults.was_seen,
        shards=owner.place.count,
        tokens_directory=owner.place.data_dir,
    )
    for name, text, value in figures:
        if name.endswith("_total"):
            server.metrics.counter(name.removesuffix("_total"), text, value)
        else:
            server.metrics.gauge(name, text, value)
    faults.remove_notes()
    return server


def _run_until_end(serving: Coroutine[Any, Any, bool]) -> bool:
    """Until it is told to stop, or gives its office away; whether the process is to go on then."""
    import uvloop

    # Objects that exist now live until the end: the collector need not look at them again.
    gc.freeze()
    _collect()
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(serving)
    except KeyboardInterrupt:
        return False
    finally:
        gc.unfreeze()


def _stand_by(node: "NodeShard", moving: Moving) -> "OwnerNode | None":
    """Follow until this node holds the office; None: it was told to stop."""
    import uvloop

    from delayserver.serve.candidacy import stand_by

    _collect()
    for listener in node.listeners:
        listener.listen(BACKLOG)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(stand_by(node, partial(tell_supervisor, RECOVERED), moving))


def _collect() -> None:
    """Turn the collector on: the start is over, and most of its objects live until the end."""
    # It looks at 50,000 objects at most while all wait, unless a quarter more objects live.
    gc.set_threshold(10_000, 5, 100)
    gc.enable()


class _Uvicorn(uvicorn.Server):
    """Lets long polls end before connections are waited for, and outlives the signal."""

    def __init__(
        self,
        config: uvicorn.Config,
        server: Server,
        app: App,
        acceptor: Acceptor,
        moving: Moving | None = None,
    ) -> None:
        """`moving`: where its connections are before it and, if it gives its shard away, behind
        it."""
        super().__init__(config)
        self._server = server
        self._app = app
        self._acceptor = acceptor
        self._moving = moving
        self.gives_away = False
        """Another one is to own the shard."""
        self._is_told_to_stop = False

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Instead of uvicorn's: connections are accepted by our own acceptor."""
        self.servers = [self._acceptor]  # type: ignore[list-item]  # `shutdown` calls it
        self._acceptor.begin(() if self._moving is None else self._moving.take())
        self.started = True
        self._app.rest.begin_within(REST_AFTER_S)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """uvicorn would raise the signal again at its end: then the server would die before it has
        filed the messages that it accepted."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self.handle_exit, number, None)
        yield

    def on_parent_gone(self) -> None:
        """The supervisor, which would start this shard again, is no more: end in order."""
        log.warning("the process that started this shard has ended, so it stops")
        self.handle_exit(signal.SIGTERM, None)

    async def on_tick(self, counter: int) -> bool:
        """uvicorn renews the date of answers that go through ASGI."""
        should_exit = await super().on_tick(counter)
        Always.set(self.server_state.default_headers)
        return should_exit

    def on_news(self) -> None:
        """The map may say something else now."""
        self._app.cluster.changed()

    @property
    def is_damaged(self) -> bool:
        """Whether something was found damaged."""
        return self._server.damage_count > 0

    @property
    def is_slow(self) -> bool:
        """Whether the disk is slower than the messages that are accepted."""
        return self._server.is_slow

    def give_away(self) -> None:
        """End in order: another is to have the shard, and this process goes on."""
        self.gives_away = self.should_exit = True

    def ends_hearing(self) -> bool:
        """Whether the process follows the shard from now on. A signal that comes before it listens
        to them again ends it: this server, which has ended, would swallow it."""
        goes_on = self.gives_away and not self._is_told_to_stop
        if goes_on:
            loop = asyncio.get_running_loop()
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)
        return goes_on

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # It may come while the shard is given away, when it is on the way to its end already.
        self._is_told_to_stop = True
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self.gives_away:
            # Calls that have come are answered; only a call that would have to wait is told to ask
            # again.
            self._server.hold_back()
            self._app.protocol.moving = self._moving
        else:
            await self._server.end_leases(lambda: self.force_exit)
            self._server.begin_stop()
        self._app.cluster.end()
        await super().shutdown(sockets)


async def _serve(
    settings: Settings,
    server: Server,
    listeners: list[socket.socket],
    certificates: Certificates,
    owner: "Owner",
    moving: Moving | None = None,
) -> bool:
    """Whether the process is to go on when it returns."""
    place = owner.place
    app = make_app(
        server.calls, place, meeting=owner.meeting, book=owner.book, machines=owner.machines
    )
    app = app._replace(asgi=owner.sharing(server)(app.asgi))
    await server.start()
    sockets = owner.lend(listeners)
    uvicorn_server, acceptor = _make_uvicorn(settings, server, app, sockets, certificates, moving)
    # Before anybody can come: who has proved itself believes that its tunnel is taken.
    owner.meeting.take_tunnels(acceptor.adopt)
    own_port = 0 if place.is_alone else listeners[-1].getsockname()[1]
    await app.member.begin(own_port, owner.epoch)
    on_news = partial(_on_news, owner, uvicorn_server)
    owner.serving(server, uvicorn_server.on_parent_gone, on_news)
    if not place.is_alone:
        tell_supervisor(RECOVERED)
        app.member.when_ready(partial(tell_supervisor, READY))
    is_https = certificates.served is not None
    log.info("listening", url=url_of(listeners[0], is_https), pid=os.getpid())
    try:
        await uvicorn_server.serve(sockets=sockets)
    finally:
        await app.member.close()
        owner.end()
        successor = owner.successor() if uvicorn_server.gives_away else None
        drain_ms = GIVE_AWAY_MS if uvicorn_server.gives_away else settings.drain_ms
        await server.stop(partial(owner.leave, successor), drain_ms=drain_ms)
    return uvicorn_server.ends_hearing()


def _make_uvicorn(
    settings: Settings,
    server: Server,
    app: App,
    listeners: list[socket.socket],
    certificates: Certificates,
    moving: Moving | None,
) -> tuple[_Uvicorn, Acceptor]:
    """Runs the application, once it serves on `listeners`; and takes its connections."""
    config = uvicorn.Config(
        app.asgi,
        http=app.protocol,
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        backlog=BACKLOG,
        timeout_graceful_shutdown=GRACE_S,
    )
    server_state = ServerState()
    make_protocol = partial(app.protocol, config=config, server_state=server_state, app_state={})
    acceptor = Acceptor(listeners, make_protocol, settings, certificates)
    uvicorn_server = _Uvicorn(config, server, app, acceptor, moving)
    uvicorn_server.server_state = server_state
    return uvicorn_server, acceptor


def _on_news(owner: "Owner", uvicorn_server: _Uvicorn) -> None:
    """Something else is known of the cluster."""
    uvicorn_server.on_news()
    if not uvicorn_server.should_exit:
        is_slow = uvicorn_server.is_slow
        successor = owner.successor(is_damaged=uvicorn_server.is_damaged, is_slow=is_slow)
        if successor is not None:
            log.info("gives its shard away", to=successor, disk_is_slow=is_slow)
            uvicorn_server.give_away()


def _tune_allocator() -> None:
    """Have the C library return large buffers when they are freed.

    Otherwise glibc raises its threshold with every large buffer that it sees, and keeps 200 MB of
    them. A C library without this call is left as it is."""
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES)


def _end(error: BaseException) -> None:
    """A thread failed: end at once, recover from the disk at the next start (I9)."""
    try:
        log.critical("ending", error=str(error))
        finish_logging(LAST_LINES_S)
    finally:
        os._exit(EXIT_FENCED if isinstance(error, FencedError) else EXIT_FATAL)


def _on_hangup(certificates: Certificates) -> None:
    if certificates.served is None:
        log.info("SIGHUP: there is nothing to read again")
    certificates.renew()


def _figures(log_writer: LogWriter, certificates: Certificates) -> list[Figure]:
    """Returns the metrics that this process counts beside its server: name, text and value."""
    return [
        ("log_lines_lost_total", "Lines of the log that were not written", lambda: log_writer.lost),
        (
            "certificate_end_timestamp_seconds",
            "When the certificate that is served ends, since 1970; 0: there is none",
            lambda: certificates.end_s,
        ),
        (
            "certificate_renewals_refused_total",
            "Changed certificates that were of no use",
            lambda: certificates.refused,
        ),
    ]


def _progress(what: str, done: int, total: int) -> None:
    log.info("recovering", what=what, done=done, total=total)
