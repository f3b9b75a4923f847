"""A fault that lasts all night is some lines of the log."""

import logging

import pytest

from delayserver.delivery.complaints import (
    FORGOTTEN_S,
    REMEMBERED_MAX,
    Complaints,
    QuietFilter,
    QuietLogger,
    quiet,
)

NIGHT_S = 8 * 3600


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def test_a_night_is_some_lines_and_each_says_how_often() -> None:
    clock = Clock()
    complaints = Complaints(clock)
    said = []
    for _ in range(NIGHT_S * 5):
        clock.now_s += 0.2
        if (one := complaints.wrong("b", "away")) is not None:
            said.append(one)
    assert said[0].unsaid == 1 and said[0].words == "away"
    assert 5 < len(said) < 20
    over = complaints.right("b")
    assert over is not None and over.total == NIGHT_S * 5
    assert sum(one.unsaid for one in said) + over.unsaid == over.total
    assert complaints.right("b") is None and "b" not in complaints


def test_another_thing_and_one_that_comes_back_are_said_at_once() -> None:
    clock = Clock()
    complaints = Complaints(clock)
    assert complaints.wrong("a") and complaints.wrong("b") and not complaints.wrong("a")
    clock.now_s += FORGOTTEN_S + 1
    found = complaints.wrong("a")
    assert found is not None and found.total == 1
    complaints.forget("a")
    assert len(complaints) == 1


def test_it_is_bounded() -> None:
    complaints = Complaints(Clock())
    for number in range(3 * REMEMBERED_MAX):
        complaints.wrong(number)
    assert len(complaints) == REMEMBERED_MAX


def test_lines_of_librdkafka(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    logger = QuietLogger(logging.getLogger("tests.kafka"), clock)
    for number in range(100):
        logger.log(logging.ERROR, "FAIL [thrd:b:9092]: b:9092: Connect failed (%s)", number)
        logger.log(logging.ERROR, "FAIL [thrd:c:9092]: c:9092: Connect failed (%s)", number)
    logger.log(logging.ERROR, "ERROR [thrd:b:9092]: 1/1 brokers are down")
    assert len(caplog.messages) == 3 and caplog.messages[0].endswith("(0)")
    clock.now_s += 61
    logger.log(logging.ERROR, "FAIL [thrd:b:9092]: b:9092: Connect failed (100)")
    assert caplog.messages[-1].endswith("(100) (100 such lines since it was said last)")
    logger.error("a producer is replaced: %s", "why")
    assert caplog.messages[-1] == "a producer is replaced: why"


def test_lines_of_other_libraries(caplog: pytest.LogCaptureFixture) -> None:
    quiet("tests.library")
    quiet("tests.library")
    logger = logging.getLogger("tests.library")
    assert sum(isinstance(one, QuietFilter) for one in logger.filters) == 1
    for number in range(100):
        logger.error("error when creating transport: %r", number)
    logger.error("another")
    assert caplog.messages == ["error when creating transport: 0", "another"]
