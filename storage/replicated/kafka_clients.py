"""Clients of librdkafka: made, asked, and their errors in words.

Where a log begins and ends is asked with a consumer that fetches nothing, one for an engine. Other
questions go to an administrator.

Threads: any.
"""

import logging
import re
import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any, Final, TypeVar

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient

from storage.errors import EngineError
from storage.replicated.kafka_settings import ClientSettings, ClusterUrl

END_TIMEOUT_S: Final = 1.0
CALL_TIMEOUT_S: Final = 15.0
"""For calls of an administrator, and for progress: longer than an election."""
REPORTS_GRACE_S: Final = 10.0
QUIET_S: Final = 10.0

Answer = TypeVar("Answer")

log = logging.getLogger(__name__)


class Asker:
    """Asks the brokers, for all logs of an engine. Threads: any."""

    def __init__(self, settings: ClientSettings) -> None:
        """Waits for no broker. Raises EngineError where the client does not know a setting."""
        self._settings = settings
        self.trouble: KafkaError | None = None
        """Why no broker could be connected to when that was told last."""
        wanted = settings.of_consumer() | {"error_cb": self._note_trouble}
        self._consumer = made(Consumer, wanted, settings.url)
        self._making = threading.Lock()
        self._admin: AdminClient | None = None

    @property
    def admin(self) -> AdminClient:
        """The client that changes topics. Few processes need it."""
        with self._making:
            if self._admin is None:
                wanted = self._settings.of_admin() | {"error_cb": self._note_trouble}
                self._admin = made(AdminClient, wanted, self._settings.url)
            return self._admin

    def ends(self, topic: str, partition: int) -> tuple[int, int] | None:
        """The first offset of a partition, and the one behind its last, as its leader says it
        within END_TIMEOUT_S; None: it does not. Raises KafkaException."""
        place = TopicPartition(topic, partition)
        try:
            found: tuple[int, int] | None = self._consumer.get_watermark_offsets(
                place, timeout=END_TIMEOUT_S, cached=False
            )
        except KafkaException as error:
            if error.args[0].code() in _UNKNOWN_TOPICS:
                # It was made just now, perhaps. The client remembers that it was not there, and
                # would not ask for it again.
                self._consumer.list_topics(topic, timeout=END_TIMEOUT_S)
            raise
        finally:
            self._consumer.poll(0)  # its log lines
        return None if found is None or min(found) < 0 else found

    def topics(self) -> dict[str, Any]:
        """Returns the metadata of all topics, by name. Raises KafkaException."""
        self.trouble = None  # Trouble that is over is no reason.
        try:
            topics: dict[str, Any] = self._consumer.list_topics(timeout=CALL_TIMEOUT_S).topics
        finally:
            self._consumer.poll(0)
        return topics

    def _note_trouble(self, error: KafkaError) -> None:
        if error.code() in _TELLING:
            self.trouble = error


_UNKNOWN_TOPICS: Final = (
    KafkaError.UNKNOWN_TOPIC_OR_PART,
    KafkaError._UNKNOWN_PARTITION,
    KafkaError._UNKNOWN_TOPIC,
)
_TELLING: Final = (KafkaError._AUTHENTICATION, KafkaError._SSL, KafkaError._RESOLVE)
"""Errors that say why a broker cannot be reached. Other errors of a call say only that none was."""


def made(kind: Callable[..., Answer], settings: dict[str, Any], url: ClusterUrl) -> Answer:
    """A client of librdkafka, which writes its own log lines to ours and not to standard error."""
    try:
        return kind(settings, logger=log)
    except KafkaException as error:
        advice = "correct the settings of its clients"
        raise EngineError("make a client", str(url), text_of(error), advice) from error


def result(future: "Future[Any]", timeout_s: float) -> Any:
    # The client has its own time-out: this one is for a client that does not keep it.
    return future.result(timeout_s + REPORTS_GRACE_S)


def answer(call: str, where: str, future: "Future[Any]") -> Any:
    """The answer to a call of an admin client. Raises EngineError."""
    try:
        return result(future, CALL_TIMEOUT_S)
    except KafkaException as error:
        raise refused(call, where, error) from error
    except FutureTimeoutError as error:
        raise refused(call, where, "no answer in time") from error


def refused(call: str, where: str, error: KafkaException | KafkaError | str) -> EngineError:
    advice = "see whether the brokers run and this client may do that, then try again"
    return EngineError(call, where, text_of(error), advice)


def text_of(error: KafkaException | KafkaError | str) -> str:
    """An error in words, without the names of the client's classes."""
    if isinstance(error, KafkaException):
        error = error.args[0]
    return error.str() if isinstance(error, KafkaError) else str(error)


class _Repeats(logging.Filter):
    """Lets the same line through once in QUIET_S: a client says for each of its connections, five
    times a second, that a broker is away."""

    def __init__(self) -> None:
        super().__init__()
        self._said_s: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        # The client's number, its thread, and after how many milliseconds are not part of it.
        line = re.sub(r"\[[^]]*\]|\(after [^)]*\)|rdkafka#\S+", "", record.getMessage())
        if record.created - self._said_s.get(line, -QUIET_S) < QUIET_S:
            return False
        self._said_s = {
            known: said_s
            for known, said_s in self._said_s.items()
            if record.created - said_s < QUIET_S
        }
        self._said_s[line] = record.created
        return True


log.addFilter(_Repeats())
