"""What is wanted of a source, from its options to rows."""

import numpy as np
import pytest

from delayserver.errors import InputError
from delayserver.pipeline.exports.place import absolute_root
from delayserver.pipeline.logs.columns import Names, name_table
from delayserver.pipeline.logs.logs import ALL, Range
from delayserver.pipeline.logs.options import parse_options
from delayserver.pipeline.logs.selection import (
    SELECTING,
    Selection,
    parse_selection,
)
from delayserver.records.direct import DIRECT_FIRST_ID
from storage.rows import DISPATCH_DTYPE, HOUR_MS
from tests.pipeline.store import HOUR, START_MS

NAMES = Names(name_table({1: "a", 2: "b"}), name_table({1: "mail", 7: "mail", 8: "sms"}))
STATES = {"dead": 6, "pending": 7}


def parse(**given: str) -> Selection:
    """Options by their names; `from_` is `from`."""
    known = (*SELECTING, "subscription", "state")
    options = {"path": "/data"} | {name.rstrip("_"): text for name, text in given.items()}
    return parse_selection(parse_options("delaystate", options, known), STATES)


def test_nothing_said_is_everything() -> None:
    assert parse() == Selection() == Selection(due_ms=ALL, seqs=ALL)
    assert parse().of_shard(NAMES).mask(np.zeros(3, DISPATCH_DTYPE)).all()
    assert parse().columns == frozenset()


def test_times_are_said_in_two_ways_and_end_before_to() -> None:
    assert parse(from_="2026-05-31T04:00:00Z").due_ms == Range(START_MS, ALL.last)
    assert parse(to=str(START_MS)).due_ms == Range(ALL.first, START_MS - 1)
    both = parse(from_="2026-05-31T06:30:00+02:00", to="2026-05-31T06:00:00Z")
    assert both.due_ms == Range(START_MS + HOUR_MS // 2, START_MS + 2 * HOUR_MS - 1)
    assert both.hours == Range(HOUR, HOUR + 1)


@pytest.mark.parametrize(
    ("text", "seqs"),
    [("5", Range(5, 5)), ("5..9", Range(5, 9)), ("5..", Range(5)), ("..9", Range(last=9))],
)
def test_seqs(text: str, seqs: Range) -> None:
    assert parse(seq=text).seqs == seqs


@pytest.mark.parametrize(
    ("option", "text", "wanted"),
    [
        ("from_", "yesterday", "the option from of delaystate is a time ("),
        ("to", "1e3", "the option to of delaystate is a time ("),
        ("to", "9" * 18, "the option to of delaystate is a time ("),
        ("seq", "", "the option seq of delaystate is a number or a range"),
        ("seq", "..", "5, 5..9, 5.. or ..9, not '..'"),
        ("seq", "9..5", "not '9..5'"),
        ("seq", "-3", "not '-3'"),
        ("seq", "3-5", "not '3-5'"),
        ("subject", "a,,b", "the option subject of delaystate is names"),
        ("subscription", "", "the option subscription of delaystate is names"),
        ("shard", "one", "the option shard of delaystate is a number"),
        ("state", "late", "the option state of delaystate is one or several of dead, pending"),
    ],
)
def test_what_cannot_be_meant_is_named(option: str, text: str, wanted: str) -> None:
    with pytest.raises(InputError) as error:
        parse(**{option: text})
    assert wanted in str(error.value)


def test_rows_are_picked_by_all_that_is_said() -> None:
    rows = np.zeros(4, np.dtype([*DISPATCH_DTYPE.descr, ("subject_id", "<u4"), ("state", "u1")]))
    rows["seq"] = [4, 5, 6, 7]
    rows["due_ms"] = START_MS + np.arange(4)
    rows["subject_id"] = [1, 1, 2, 0]
    rows["subscription_id"] = [1, 7, 8, DIRECT_FIRST_ID + 3]
    rows["state"] = [6, 7, 7, 6]

    def picked(**given: str) -> list[int]:
        selection = parse(**given)
        return np.flatnonzero(selection.of_shard(NAMES).mask(rows)).tolist()

    assert picked(seq="5..6") == [1, 2]
    assert picked(from_=str(START_MS + 1), to=str(START_MS + 3)) == [1, 2]
    assert picked(subject="a , b") == [0, 1, 2]
    assert picked(subject="c") == []
    # A subscription that was deleted and made again has two numbers.
    assert picked(subscription="mail") == [0, 1]
    assert picked(subscription="_to,sms") == [2, 3]
    assert picked(state="dead") == [0, 3]
    assert picked(state="dead,pending", subject="a", seq="5..") == [1]
    assert parse(subject="a", subscription="sms").columns == {"subject", "subscription"}


def test_a_directory_is_absolute_before_anybody_else_reads_its_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir("/")
    for given, absolute in {
        "data": "/data",
        "./srv/../data/": "/data",
        "/srv/a%20b": "/srv/a%20b",
        "file:/srv/data": "/srv/data",
        "file:///srv/a%20b": "/srv/a b",
        "file://localhost/srv": "/srv",
        "odd:name": "/odd:name",
    }.items():
        assert absolute_root(given) == absolute
        assert parse_options("delaylog", {"path": given}, ()).roots == (absolute,)
    several = {"paths": '["a", "s3a://bucket/data"]'}
    assert parse_options("delaylog", several, ()).roots == ("/a", "s3a://bucket/data")
    with pytest.raises(InputError, match="of another machine"):
        absolute_root("file://elsewhere/srv")
    with pytest.raises(InputError, match="needs the data directory"):
        parse_options("delaylog", {}, ())
