"""Subjects and headers of NATS. (With a real NATS: tests/sinks/test_nats.py.)"""

import asyncio
import re
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

import msgspec
import pytest
from nats import errors as client_errors

from delayserver.delivery import nats_sink
from delayserver.delivery.answers import Certainty
from delayserver.delivery.nats_sink import (
    ANSWERS,
    NO_STREAM,
    NatsOpener,
    answer_of,
    check_subject,
    nats_headers,
    nats_message_id,
    split_nats_url,
    wire_bytes,
)
from delayserver.delivery.outlets import OutletSink
from delayserver.delivery.sink import Confirmed, Failed, Result
from delayserver.errors import InputError
from delayserver.records.attempts import DeliveryAttempt, History, with_attempt
from delayserver.records.message import DueDelivery, Payload
from delayserver.records.subscriptions import (
    NatsTarget,
    Subscription,
    decode_subscription,
    encode_subscription,
)
from delayserver.security.targets import TargetPolicy
from tests.unit.delivery.reasons import reason, reason_at, saying
from tests.unit.fakes import always, delivery, subscription


def subscribed(url: str) -> Subscription:
    return subscription(type="nats", target=NatsTarget(url))


def test_what_a_message_says() -> None:
    payload = Payload(b"[1]", key="a\r\nb: ü", headers={"nAts-Rollup": "all", "x": "ä"})
    found = nats_headers(msgspec.structs.replace(delivery(3), payload=payload))
    assert [*found] == [
        *("Nats-Msg-Id", "delay-id", "delay-subject", "delay-key", "delay-due", "delay-attempt"),
        "x",
    ]
    assert found["Nats-Msg-Id"] == found["delay-id"] == "m3"
    assert found["delay-key"] == "a%0D%0Ab:%20%C3%BC"


@pytest.mark.parametrize("subject", ["a", "a.b-c_d", "due.{subject}", "ORDERS.7", "a$b"])
def test_subjects(subject: str) -> None:
    check_subject(subject)


@pytest.mark.parametrize(
    "subject",
    [
        "",
        ".",
        "a.",
        ".a",
        "a..b",
        "a b",
        "a\tb",
        "a\r\nPUB x",
        "a.*",
        ">",
        "ü",
        "$JS.API",
        "_INBOX.x",
    ],
)
def test_what_is_no_subject(subject: str) -> None:
    with pytest.raises(InputError):
        check_subject(subject)


def test_urls() -> None:
    assert split_nats_url("nats://:t@h").password == "t"
    assert split_nats_url("tls://u:p@h").target.port == 4222
    for url in ("nats://t@h", "nats://h/x", "ws://h"):
        with pytest.raises(InputError):
            split_nats_url(url)


@pytest.mark.parametrize(
    ("url", "reason_part"), [("nats://127.0.0.1:1", "NATS: "), ("nats://10.0.0.1", "not allowed")]
)
def test_one_that_cannot_be_reached_is_a_reason(url: str, reason_part: str) -> None:
    assert reason_part in asyncio.run(reason(NatsOpener(TargetPolicy()), subscribed(url)))


def test_a_password_goes_to_no_server_without_tls() -> None:
    """A server that wants none could be anybody on the way."""
    heard = bytearray()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b'INFO {"max_payload": 1000, "headers": true}\r\n')
        heard.extend(await reader.read())
        writer.close()

    found = reason_at(
        serve,
        NatsOpener(TargetPolicy()),
        lambda address: subscribed(f"tls://user:hidden@{address}"),
    )
    assert "no TLS" in asyncio.run(found)
    assert b"hidden" not in heard


def test_a_reset_in_place_of_a_refusal_says_what_it_may_be() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b'INFO {"max_payload": 1000, "headers": true}\r\n')
        await reader.readline()
        writer.get_extra_info("socket").setsockopt(
            socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
        )
        writer.transport.abort()

    found = reason_at(
        serve,
        NatsOpener(TargetPolicy()),
        lambda address: subscribed(f"nats://user:hidden@{address}"),
    )
    assert "password" in (said := asyncio.run(found))
    assert "hidden" not in said


def test_a_definition_as_bytes() -> None:
    one = subscription(type="nats", target=NatsTarget("nats://h", "due.{id}"))
    assert decode_subscription(encode_subscription(one)) == one


@pytest.mark.parametrize(
    "answer", [b"HTTP/1.1 400 Bad Request\r\n", b"INFO {]\r\n", b"INFO 7\r\n", b"\x01\n", b""]
)
def test_what_is_no_nats_is_a_reason(answer: bytes) -> None:
    found = reason_at(
        saying(answer), NatsOpener(TargetPolicy()), lambda address: subscribed(f"nats://{address}")
    )
    assert asyncio.run(found).startswith("NATS: ")


def error(code: int, err_code: int = 0) -> bytes:
    return msgspec.json.encode({"error": {"code": code, "err_code": err_code, "description": "d"}})


YES, NO, UNKNOWN = Certainty.STORED, Certainty.NOT_STORED, Certainty.UNKNOWN
ACK = b'{"stream":"S","seq":7}'
REPLIES: dict[str, tuple[bytes, str | None, Certainty]] = {
    "stored": (ACK, None, YES),
    "a field that is new": (
        b'{"stream":"S","seq":7,"domain":"d","val":"1"}',
        None,
        YES,
    ),
    NO_STREAM: (b"", "503", NO),
    **{str(one): (error(503, one), None, NO) for one in (10077, 10023, 10008)},
    **{str(one): (error(400, one), None, NO) for one in (10054, 10109, 10071, 10060)},
    "4xx": (error(400, 1), None, NO),
    "503": (error(503, 1), None, NO),
    "5xx": (error(500, 1), None, UNKNOWN),
    "another code": (error(700, 1), None, UNKNOWN),
    "no JSON": (b"+OK", None, UNKNOWN),
    "nothing": (b"", None, UNKNOWN),
    "something else": (b"{}", None, UNKNOWN),
    "a list": (b"[1]", None, UNKNOWN),
    "another type": (b'{"stream":7}', None, UNKNOWN),
}
RAISED: dict[Exception, tuple[Certainty, bool]] = {
    client_errors.MaxPayloadError(): (Certainty.NOT_STORED, False),
    client_errors.BadSubjectError(): (Certainty.NOT_STORED, False),
    client_errors.BadHeaderError("x"): (Certainty.NOT_STORED, False),
    client_errors.OutboundBufferLimitError(): (Certainty.NOT_STORED, False),
    UnicodeEncodeError("utf-8", "x", 0, 1, "no"): (Certainty.NOT_STORED, False),
    client_errors.ConnectionClosedError(): (Certainty.UNKNOWN, True),
    client_errors.ConnectionDrainingError(): (Certainty.UNKNOWN, True),
    client_errors.ConnectionReconnectingError(): (Certainty.UNKNOWN, True),
    client_errors.UnexpectedEOF(): (Certainty.UNKNOWN, True),
    client_errors.FlushTimeoutError(): (Certainty.UNKNOWN, False),
    AttributeError("'NoneType' object has no attribute 'write'"): (Certainty.UNKNOWN, True),
    ConnectionResetError(): (Certainty.UNKNOWN, True),
    TimeoutError(): (Certainty.UNKNOWN, False),
    client_errors.NotJSMessageError(): (Certainty.UNKNOWN, False),
}


@pytest.mark.parametrize("name", REPLIES)
def test_what_a_stream_answers(name: str) -> None:
    data, status, kept = REPLIES[name]
    answer, duplicate = answer_of(data, status)
    assert (answer.kept, answer.is_shared, duplicate) == (kept, False, None)
    assert kept is Certainty.STORED or answer.reason.startswith("NATS: ")


@pytest.mark.parametrize("raised", RAISED, ids=lambda one: type(one).__name__)
def test_what_the_client_raises(raised: Exception) -> None:
    found = ANSWERS.of_error(raised)
    assert (found.kept, found.is_shared) == RAISED[raised]


def test_every_row_of_the_table_is_tested() -> None:
    used = {key for key in ANSWERS.rows if str(key) in REPLIES}
    for raised in RAISED:
        used |= {next((one for one in type(raised).__mro__ if one in ANSWERS.rows), object)}
    assert used - {object} == set(ANSWERS.rows)


def test_a_length_is_that_of_the_wire() -> None:
    carried = {"a": "xy", "b": "\xe4"}
    wire = b"NATS/1.0\r\na: xy\r\nb: \xc3\xa4\r\n\r\nbody"
    assert wire_bytes(b"body", carried) == len(wire)


def test_a_replay_is_no_duplicate() -> None:
    arrived = DeliveryAttempt(1, 1, 5000, 7)
    replay = Payload(b"1", history=History((arrived,), is_replay=True))
    one = msgspec.structs.replace(delivery(3), payload=replay)
    assert nats_message_id(one) == "m3:replay-1-5000"
    assert nats_message_id(delivery(3)) == "m3"
    # A replay of the replay is another one.
    twice = replace_history(one, History((arrived, arrived), is_replay=True))
    assert nats_message_id(twice) == "m3:replay-2-5000"


def replace_history(one: DueDelivery, history: History) -> DueDelivery:
    payload = msgspec.structs.replace(one.payload, history=history)
    return msgspec.structs.replace(one, payload=payload)


def test_all_attempts_of_a_replay_have_the_same_id() -> None:
    """A retry is a row of its own. Under another id the stream would store the replay twice."""
    before = History((DeliveryAttempt(1, 1, 5000, 7),), is_replay=True)
    first = replace_history(delivery(8, message_seq=3), before)
    failed = DeliveryAttempt(1, 1, 6000, 7, error="NATS: the connection was lost")
    retried = replace_history(delivery(9, message_seq=3), with_attempt(before, failed))
    second = msgspec.structs.replace(retried, message_id=first.message_id, attempt=2)
    assert nats_message_id(first) == nats_message_id(second)


def test_replays_to_two_subscriptions_are_both_there() -> None:
    """Also where the stream has the message from both of them already."""
    replay = replace_history(
        delivery(1), History((DeliveryAttempt(1, 1, 5000, 7),), is_replay=True)
    )
    stream = Stream(stored=[("a", "m1"), ("b", "m1:b")])
    told = told_by(stream, ("a", replay), ("b", replay))
    assert told == {("a", 1): Confirmed(), ("b", 1): Confirmed()}
    assert [subject for subject, _ in stream.stored[2:]] in (["a", "b"], ["b", "a"])


@dataclass
class Stream:
    """A NATS with a stream that answers as a test says."""

    max_payload: int = 1_000_000
    stored: list[tuple[str, str]] = field(default_factory=list)
    """Subject and id, as a stream with a window of duplicates keeps them."""
    refused: set[str] = field(default_factory=set)
    """Subjects that the account may not publish to."""
    hangs: bool = False
    ends_at: str = ""
    """At a message to this subject it ends the connection."""
    may_ask: bool = True
    connections: int = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        info = {"max_payload": self.max_payload, "headers": True, "version": "2.10.0", "proto": 1}
        writer.write(b"INFO " + msgspec.json.encode(info) + b"\r\n")
        sids: list[tuple[str, str]] = []

        def reply(to: str, data: bytes) -> None:
            for subject, sid in sids:
                if to.startswith(subject.removesuffix("*")):
                    writer.write(f"MSG {to} {sid} {len(data)}\r\n".encode() + data + b"\r\n")

        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                words = (await reader.readuntil(b"\r\n")).decode().split()
                if words[0] == "PING":
                    writer.write(b"PONG\r\n")
                elif words[0] == "SUB":
                    sids.append((words[1], words[-1]))
                elif words[0] in ("PUB", "HPUB"):
                    data = await reader.readexactly(int(words[-1]) + 2)
                    if words[1] == self.ends_at:
                        break
                    self.take(words[1], data, writer, partial(reply, words[2]))
        writer.close()

    def take(
        self,
        subject: str,
        data: bytes,
        writer: asyncio.StreamWriter,
        reply: Callable[[bytes], None],
    ) -> None:
        if subject.startswith("$JS.API.STREAM.MSG.GET.") and self.may_ask:
            seq = msgspec.json.decode(data)["seq"]
            reply(
                msgspec.json.encode({"message": {"subject": self.stored[seq - 1][0], "seq": seq}})
            )
        elif subject in self.refused:
            text = f"-ERR 'Permissions Violation for Publish to \"{subject}\"'\r\n"
            writer.write(text.encode())
        elif not self.hangs and not subject.startswith("$"):
            found = re.search(rb"Nats-Msg-Id: (.*?)\r\n", data)
            assert found is not None
            its_id = found[1].decode()
            same = [seq for seq, (_, one) in enumerate(self.stored, 1) if one == its_id]
            if not same:
                self.stored.append((subject, its_id))
            seq = same[0] if same else len(self.stored)
            ack = {"stream": "S", "seq": seq} | ({"duplicate": True} if same else {})
            reply(msgspec.json.encode(ack))


def told_by(
    stream: Stream, *sent: tuple[str, DueDelivery], timeout_ms: int = 5000
) -> dict[tuple[str, int], Result]:
    """Returns the results of messages to subjects, by subject and seq."""
    told: dict[tuple[str, int], Result] = {}

    async def main() -> None:
        async with await asyncio.start_server(stream.serve, "127.0.0.1", 0) as server:
            host, port = server.sockets[0].getsockname()
            sink = OutletSink(NatsOpener(TargetPolicy()))
            subjects = list(dict.fromkeys(subject for subject, _ in sent))
            work = []
            for number, subject in enumerate(subjects, 1):
                target = NatsTarget(f"nats://{host}:{port}", subject)
                to = subscription(number, type="nats", target=target, timeout_ms=timeout_ms)

                def tell(some: list[DueDelivery], result: Result, its: str = subject) -> None:
                    told.update(((its, one.entry.seq), result) for one in some)

                ones = [one for its, one in sent if its == subject]
                work.append(sink.deliver(to, ones, always, tell))
            await asyncio.gather(*work)
            await sink.close()

    asyncio.run(main())
    return told


def test_what_a_stream_had_already_is_counted() -> None:
    counts: list[int] = []

    async def main() -> None:
        stream = Stream(stored=[("a", "m1")])
        async with await asyncio.start_server(stream.serve, "127.0.0.1", 0) as server:
            host, port = server.sockets[0].getsockname()
            sink = OutletSink(NatsOpener(TargetPolicy()))
            to = subscription(type="nats", target=NatsTarget(f"nats://{host}:{port}", "a"))
            await sink.deliver(to, [delivery(1), delivery(2)], always, lambda some, result: None)
            counts.append(sink.counts.duplicates)
            await sink.close()

    asyncio.run(main())
    assert counts == [1]


def test_two_subscriptions_with_the_same_message_into_one_stream() -> None:
    """The stream takes the second one for a duplicate of the first."""
    stream = Stream()
    told = told_by(stream, ("a", delivery(1)), ("b", delivery(1)))
    assert told == {("a", 1): Confirmed(), ("b", 1): Confirmed()}
    assert sorted(stream.stored) == sorted([("a", "m1"), ("b", "m1:b")]) or sorted(
        stream.stored
    ) == sorted([("b", "m1"), ("a", "m1:a")])


@pytest.mark.parametrize("may_ask", [True, False])
def test_a_message_that_comes_again_is_there_once(
    may_ask: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nats_sink, "ASK_S", 0.05)
    stream = Stream(stored=[("a", "m1")], may_ask=may_ask)
    assert told_by(stream, ("a", delivery(1))) == {("a", 1): Confirmed()}
    # Where an account may not look, it is better there twice than lost.
    assert stream.stored == [("a", "m1")] + ([] if may_ask else [("a", "m1:a")])


@pytest.mark.parametrize("refused", ["a", "ORDERS.a"])
def test_a_subject_that_the_account_may_not_publish_to(refused: str) -> None:
    told = told_by(Stream(refused={refused}), (refused, delivery(1)), ("b", delivery(2)))
    assert told[("b", 2)] == Confirmed()
    result = told[(refused, 1)]
    assert isinstance(result, Failed)
    assert "ermissions" in result.reason and "iolation" in result.reason


def test_a_server_that_stops_reading_holds_up_no_time_out_and_no_closing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(nats_sink, "CLOSE_S", 0.05)
    told: list[tuple[int, Result]] = []
    ended: list[asyncio.WriteTransport] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b'INFO {"max_payload": 1000000, "headers": true, "proto": 1}\r\n')
        while not (line := await reader.readline()).startswith(b"SUB"):
            if line.startswith(b"PING"):
                writer.write(b"PONG\r\n")
        writer.transport.pause_reading()  # type: ignore[attr-defined]  # of a socket
        ended.append(writer.transport)

    def tell(some: list[DueDelivery], result: Result) -> None:
        told.extend((one.entry.seq, result) for one in some)

    async def main() -> None:
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            host, port = server.sockets[0].getsockname()
            sink = OutletSink(NatsOpener(TargetPolicy()))
            target = NatsTarget(f"nats://{host}:{port}", "a")
            to = subscription(type="nats", target=target, timeout_ms=300)
            body = Payload(b"x" * 600_000)
            ones = [msgspec.structs.replace(delivery(seq), payload=body) for seq in range(24)]
            async with asyncio.timeout(20):
                await sink.deliver(to, ones, always, tell)
                (outlet,) = (one.outlet for one in sink.outlets.all_open())
                await sink.close()
            transport = outlet._client._transport._io_writer.transport  # type: ignore[attr-defined]
            assert not transport.get_write_buffer_size(), "its socket stays open"
            ended[0].abort()

    asyncio.run(main())
    assert sorted(seq for seq, _ in told) == list(range(24))
    assert {result for _, result in told} == {
        Failed("NATS: no acknowledgement within 300 ms"),
        Failed("NATS: the server has read nothing for 300 ms"),
    }


def test_a_stream_that_hangs_is_unknown_and_what_was_acknowledged_is_forgotten() -> None:
    told = told_by(Stream(hangs=True), ("a", delivery(1)), timeout_ms=50)
    assert told == {
        ("a", 1): Failed("NATS: no acknowledgement within 50 ms"),
    }


def test_one_message_for_which_the_server_ends_the_connection_fails_alone() -> None:
    stream = Stream(ends_at="bad")
    told = told_by(stream, *(("good", delivery(seq)) for seq in range(1, 6)), ("bad", delivery(9)))
    assert {one for one, result in told.items() if result != Confirmed()} == {("bad", 9)}


def test_a_message_that_is_too_long_costs_no_connection() -> None:
    stream = Stream(max_payload=1000)
    long = msgspec.structs.replace(delivery(2), payload=Payload(b"x" * 1000))
    told = told_by(stream, ("a", delivery(1)), ("a", long))
    assert told[("a", 1)] == Confirmed() and stream.connections == 1
    result = told[("a", 2)]
    assert isinstance(result, Failed) and "longer than the server takes (1000)" in result.reason
