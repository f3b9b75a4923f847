"""Tables of answers: the most special row counts, and what no row names is unknown."""

from delayserver.delivery.answers import (
    STORED,
    AnswerTable,
    BrokerAnswer,
    Certainty,
    Meaning,
    not_stored,
    unknown,
)
from delayserver.delivery.sink import Confirmed, Failed

TABLE = AnswerTable(
    "B",
    {
        OSError: Meaning(Certainty.UNKNOWN, is_shared=True),
        ConnectionRefusedError: Meaning(Certainty.NOT_STORED),
        7: Meaning(Certainty.STORED),
        "OOM": Meaning(Certainty.NOT_STORED, text="it is full"),
    },
)


def test_the_most_special_row_counts() -> None:
    assert TABLE.of_error(ConnectionRefusedError("no")) == not_stored("B: no")
    assert TABLE.of_error(BrokenPipeError()) == unknown("B: BrokenPipeError", is_shared=True)
    assert TABLE.of_error(OSError("x"), ("OOM",)) == not_stored("B: it is full")
    assert TABLE.of((8, 7), "", "eight").kept is Certainty.STORED


def test_an_answer_that_no_row_names_is_unknown_and_named() -> None:
    for error in (ValueError("odd"), KeyError()):
        found = TABLE.of_error(error)
        assert found.kept is Certainty.UNKNOWN and not found.is_shared
        assert type(error).__name__ in found.reason and "does not know" in found.reason
    assert "nine" in TABLE.of((9,), "", "nine").reason


def test_reasons_are_bounded() -> None:
    assert len(TABLE.of_error(OSError("x" * 10_000)).reason) <= 500


def test_results() -> None:
    assert STORED.result() == Confirmed()
    assert not_stored("no").result() == Failed("no")
    assert unknown("?").result() == Failed("?")


def test_who_was_alone_is_to_blame() -> None:
    shared = BrokerAnswer(Certainty.NOT_STORED, "no", is_shared=True)
    assert shared.alone() == not_stored("no")
    assert STORED.alone() is STORED
