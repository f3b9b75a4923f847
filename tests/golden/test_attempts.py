"""What has been tried, and what is replayed: bytes that were written once are read as they were
meant, and written the same.

They stand here and not in the directories, which are the same for all versions: payloads and notes
have grown within version 3."""

import numpy as np

from delayserver.records.attempts import DeliveryAttempt, History
from delayserver.records.message import Origin, Payload, decode_payload, encode_payload
from storage.frame import Frame, encode, scan
from storage.notes import Note, encode_note, framed, unpack_notes
from storage.rows import DISPATCH_DTYPE, FLAG_REPLAY, MESSAGE_DTYPE, LogKind, RecordKind
from tests.golden.make import BODY, HOUR, START_MS

STAMP = 0x01020304
HISTORY = History(
    (
        DeliveryAttempt(1, 1, START_MS + 2, 31, 500, "no", "HTTP 500"),
        DeliveryAttempt(2, 1, START_MS + 3, None, 0, "", "größer"),
    ),
    7,
    True,
)
PAYLOAD = Payload(BODY, origin=Origin(4, START_MS + 2, 1, 6, 2), history=HISTORY)
PAYLOAD_HEX = (
    "2b71fa2297c41f7b226f72646572223a20372c20227374617465223a2022756e70616964227d00c0c09504cf"
    "000001a1f978b582010602c09392970101cf000001a1f978b5821fcd01f4a26e6fa848545450203530309702"
    "01cf000001a1f978b583c000a0a86772c3b6c39f657207c3"
)
NOTE = Note(HOUR, 9, 1, 2, START_MS + 4, 5, 204, "thanks")
FRAME_HEX = (
    "444c5931010003000200000050000000210000000000000009000000000000000a0000000000000080b578f9"
    "a10100004add22cb1bc8467f04030201294634450900000000000000040000000000000084b578f9a1010000"
    "89b578f9a101000001000000010001000a00000000000000040000000000000084b578f9a101000089b578f9"
    "a10100000100000001000100dd0000000198ce00079be7090102cf000001a1f978b58405cccca67468616e6b"
    "7300000000000000"
)
REPLAY_HEX = (
    "0b00000000000000b2b578f9a10100000400000000000000040000000000000082b578f9a101000000000000"
    "000000000000000000000000010000000100000000000000630000000403020101000f04"
)


class InMemory:
    path = "golden"

    def __init__(self, data: bytes) -> None:
        self._data = data

    def pread(self, length: int, offset: int) -> bytes:
        return self._data[offset : offset + length]


def test_a_history_in_a_payload() -> None:
    assert encode_payload(PAYLOAD).hex() == PAYLOAD_HEX
    assert decode_payload(bytes.fromhex(PAYLOAD_HEX), "golden", 0, 1) == PAYLOAD


def deliveries() -> np.ndarray:
    return np.array(
        [(seq, 4, START_MS + 4, START_MS + 9, 1, 1, 1, 0) for seq in (9, 10)], DISPATCH_DTYPE
    )


def test_notes_in_a_frame_of_the_dispatch_log() -> None:
    rows, payload = framed([deliveries().tobytes(), encode_note(NOTE)])
    written = encode(
        LogKind.DISPATCH,
        bytes(rows),
        payload,
        first_seq=9,
        last_seq=10,
        created_ms=START_MS,
        stamp=STAMP,
    )
    assert written.hex() == FRAME_HEX
    data = bytes.fromhex(FRAME_HEX)
    [frame] = scan(InMemory(data), 0, len(data), kind=LogKind.DISPATCH, stamp=STAMP, payload=True)
    assert isinstance(frame, Frame) and frame.payload_intact
    np.testing.assert_array_equal(frame.rows, deliveries())
    assert unpack_notes(frame.payload or b"") == [NOTE]


def test_the_row_of_a_replay() -> None:
    row = np.zeros(1, MESSAGE_DTYPE)
    row["seq"], row["due_ms"], row["message_seq"] = 11, START_MS + 50, 4
    row["target_seq"], row["target_due_ms"] = 4, START_MS + 2
    row["subject_id"], row["subscription_id"], row["attempt"] = 1, 1, 1
    row["payload_length"], row["payload_crc"] = 99, 0x01020304
    row["kind"], row["flags"] = RecordKind.REPLAY, FLAG_REPLAY
    assert row.tobytes().hex() == REPLAY_HEX
