"""The lines about dead letters: as many as an operator reads, and none is left out of the count."""

from structlog.testing import capture_logs

from delayserver.records.subscriptions import Registry
from delayserver.server.dead_letter_log import LINES_MAX, SPAN_MS, DeadLetterLog
from delayserver.timers.timeouts import Timeouts
from tests.unit.fakes import delivery, subscription


def test_many_dead_letters_are_some_lines_and_their_counts() -> None:
    now_ms = 0
    timeouts = Timeouts(lambda: now_ms)
    lines = DeadLetterLog(Registry([subscription(1), subscription(2)]), timeouts)
    with capture_logs() as logs:
        for seq in range(1, LINES_MAX + 4):
            lines.given_up(delivery(seq), "expired")
        lines.given_up(delivery(999, subscription_id=2), "HTTP 500")
        now_ms = SPAN_MS
        timeouts.advance()
        lines.given_up(delivery(1000), "expired")
        now_ms = 3 * SPAN_MS
        timeouts.advance()
    assert [line["event"] for line in logs[:LINES_MAX]] == ["dead letter"] * LINES_MAX
    assert logs[0]["message_id"] == "m1" and logs[0]["subscription"] == "s1"
    more = [(line["count"], line["subscription"], line["reason"]) for line in logs[LINES_MAX:-1]]
    assert more == [(3, "s1", "expired"), (1, "s2", "HTTP 500")]
    assert {line["event"] for line in logs[LINES_MAX:-1]} == {"more dead letters"}
    assert logs[-1]["event"] == "dead letter" and logs[-1]["message_id"] == "m1000"
    assert timeouts.size() == 0


def test_reasons_that_all_differ_are_one_count_beyond_a_hundred() -> None:
    now_ms = 0
    timeouts = Timeouts(lambda: now_ms)
    lines = DeadLetterLog(Registry([subscription(1)]), timeouts)
    with capture_logs() as logs:
        for seq in range(1, 4 * LINES_MAX + 1):
            lines.given_up(delivery(seq), f"the broker refused message {seq}")
        now_ms = SPAN_MS
        timeouts.advance()
    assert len(logs) == 2 * LINES_MAX + 1
    assert sum(line.get("count", 1) for line in logs) == 4 * LINES_MAX
