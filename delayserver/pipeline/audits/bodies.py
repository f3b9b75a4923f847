"""Waiting messages, body by body: does each payload match its checksum, and its row?

An audit reads columns. A body that was damaged since it was written shows when it is delivered, or
here, if the caller asks for it: the sealed payload of every entry in a schedule file is read. The
body itself means nothing to the server. But the payload has the key, and, for a message that was
moved or tried again, the message that it comes from. Both must match the row.

Cost: every byte of the schedule log, about 4 µs per message. Threads: functions without state.
"""

from delayserver.pipeline.audits.plan import HourTask, ShardBasis
from delayserver.pipeline.logs.logs import LogPiece, read
from delayserver.records.message import decode_payload
from storage.buckets import bucket_path
from storage.errors import DamageError
from storage.frame import Damage, Frame
from storage.rows import FLAG_REMOVAL, NO_KEY, PUBLISHES, LogKind


def verify_bodies(basis: ShardBasis, task: HourTask, damage: list[Damage]) -> int:
    """How many payloads of an hour are sound; the others go to `damage`."""
    directory = basis.directory
    path = bucket_path(LogKind.SCHEDULE, task.hour)
    piece = LogPiece(LogKind.SCHEDULE, path, 0, task.state.length, task.state.length)
    intact = 0
    for found in read(directory.files, piece, stamp=directory.stamp, payload=True):
        if isinstance(found, Frame):  # damage was named by the reader of columns already
            intact += _verify_frame(found, damage)
    return intact


def _verify_frame(frame: Frame, damage: list[Damage]) -> int:
    assert frame.payload is not None
    intact = 0
    is_entry = (frame.rows["flags"] & FLAG_REMOVAL) == 0
    for row in frame.rows[is_entry]:
        start, length = int(row["payload_offset"]), int(row["payload_length"])
        seq, place = int(row["seq"]), frame.payload_start + start
        sealed = frame.payload[start : start + length]
        try:
            payload = decode_payload(sealed, frame.path, place, seq)
        except DamageError as error:
            damage.append(_damage(frame, place, place + length, error.reason, seq))
            continue
        odd = ""
        if int.from_bytes(sealed[:4], "little") != int(row["payload_crc"]):
            odd = "the row names another checksum than its payload has"
        elif (payload.key is None) != (row["key_hash"].tobytes() == NO_KEY):
            odd = "the row and its payload do not agree in whether there is a key"
        elif payload.origin is not None and (
            payload.origin.message_seq != int(row["message_seq"])
            or payload.origin.subject_id != int(row["subject_id"])
        ):
            odd = "the payload is one of another message or subject than the row"
        elif payload.origin is None and int(row["kind"]) not in PUBLISHES:
            odd = "the payload does not say which message it comes from"
        if odd:
            damage.append(_damage(frame, place, place + length, odd, seq))
        else:
            intact += 1
    if not frame.payload_intact and intact == int(is_entry.sum()):
        end = frame.payload_start + frame.header.payload_bytes
        reason = "the payloads do not match their checksum as a whole"
        damage.append(_damage(frame, frame.payload_start, end, reason, 0))
    return intact


def _damage(frame: Frame, offset: int, end: int, reason: str, seq: int) -> Damage:
    return Damage(frame.path, offset, end, reason, torn=False, first_seq=seq, last_seq=seq)
