"""Proofs that both sides know the secret, and records that nobody can change, repeat or read."""

import itertools

import pytest

from delayserver.errors import LinkError
from delayserver.shards.sealed import (
    RECORD_MAX_BYTES,
    Handshake,
    Opener,
    Party,
    SealedSession,
    Sealer,
)

SECRET = bytes(range(32))
HIGH, LOW = Party(5, 7), Party(2, 1 << 40)
_nonces = (number.to_bytes(32, "little") for number in itertools.count())


def connector(secret: bytes = SECRET, cluster: str = "shop", own: Party = HIGH) -> Handshake:
    return Handshake(secret, cluster, own, next(_nonces), connects=True)


def acceptor(secret: bytes = SECRET, cluster: str = "shop", own: Party = LOW) -> Handshake:
    return Handshake(secret, cluster, own, next(_nonces), connects=False)


def met() -> tuple[SealedSession, SealedSession]:
    """The sessions of a connector and an acceptor."""
    here, there = connector(), acceptor()
    answer, rest = there.take(here.first)
    assert rest == b"" and there.session is None
    proof, rest = here.take(answer)
    assert rest == b"" and there.take(proof) == (b"", b"")
    assert here.session is not None and there.session is not None
    return here.session, there.session


def test_each_side_knows_who_the_other_is_and_reads_what_it_writes() -> None:
    here, there = met()
    assert (here.other, there.other) == (LOW, HIGH)
    for sender, receiver in ((here, there), (there, here)):
        for data in (b"one", b"two", bytes(3 * RECORD_MAX_BYTES + 1)):
            sealed = sender.sealer.seal(data)
            assert data not in sealed
            assert b"".join(receiver.opener.open(sealed)) == data


def test_a_handshake_and_records_come_in_any_pieces() -> None:
    here, there = connector(), acceptor()
    answer = b"".join(there.take(bytes((one,)))[0] for one in here.first)
    proof = b"".join(here.take(bytes((one,)))[0] for one in answer)
    assert here.session is not None
    # What is behind the proof is passed on.
    sealed = here.session.sealer.seal(b"first") + here.session.sealer.seal(b"second")
    for one in proof[:-1]:
        assert there.take(bytes((one,))) == (b"", b"")
    assert there.take(proof[-1:] + sealed) == (b"", sealed)
    assert there.session is not None
    opener = there.session.opener
    opened = [part for one in sealed for part in opener.open(bytes((one,)))]
    assert opened == [b"first", b"second"]


@pytest.mark.parametrize("other", [{"secret": bytes(32)}, {"cluster": "shop2"}, {"cluster": ""}])
def test_who_has_another_secret_or_cluster_is_not_believed(other: dict[str, str]) -> None:
    for here, there in ((connector(), acceptor(**other)), (connector(**other), acceptor())):  # type: ignore[arg-type]
        answer, _ = there.take(here.first)
        with pytest.raises(LinkError):
            here.take(answer)
        assert here.session is None
    # A connector that gives a proof of its own without having heard one.
    here, there, stranger = connector(), acceptor(), acceptor(**other)  # type: ignore[arg-type]
    answer, _ = stranger.take(here.first)
    there.take(here.first)
    with pytest.raises(LinkError):
        there.take(answer[-32:])
    assert there.session is None


def test_every_word_of_the_handshake_is_proved() -> None:
    here, there = connector(), acceptor()
    for place in range(len(here.first)):
        one, other = connector(), acceptor()
        changed = bytearray(one.first)
        changed[place] ^= 1
        try:
            answer, _ = other.take(bytes(changed))
        except LinkError:
            continue  # The magic.
        with pytest.raises(LinkError):
            one.take(answer)
    answer, _ = there.take(here.first)
    for place in range(len(answer)):
        one, other = connector(), acceptor()
        changed = bytearray(other.take(one.first)[0])
        changed[place] ^= 1
        with pytest.raises(LinkError):
            one.take(bytes(changed))
    for place in range(32):
        one, other = connector(), acceptor()
        changed = bytearray(one.take(other.take(one.first)[0])[0])
        changed[place] ^= 1
        with pytest.raises(LinkError):
            other.take(bytes(changed))


def test_what_was_said_is_of_no_use_again_nor_to_whom_said_it() -> None:
    here, there = connector(), acceptor()
    hello = here.first
    answer, _ = there.take(hello)
    proof, _ = here.take(answer)
    there.take(proof)
    # Repeated to another acceptor, which has a nonce of its own.
    again = acceptor()
    again.take(hello)
    with pytest.raises(LinkError):
        again.take(proof)
    # Repeated to another connector.
    with pytest.raises(LinkError):
        connector().take(answer)
    # Reflected: a connector hears its own words, and the proof of an acceptor as that of its own.
    mirrored = connector()
    with pytest.raises(LinkError):
        mirrored.take(mirrored.first[-44:] + proof)
    reflecting = acceptor()
    answer, _ = reflecting.take(mirrored.first)
    with pytest.raises(LinkError):
        reflecting.take(answer[-32:])


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\n", b"\0", b"delayserver-link-2", b"x" * 1000])
def test_something_else_is_seen_at_its_first_bytes(data: bytes) -> None:
    with pytest.raises(LinkError) as caught:
        acceptor().take(data)
    assert data.decode() not in str(caught.value)


def test_nobody_sends_more_than_a_greeting_before_it_is_answered() -> None:
    with pytest.raises(LinkError):
        acceptor().take(connector().first + b"\0")


def test_a_record_that_was_changed_repeated_left_out_or_moved_is_refused() -> None:
    for change in range(5):
        here, there = met()
        first, second = (here.sealer.seal(data) for data in (b"first", b"second"))
        opened: list[bytes] = []
        what = [
            first[:-1] + bytes((first[-1] ^ 1,)),
            first + first,
            second,
            second + first,
            b"\x04\0\0\0abcd" + first,
        ][change]
        with pytest.raises(LinkError):
            opened.extend(there.opener.open(what))
        assert opened == [b"first"] * (change == 1)


def test_directions_are_not_mixed_up() -> None:
    here, there = met()
    sealed = here.sealer.seal(b"mine")
    with pytest.raises(LinkError):
        list(here.opener.open(sealed))
    assert list(there.opener.open(sealed)) == [b"mine"]


def test_sessions_are_not_mixed_up() -> None:
    (here, _), (_, there) = met(), met()
    with pytest.raises(LinkError):
        list(there.opener.open(here.sealer.seal(b"mine")))


def test_a_record_that_is_too_long_is_refused_before_it_comes() -> None:
    opener = Opener(bytes(32))
    assert not list(opener.open((RECORD_MAX_BYTES + 16).to_bytes(4, "little")))
    with pytest.raises(LinkError):
        list(Opener(bytes(32)).open((RECORD_MAX_BYTES + 17).to_bytes(4, "little")))


def test_what_is_cut_off_is_not_opened() -> None:
    sealed = Sealer(bytes(32)).seal(b"data")
    opener = Opener(bytes(32))
    assert not list(opener.open(sealed[:-1]))
    assert list(opener.open(sealed[-1:])) == [b"data"]
    assert Sealer(bytes(32)).seal(b"") == b""
