"""The parts of `spread` and `billion` that tell figures from figures, and hours from hours."""

import re
import socket
import threading
from pathlib import Path

import billion
import pytest
import spread
from levels.bench import BATCH
from load import BatchRequests, LoadError, http_request, publish_batches
from loading import time_fullest, time_load, write_hour
from report import Figure
from servers import BenchmarkError, demand_space

HOUR = 500_000
BODY = b"x" * 20


@pytest.mark.unchecked("hours alone, without a catalog")
def test_an_hour_is_loaded_as_it_was_written(tmp_path: Path) -> None:
    write_hour(tmp_path, HOUR, BODY, [500, 1, 1, 3])
    write_hour(tmp_path, HOUR + 1, BODY, [504])
    assert time_load(tmp_path, HOUR).rows == 505
    # Four frames take more bytes than one.
    fullest = time_fullest(tmp_path)
    assert fullest is not None
    assert (fullest.hour, fullest.rows) == (HOUR, 505)
    assert fullest.row_us == pytest.approx(fullest.seconds / 505 * 1e6)


@pytest.mark.unchecked("no hour and no catalog")
def test_a_directory_without_an_hour_has_no_fullest(tmp_path: Path) -> None:
    write_hour(tmp_path, HOUR, BODY, [])
    assert time_fullest(tmp_path) is None


def test_long_frames_hold_all_rows() -> None:
    assert spread.long_frames(2 * spread.LONG_ROWS) == [spread.LONG_ROWS] * 2
    assert spread.long_frames(spread.LONG_ROWS + 7) == [spread.LONG_ROWS, 7]


def test_the_ratio_of_a_spread_is_to_the_base() -> None:
    figures = [
        Figure("restart, empty", 1.0, "s", group="restart"),
        Figure("24 h: filed", 2.0, "s", group="filed"),
        Figure("2 y: filed", 5.0, "s", group="filed"),
        Figure("2 y: look up", 5.0, "ms", group="look up"),
    ]
    spread.add_ratios(figures)
    assert [figure.ratios for figure in figures] == [{}, {"24 h": 1.0}, {"24 h": 2.5}, {}]


def test_no_two_messages_of_a_spread_have_the_same_key() -> None:
    messages = spread.SpreadMessages(spread.SPREADS_MS["24 h"], keyed=True)
    requests = [*messages.batches(BATCH), *messages.singles(2)]
    assert len(requests) == 3
    keys = [key for request in requests for key in re.findall(rb'"key":"(.*?)"', request)]
    assert len(set(keys)) == len(keys) == BATCH + 2


def test_a_billion_is_on_the_straight_line() -> None:
    figures = [
        Figure("memory, 1,000 pending", 10.0, "MB", group="memory"),
        Figure("memory, 501,000 pending", 10.5, "MB", group="memory"),
        Figure("disk, 501,000 pending", 275.0, "B/msg", group="disk"),
    ]
    memory, disk = billion.extrapolated(figures, 1_000, 501_000)
    assert memory.value == pytest.approx(10 + 0.5 / 500_000 * (10**9 - 1_000))
    assert (disk.value, disk.unit) == (275.0, "GB")
    assert all("(extrapolated)" in figure.case for figure in (memory, disk))


def test_a_smaller_one_is_not_extrapolated_below_what_was_measured() -> None:
    figures = [
        Figure("memory, 1,000 pending", 11.0, "MB", group="memory"),
        Figure("memory, 2,000 pending", 10.0, "MB", group="memory"),
    ]
    assert [figure.value for figure in billion.extrapolated(figures, 1_000, 2_000)] == [10.0]


def test_room_is_asked_for_before_anything_is_made(tmp_path: Path) -> None:
    demand_space(tmp_path, 1)
    with pytest.raises(BenchmarkError, match=r"1000000000\.0 GB are needed"):
        demand_space(tmp_path, 10**18)


BUSY = b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\n\r\n"
FINE = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"


@pytest.mark.parametrize("is_patient", [True, False])
def test_a_patient_publisher_sends_again_what_was_refused(is_patient: bool) -> None:
    request = http_request("POST", "/v1/messages", b"{}")
    got: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer() -> None:
            connection, _ = listening.accept()
            with connection:
                for reply in (BUSY, BUSY, FINE):
                    data = connection.recv(1 << 16)
                    if not data:
                        return
                    got.append(data)
                    connection.sendall(reply)

        thread = threading.Thread(target=answer)
        thread.start()
        batches = BatchRequests([request], 1)
        port = listening.getsockname()[1]
        if is_patient:
            sent = publish_batches(
                port, batches, 0, requests_max=1, is_patient=True, keep_answers=True
            )
            assert (sent.messages, sent.refused, sent.answers) == (1, 2, [b"{}"])
            assert got == [request] * 3
        else:
            with pytest.raises(LoadError, match="answered 503"):
                publish_batches(port, batches, 0, requests_max=1)
        thread.join()
