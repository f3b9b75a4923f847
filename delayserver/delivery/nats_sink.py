"""Streams of NATS JetStream: a message for each, confirmed when the stream has stored it.

    send ──▶ under way, with a time-out ──▶ one task: publish, each with an inbox ──▶ NATS
      report ◀── the acknowledgement of the stream, or the time-out

`Nats-Msg-Id` is the message id, so a message that comes again within the stream's window of
duplicates is there once. An acknowledgement may say that the stream has left a message out as a
duplicate. The stream is right where it has the message from an earlier attempt. Where it has it
from another subscription, under another subject, ours would be lost. So the stream is asked which
message it has, and unless that has our subject, ours goes again, as `ID:SUBJECT`. A replay is
wanted once more, and goes as `ID:replay-N-MS`: how often the message had arrived before, and when
it did so last.

The other headers are those of every broker (`delayserver.delivery.carried`), but `delay-key` is
percent-encoded where it is not visible ASCII, as in a webhook: a line break in a header would end
it. Headers of a message that begin with `nats-` are orders to the server (`Nats-Rollup` empties a
stream) and do not leave; nor does anything go to a subject that begins with `$` or `_INBOX`, where
NATS itself listens.

One connection for all subscriptions with the same URL and the same time-out; acknowledgements come
in any order, so one stream that hangs holds up no other. Acknowledged ones are forgotten at once.
The client does not connect again by itself: the servers that it hears of have passed no allow list.
Pings find a server that has gone. Where it reads nothing, the client lets the task that publishes
wait; the time-outs of all messages go on, and `close` waits for nothing of it.

Rejected: `publish_async` of the client, which raises instead of telling where a stream answers with
an error of 400, 404, 500 or 503, so that only the time-out comes.

Cost: 45 µs of the event loop for a message: nats-py's, nearly all of it. Threads: belongs to the
event loop.
"""

import asyncio
import itertools
import re
import ssl
from collections import OrderedDict, deque
from collections.abc import Coroutine, Hashable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import quote

import msgspec
from nats import errors as client_errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import Error

from delayserver.delivery.addresses import checked_address
from delayserver.delivery.answers import (
    DUPLICATE,
    STORED,
    UNSENT,
    AnswerTable,
    BrokerAnswer,
    Certainty,
    Meaning,
    not_stored,
    unknown,
)
from delayserver.delivery.carried import filled, headers
from delayserver.delivery.complaints import quiet
from delayserver.delivery.outlet import Outlet, OutletError, Report, target_of
from delayserver.delivery.webhook import KEY_SAFE
from delayserver.errors import InputError
from delayserver.records.message import DueDelivery
from delayserver.records.subscriptions import NatsTarget, Subscription
from delayserver.security.broker_urls import BrokerUrl, split_broker_url
from delayserver.security.targets import TargetPolicy

PORTS: Final = {"nats": 4222, "tls": 4222}
OPEN_TIMEOUT_S: Final = 5.0
CLOSE_S: Final = 1.0
PING_S: Final = 10
WATCH_S: Final = 0.2
"""How long it may take until a lost connection is seen."""
ASK_S: Final = 2.0
"""For the question which message a stream has in place of a duplicate."""
WINDOW_BYTES: Final = 8 * 1024 * 1024
_HEAD_BYTES: Final = len("NATS/1.0\r\n\r\n")
NO_RESPONDERS: Final = "503"
NO_STREAM: Final = "no stream"
MESSAGE_ID: Final = "Nats-Msg-Id"

ANSWERS: Final = AnswerTable(
    "NATS",
    {
        # The subject has no listener: no stream stores it, or JetStream is not there.
        NO_STREAM: Meaning(Certainty.NOT_STORED, text="no response from stream"),
        # Errors of JetStream, by its own code, and otherwise by the class of the code.
        10077: Meaning(Certainty.NOT_STORED),  # the stream is full and discards new messages
        10054: Meaning(Certainty.NOT_STORED),  # longer than the stream takes
        10023: Meaning(Certainty.NOT_STORED),  # insufficient resources
        10008: Meaning(Certainty.NOT_STORED),  # JetStream is temporarily unavailable
        10109: Meaning(Certainty.NOT_STORED),  # the stream is sealed
        10071: Meaning(Certainty.NOT_STORED),  # wrong last sequence
        10060: Meaning(Certainty.NOT_STORED),  # another stream than was expected
        "4xx": Meaning(Certainty.NOT_STORED),
        "503": Meaning(Certainty.NOT_STORED),
        # A server that has failed in the middle of it.
        "5xx": Meaning(Certainty.UNKNOWN),
        # The client has refused to send it.
        client_errors.MaxPayloadError: Meaning(Certainty.NOT_STORED),
        client_errors.BadSubjectError: Meaning(Certainty.NOT_STORED),
        client_errors.BadHeaderError: Meaning(Certainty.NOT_STORED),
        client_errors.OutboundBufferLimitError: Meaning(Certainty.NOT_STORED),
        UnicodeError: Meaning(Certainty.NOT_STORED),
        # The connection went. A server ends one for the sake of a single message that it does
        # not like.
        client_errors.ConnectionClosedError: Meaning(Certainty.UNKNOWN, is_shared=True),
        client_errors.ConnectionDrainingError: Meaning(Certainty.UNKNOWN, is_shared=True),
        client_errors.ConnectionReconnectingError: Meaning(Certainty.UNKNOWN, is_shared=True),
        client_errors.StaleConnectionError: Meaning(Certainty.UNKNOWN, is_shared=True),
        client_errors.FlushTimeoutError: Meaning(Certainty.UNKNOWN),
        # So the client says that it closes at this moment.
        AttributeError: Meaning(Certainty.UNKNOWN, is_shared=True, text="the connection was lost"),
        OSError: Meaning(Certainty.UNKNOWN, is_shared=True),
        TimeoutError: Meaning(Certainty.UNKNOWN),
    },
)
_REFUSED: Final = re.compile(r'permissions violation for publish to "([^"]+)"', re.IGNORECASE)
_SUBJECT: Final = re.compile(r"[!-)+\-/-=?-~]+(?:\.[!-)+\-/-=?-~]+)*")
_OWN: Final = ("$", "_INBOX")


def split_nats_url(url: str) -> BrokerUrl:
    """The parts of a URL. Raises InputError at `/url`."""
    parts = split_broker_url(url, PORTS)
    if parts.path not in ("", "/"):
        raise InputError("behind the host of NATS stands nothing", "/url")
    if parts.user and not parts.password:
        # Other clients take such a name for a token, which would be shown in answers.
        raise InputError("write user:password@, or :token@ for a token", "/url")
    return parts


def check_subject(subject: str) -> None:
    """Whether messages may go there. Raises InputError at `/nats_subject`."""
    if not _SUBJECT.fullmatch(subject) or subject.startswith(_OWN):
        raise InputError(
            f"{subject!r} is not a subject of NATS to publish to: words of visible ASCII with dots "
            "between, without * and >, not beginning with $ or _INBOX",
            "/nats_subject",
        )


def nats_headers(delivery: DueDelivery) -> dict[str, str]:
    """All headers of a message."""
    carried = dict(headers(delivery))
    if "delay-key" in carried:
        carried["delay-key"] = quote(carried["delay-key"], KEY_SAFE)
    kept = {name: text for name, text in carried.items() if not name.lower().startswith("nats-")}
    return {MESSAGE_ID: nats_message_id(delivery), **kept}


def nats_message_id(delivery: DueDelivery) -> str:
    """The id by which a stream knows duplicates. A replay is no duplicate of the delivery before,
    and all its attempts have one id, so an earlier arrival stays in the history of the stream."""
    history = delivery.payload.history
    if history is None or not history.is_replay:
        return delivery.message_id
    arrived = [one.began_ms for one in history.attempts if not one.error]
    # The time as well: a long history leaves attempts out.
    return f"{delivery.message_id}:replay-{len(arrived)}-{max(arrived, default=0)}"


def wire_bytes(body: bytes, carried: dict[str, str]) -> int:
    """How long a message is for the server, which counts headers as they are on the wire."""
    lines = sum(len(name.encode()) + len(text.encode()) + 4 for name, text in carried.items())
    return len(body) + lines + _HEAD_BYTES


class NatsOpener:
    """Makes connections to NATS."""

    def __init__(self, policy: TargetPolicy, tls: ssl.SSLContext | None = None) -> None:
        """`tls`: the certificates to trust instead of the system's."""
        self._policy = policy
        self._tls = tls

    def key(self, subscription: Subscription) -> Hashable:
        """See `OutletOpener`."""
        return target_of(subscription, NatsTarget).url, subscription.timeout_ms

    async def open(self, subscription: Subscription) -> Outlet:
        """See `OutletOpener`."""
        parts = split_nats_url(target_of(subscription, NatsTarget).url)
        target = parts.target
        address = await checked_address(self._policy, target)
        quiet("nats.aio.client")
        client = Client()
        errors: list[Exception] = []
        outlet = _NatsOutlet(client, subscription.timeout_ms)

        async def on_error(error: Exception) -> None:
            errors[:] = [error]
            outlet.on_error(error)

        def password() -> str:
            # Asked when the server has said whether it wants TLS. The client goes on without where
            # the server does not, and would send the password to anybody in between.
            if target.scheme == "tls" and not client._server_info.get("tls_required"):
                raise Error("nats: the server offers no TLS")
            return parts.password

        tls: dict[str, Any] = {}
        if target.scheme == "tls":
            tls = {"tls": self._tls or ssl.create_default_context(), "tls_hostname": target.host}
        host = f"[{address}]" if ":" in address else address
        try:
            async with asyncio.timeout(OPEN_TIMEOUT_S):
                await client.connect(
                    f"nats://{host}:{target.port}",
                    name="delayserver",
                    user=parts.user or None,
                    password=password if parts.user or target.scheme == "tls" else None,
                    token=parts.password if parts.password and not parts.user else None,
                    allow_reconnect=False,
                    max_reconnect_attempts=1,
                    reconnect_time_wait=0,
                    ping_interval=PING_S,
                    max_outstanding_pings=1,
                    error_cb=on_error,
                    **tls,
                )
                await outlet.start()
        except BaseException as error:
            await _close(client)
            if not isinstance(error, Exception):
                raise
            # Its own errors, the network's, and ValueError for a peer that does not speak NATS.
            raise OutletError(_refusal(errors[0] if errors else error, client)) from error
        return outlet


class _Error(msgspec.Struct):
    code: int = 0
    err_code: int = 0
    description: str = ""


class _Reply(msgspec.Struct):
    """The answer of a stream to a publish."""

    stream: str = ""
    seq: int = 0
    duplicate: bool = False
    error: _Error | None = None


class _Stored(msgspec.Struct):
    subject: str = ""


class _StoredReply(msgspec.Struct):
    """The answer of a stream to a request for a message that it has."""

    message: _Stored | None = None


_decode_reply = msgspec.json.Decoder(_Reply).decode
_decode_stored = msgspec.json.Decoder(_StoredReply).decode


def answer_of(data: bytes, status: str | None) -> tuple[BrokerAnswer, _Reply | None]:
    """The answer that a reply to a publish stands for; and the reply itself where the stream has
    left the message out as a duplicate of another."""
    if status == NO_RESPONDERS:
        return ANSWERS.of((NO_STREAM,), "", ""), None
    try:
        reply = _decode_reply(data)
    except msgspec.MsgspecError:
        return unknown(f"NATS: an acknowledgement cannot be read: {data[:100]!r}"), None
    if reply.error is not None:
        error = reply.error
        # 503 is a JetStream that takes nothing now; other codes from 500 on are failures of it.
        kind = "503" if error.code == 503 else f"{error.code // 100}xx"
        name = f"code {error.code}, err_code {error.err_code}"
        return ANSWERS.of((error.err_code, kind), f"{error.description} ({name})", name), None
    if not reply.stream:
        return unknown(f"NATS: an answer that is no acknowledgement: {data[:100]!r}"), None
    return STORED, reply if reply.duplicate else None


@dataclass(slots=True)
class _SentMessage:
    """A message that is not acknowledged."""

    delivery: DueDelivery
    report: Report
    subject: str
    headers: dict[str, str]
    give_up_s: float
    has_left: bool = False
    """The client has it, and the server may have it."""
    is_again: bool = False
    """Sent again under an id of its own, since another was in its place."""


class _NatsOutlet:
    """An `Outlet`: one connection."""

    window_bytes = WINDOW_BYTES
    is_blocked = False
    connections, channels = 1, 0

    def __init__(self, client: Client, timeout_ms: int) -> None:
        self._client = client
        self._timeout_ms = timeout_ms
        self._inbox = ""
        self._tokens = itertools.count()
        self._under_way: OrderedDict[str, _SentMessage] = OrderedDict()
        """By the last word of the inbox; the oldest is first."""
        self._unpublished: deque[str] = deque()
        """Those that the client has yet to get; some may be given up already."""
        self._publisher: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._watching: asyncio.TimerHandle | None = None

    async def start(self) -> None:
        """Listen to acknowledgements. Raises the client's errors."""
        self._inbox = self._client.new_inbox()
        await self._client.subscribe(f"{self._inbox}.*", cb=self._on_reply)

    @property
    def is_broken(self) -> bool:
        return not self._client.is_connected

    def send(
        self, subscription: Subscription, deliveries: list[DueDelivery], report: Report
    ) -> None:
        target = target_of(subscription, NatsTarget)
        give_up_s = asyncio.get_running_loop().time() + self._timeout_ms / 1000
        for delivery in deliveries:
            try:
                subject = filled(target.subject, delivery) or ""
                check_subject(subject)
                carried = nats_headers(delivery)
                self._check_length(delivery, carried)
            except InputError as error:
                report(delivery, not_stored(f"NATS: {error.detail}"))
            except Exception as error:
                # A message without a report would stay on its way for good.
                report(delivery, ANSWERS.of_error(error))
            else:
                token = str(next(self._tokens))
                self._under_way[token] = _SentMessage(delivery, report, subject, carried, give_up_s)
                self._publish_soon(token)
        if self._under_way and self._watching is None:
            self._watching = asyncio.get_running_loop().call_later(WATCH_S, self._watch)

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _check_length(self, delivery: DueDelivery, carried: dict[str, str]) -> None:
        """The server would end the connection of all. Raises InputError."""
        size, most = wire_bytes(delivery.payload.body, carried), self._client.max_payload
        if size > most:
            raise InputError(f"its {size} bytes are longer than the server takes ({most})")

    def _publish_soon(self, token: str) -> None:
        self._unpublished.append(token)
        if self._publisher is None:
            self._publisher = self._start(self._publish_all())

    async def _publish_all(self) -> None:
        """Publish one after the other, since the client blocks a publisher while a server reads
        nothing."""
        # `_watch` and `close` tell of those that are left where the connection is lost.
        while self._unpublished and not self.is_broken:
            token = self._unpublished.popleft()
            sent = self._under_way.get(token)
            if sent is None:
                continue
            sent.has_left = True
            body, reply = sent.delivery.payload.body, f"{self._inbox}.{token}"
            try:
                await self._client.publish(sent.subject, body, reply=reply, headers=sent.headers)
            except Exception as error:
                self._answer(token, ANSWERS.of_error(error))
        self._publisher = None

    async def _on_reply(self, message: Msg) -> None:
        token = message.subject.rpartition(".")[2]
        sent = self._under_way.get(token)
        if sent is None:
            return
        status = message.headers.get("Status") if message.headers else None
        answer, duplicate = answer_of(message.data, status)
        if duplicate is None or sent.is_again:
            self._answer(token, answer if duplicate is None else DUPLICATE)
        else:
            self._start(self._look_at_duplicate(token, sent, duplicate))

    async def _look_at_duplicate(self, token: str, sent: _SentMessage, reply: _Reply) -> None:
        """The stream has a message with that id: is it this one?"""
        found = ""
        # Any error keeps it from telling: then it is unknown.
        with suppress(Exception):
            asked = msgspec.json.encode({"seq": reply.seq})
            place = f"$JS.API.STREAM.MSG.GET.{reply.stream}"
            answer = await self._client.request(place, asked, timeout=ASK_S)
            stored = _decode_stored(answer.data).message
            found = "" if stored is None else stored.subject
        if found == sent.subject:
            self._answer(token, DUPLICATE)
            return
        # Another subscription has put it there under another subject, or this account may not know.
        sent.headers[MESSAGE_ID] += f":{sent.subject}"
        sent.is_again = True
        self._publish_soon(token)

    def _answer(self, token: str, answer: BrokerAnswer) -> None:
        is_alone = len(self._under_way) == 1
        sent = self._under_way.pop(token, None)
        if sent is not None:
            sent.report(sent.delivery, answer.alone() if is_alone else answer)

    def on_error(self, error: Exception) -> None:
        """The client tells of something that no reply says: where this account may not publish. It
        says so in small letters, whatever the subject has."""
        refused = _REFUSED.search(str(error))
        if refused is None:
            return
        subject = refused[1].lower()
        found = [one for one, sent in self._under_way.items() if sent.subject.lower() == subject]
        # Another subject that differs in that alone may be one that is allowed.
        is_sure = len({self._under_way[one].subject for one in found}) == 1
        for token in found:
            self._answer(token, not_stored(_text(error)) if is_sure else unknown(_text(error)))

    def _watch(self) -> None:
        """Give up messages that have waited for too long. The client does not always say that it
        has lost its connection: not where it failed to write the rest."""
        self._watching = None
        loop = asyncio.get_running_loop()
        now_s = loop.time()
        if self.is_broken:
            self._lose_all("the connection was lost")
        while self._under_way:
            token, sent = next(iter(self._under_way.items()))
            if sent.give_up_s > now_s:
                break
            if sent.has_left:
                waited = f"NATS: no acknowledgement within {self._timeout_ms} ms"
                self._answer(token, unknown(waited))
            else:
                waited = f"NATS: the server has read nothing for {self._timeout_ms} ms"
                self._answer(token, not_stored(waited))
        if self._under_way:
            self._watching = loop.call_later(WATCH_S, self._watch)

    def _lose_all(self, reason: str) -> None:
        is_shared = sum(sent.has_left for sent in self._under_way.values()) > 1
        lost = unknown(f"NATS: {reason}", is_shared=is_shared)
        while self._under_way:
            _, sent = self._under_way.popitem(last=False)
            sent.report(sent.delivery, lost if sent.has_left else UNSENT)

    def let_go(self, subscription_id: int) -> None:
        """Nothing is kept for one subscription."""

    async def close(self) -> None:
        await _close(self._client)
        tasks = set(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            # The client keeps a cancellation to itself, and then goes on.
            await asyncio.wait(tasks, timeout=CLOSE_S)
        self._lose_all("the connection was closed")
        if self._watching is not None:
            self._watching.cancel()


async def _close(client: Client) -> None:
    """With an error where the broker has gone, and for ever where it was refused while TLS began or
    reads nothing; closed all the same."""
    with suppress(Error, OSError):
        async with asyncio.timeout(CLOSE_S):
            await client.close()
    # Else the socket stays open until such a server has read the rest.
    writer: asyncio.StreamWriter | None = getattr(client._transport, "_io_writer", None)
    if writer is not None:
        writer.transport.abort()


def _refusal(error: Exception, client: Client) -> str:
    """Why there is no connection. After its words about a wrong password the server closes the
    connection, and bytes that the client has sent meanwhile make that a reset, which may overtake
    the words."""
    if client._server_info and isinstance(error, ConnectionResetError | BrokenPipeError):
        return f"{_text(error)} when it was told who comes: a wrong user, password or token?"
    return _text(error)


def _text(error: BaseException) -> str:
    """An error as a dead letter names it."""
    text = str(error).removeprefix("nats: ") or type(error).__name__
    return f"NATS: {text}"
