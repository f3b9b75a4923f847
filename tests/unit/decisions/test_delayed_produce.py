"""Delayed produce: answered at the watermark, on a failure, or when its time is up; once."""

from __future__ import annotations

import pytest

from delayserver.decisions.delayed_produce import Level, Produces
from delayserver.timers.timeouts import Timeouts
from tests.unit.fakes import START_MS, MessageParts, Stopwatch, message

LATER_MS = START_MS + 10_000_000
Answers = list[tuple[Level, Exception | None]]


class Parts(MessageParts):
    def __init__(self) -> None:
        super().__init__()
        self.stopwatch = Stopwatch()
        self.timeouts = Timeouts(self.stopwatch)
        self.produces = Produces(self.groups, self.timeouts)
        self.answers: Answers = []

    def pass_until(self, passed_ms: int) -> None:
        self.stopwatch.shows_ms = passed_ms
        self.timeouts.advance()

    def wait(self, level: Level, timeout_ms: int = 100) -> None:
        seq = self.publish(message(LATER_MS))[-1]
        group = self.sequencer.group
        answers = self.answers
        self.produces.wait(
            group, seq, level, timeout_ms, lambda reached, error: answers.append((reached, error))
        )


@pytest.mark.parametrize("level", [Level.DURABLE, Level.FILED])
def test_a_publish_is_answered_when_the_watermark_passes_it(level: Level) -> None:
    parts = Parts()
    parts.wait(level)
    parts.commit()
    parts.produces.on_level_moved(Level.DURABLE)
    assert parts.answers == ([(Level.DURABLE, None)] if level is Level.DURABLE else [])
    parts.file()
    parts.produces.on_level_moved(Level.FILED)
    assert parts.answers == [(level, None)]
    assert parts.produces.count() == parts.timeouts.size() == 0


def test_what_is_there_already_is_answered_at_once() -> None:
    parts = Parts()
    answers: Answers = []
    parts.publish(message(LATER_MS))
    parts.commit()
    parts.file()
    for level in (Level.DURABLE, Level.FILED):
        parts.produces.wait(None, 2, level, 100, lambda *one: answers.append(one))
    assert answers == [(Level.FILED, None)] * 2


def test_when_its_time_is_up_it_says_how_far_it_came() -> None:
    parts = Parts()
    parts.wait(Level.DURABLE, 50)
    parts.wait(Level.FILED, 100)
    parts.pass_until(50)
    parts.commit()
    parts.produces.on_level_moved(Level.DURABLE)
    parts.pass_until(100)
    assert parts.answers == [(Level.ACCEPTED, None), (Level.DURABLE, None)]


@pytest.mark.parametrize("level", [Level.DURABLE, Level.FILED])
def test_a_group_that_failed_fails_it_and_another_of_the_same_seqs_does_not_answer_it(
    level: Level,
) -> None:
    parts = Parts()
    parts.wait(level)
    parts.groups.flush(START_MS)
    error = OSError()
    parts.groups.on_commit_failed(error)
    parts.produces.on_rolled_back()
    parts.publish(message(LATER_MS))
    parts.commit()
    parts.produces.on_level_moved(Level.DURABLE)
    [(_, failed)] = parts.answers
    assert failed is error
    assert parts.timeouts.size() == 0
