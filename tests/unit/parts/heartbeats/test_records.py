"""A heartbeat as it is stored: its check names each thing that is wrong."""

import msgspec
import pytest

from delayserver.parts.heartbeats.records import Heartbeat, check_heartbeat, unpack_heartbeat
from delayserver.records.message import Payload, encode_payload
from delayserver.records.tables import UNREADABLE

SEALED = encode_payload(Payload(b"1"))
encode = msgspec.msgpack.encode


def test_an_entry_is_read_as_it_was_written_and_passes_its_check() -> None:
    heartbeat = Heartbeat("a", 100, 3, SEALED)
    assert unpack_heartbeat(encode(heartbeat)) == heartbeat
    check_heartbeat(b"a", encode(heartbeat))


@pytest.mark.parametrize(
    ("heartbeat", "wrong"),
    [
        (Heartbeat("b", 100, 3, SEALED), "another key"),
        (Heartbeat("a"), "has ended"),
        (Heartbeat("a", 0, 3, SEALED), "has ended"),
        (Heartbeat("a", 100, 3, SEALED[:-1]), "checksum|payload"),
    ],
)
def test_an_entry_that_is_wrong_fails_its_check(heartbeat: Heartbeat, wrong: str) -> None:
    with pytest.raises(UNREADABLE, match=wrong):
        check_heartbeat(b"a", encode(heartbeat))
