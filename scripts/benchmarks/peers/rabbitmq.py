"""RabbitMQ: a queue whose messages expire after the delay and are dead-lettered to the ready one.

A durable queue, persistent messages, publisher confirms: a confirm means that the message was
written and synced. A message expires only at the head of its queue, so one queue serves one delay:
a short delay behind a long one waits for it. The workload has one delay, which flatters it.
"""

import asyncio
import contextlib
import os
import shutil
import socket
import struct
import time
from pathlib import Path
from typing import Any

from peers.base import (
    ClosedLoop,
    ClosedLoopResult,
    Counter,
    Got,
    Peer,
    PeerError,
    closed_loop,
    make_body,
)

CONNECTIONS = 8
PREFETCH = 2000
_FRAME = struct.Struct(">BHI")
_ACK = struct.Struct(">HHQB")
_BASIC, _ACK_METHOD = 60, 80
_PROGRAMS = Path("/usr/lib/rabbitmq/bin/rabbitmq-server")


class RabbitMQ(Peer):
    """One node, with a data directory, a name and ports of its own."""

    name = "RabbitMQ TTL + dead letters"
    packages = "Debian: rabbitmq-server; PyPI: pamqp"
    durability = "durable, persistent, confirms"

    @classmethod
    def is_installed(cls) -> bool:
        try:
            import pamqp  # noqa: F401
        except ImportError:
            return False
        return _PROGRAMS.exists() or shutil.which("rabbitmq-server") is not None

    def start(self) -> None:
        program = str(_PROGRAMS) if _PROGRAMS.exists() else "rabbitmq-server"
        environment = {
            **os.environ,
            "RABBITMQ_NODENAME": f"bench{self.port}@localhost",
            "RABBITMQ_NODE_PORT": str(self.port),
            "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
            "RABBITMQ_DIST_PORT": str(self.port + 1),
            "RABBITMQ_MNESIA_BASE": str(self.directory / "mnesia"),
            "RABBITMQ_LOG_BASE": str(self.directory / "log"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(self.directory / "enabled_plugins"),
            "RABBITMQ_PID_FILE": str(self.directory / "pid"),
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "ERL_EPMD_PORT": str(self.port + 2),
            "HOME": str(self.directory),
        }
        # The port mapper that a node starts by itself is a daemon, and would outlive it.
        self.spawn("epmd", "-address", "127.0.0.1", "-port", str(self.port + 2))
        self.spawn(program, env=environment, cwd=self.directory)

    async def is_ready(self) -> bool:
        def ask() -> None:
            connection = open_channel(self.port)
            for queue, arguments in (
                ("ready", {}),
                (
                    "delayed",
                    {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "ready"},
                ),
            ):
                call(connection, "Queue.Declare", queue=queue, durable=True, arguments=arguments)
            connection.close()

        await asyncio.to_thread(ask)
        return True

    async def publish(self, load: ClosedLoop) -> ClosedLoopResult:
        from pamqp import commands, frame, header

        properties = commands.Basic.Properties(delivery_mode=2, expiration=str(load.delay_ms))
        size = len(make_body(0))
        head = frame.marshal(commands.Basic.Publish(routing_key="delayed"), 1) + frame.marshal(
            header.ContentHeader(body_size=size, properties=properties), 1
        )
        body_head = _FRAME.pack(3, 1, size)

        def request(due_ms: int) -> bytes:
            return b"%b%b%b\xce" % (head, body_head, make_body(due_ms))

        def connect(port: int) -> socket.socket:
            connection = open_channel(port)
            call(connection, "Confirm.Select")
            return connection

        connections = min(CONNECTIONS, load.in_flight)
        return await closed_loop(
            self.port, load, request, confirms, connections=connections, connect=connect
        )

    async def consume(self, count: int, idle_max_s: float) -> Got:
        from pamqp import commands, frame

        got = Got()
        connection = await asyncio.to_thread(open_channel, self.port)
        call(connection, "Basic.Qos", prefetch_count=PREFETCH)
        call(connection, "Basic.Consume", queue="ready")
        reader, writer = await asyncio.open_connection(sock=connection)
        with contextlib.suppress(TimeoutError):
            while len(got.due_ms) < count:
                kind, data = await asyncio.wait_for(_read_frame(reader), idle_max_s)
                if kind == 3:
                    got.add(time.time_ns(), data)
                    if len(got.due_ms) % 50 == 0 or len(got.due_ms) == count:
                        ack = commands.Basic.Ack(len(got.due_ms), True)
                        writer.write(frame.marshal(ack, 1))
            # The last acknowledgements are read before the connection ends.
            await writer.drain()
            await asyncio.sleep(0.2)
        writer.close()
        return got


async def _read_frame(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    kind, _, size = _FRAME.unpack(await reader.readexactly(_FRAME.size))
    return kind, (await reader.readexactly(size + 1))[:-1]


def open_channel(port: int) -> socket.socket:
    """A connection with channel 1 open, as guest. Raises PeerError."""
    from pamqp import commands, frame, header

    connection = socket.create_connection(("127.0.0.1", port), 10)
    connection.sendall(frame.marshal(header.ProtocolHeader(), 0))
    _expect(connection, "Connection.Start")
    start = commands.Connection.StartOk({}, "PLAIN", "\0guest\0guest", "en_US")
    connection.sendall(frame.marshal(start, 0))
    tune = _expect(connection, "Connection.Tune")
    tuned = commands.Connection.TuneOk(tune.channel_max, tune.frame_max, 0)
    connection.sendall(frame.marshal(tuned, 0))
    connection.sendall(frame.marshal(commands.Connection.Open("/"), 0))
    _expect(connection, "Connection.OpenOk")
    call(connection, "Channel.Open")
    return connection


def call(connection: socket.socket, name: str, **arguments: Any) -> Any:
    """A synchronous method of the protocol, on channel 1."""
    from pamqp import commands, frame

    group, method = name.split(".")
    request = getattr(getattr(commands, group), method)(**arguments)
    connection.sendall(frame.marshal(request, 1))
    return _expect(connection, f"{name}Ok")


def _expect(connection: socket.socket, name: str) -> Any:
    from pamqp import frame

    head = _receive(connection, _FRAME.size)
    data = head + _receive(connection, _FRAME.unpack(head)[2] + 1)
    _, _, found = frame.unmarshal(data)
    if found.name != name:
        raise PeerError(f"not {name}: {found!r}")
    return found


def _receive(connection: socket.socket, length: int) -> bytes:
    data = b""
    while len(data) < length:
        part = connection.recv(length - len(data))
        if not part:
            raise ConnectionError("the peer closed the connection")
        data += part
    return data


def confirms() -> Counter:
    """Counts publisher confirms, of one message or of all up to one."""
    single: set[int] = set()
    through = 0

    def count(data: bytes) -> tuple[int, bytes]:
        nonlocal through
        answers = 0
        while len(data) >= _FRAME.size:
            _, _, size = _FRAME.unpack_from(data)
            if len(data) < _FRAME.size + size + 1:
                break
            group, method, tag, flags = _ACK.unpack_from(data, _FRAME.size)
            if (group, method) != (_BASIC, _ACK_METHOD):
                raise PeerError(f"not a confirm: {data[:80]!r}")
            if flags & 1:
                answers += sum(1 for one in range(through + 1, tag + 1) if one not in single)
                single.difference_update(range(through + 1, tag + 1))
                through = max(through, tag)
            else:
                answers += 1
                single.add(tag)
                while through + 1 in single:
                    through += 1
                    single.remove(through)
            data = data[_FRAME.size + size + 1 :]
        return answers, data

    return count
