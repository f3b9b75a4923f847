"""A node's proof when it asks another one over HTTP, and the seal of the answer.

    GET /internal/… ── delay-node: when, nonce, proof ──▶ HMAC right, recent, new?
                    ◀── delay-node-nonce ── records under a key of both nonces (`sealed`)

A proof is HMAC-SHA256, keyed by the secret of the cluster, of its name, the method, the target with
its query, the time and a nonce. It counts for WINDOW_MS and once: nonces are remembered as long. So
nobody else gets a copy of a shard, with or without a token of a user, and who has heard a request
gains nothing by repeating it.

The answer is sealed: messages are not to be read on the wire of a cluster without TLS, and bytes
that were changed on their way are refused. A listener sees which file is asked for, and how long it
is. With TLS (`tls_cert`) that cannot be seen either. An answer that is no copy, a refusal, is not
sealed: it says nothing.

Rejected: TLS alone, since a cluster on a private network may have none, and links are sealed
without it, too; a token, which can be used by who has heard it.

Cost: 10 µs a request; sealing as in `sealed`. Threads: `Proofs` is a value; `Guard` belongs to one.
"""

import hmac
import secrets
from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple

from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from delayserver.shards.sealed import NONCE_BYTES, SECRET_BYTES, Opener, Sealer

HEADER: Final = b"delay-node"
NONCE_HEADER: Final = b"delay-node-nonce"
WINDOW_MS: Final = 30_000
"""Clocks of nodes may differ by so much, less the time of the request."""
REMEMBERED_MAX: Final = 100_000
_WHAT: Final = b"delayserver-internal-1"
_KEY_BYTES: Final = 32


class ProofHeader(NamedTuple):
    """The header of a request, and the values that it was made with."""

    header: bytes
    nonce: bytes


class Proofs:
    """Makes and knows the proofs of one cluster."""

    def __init__(self, secret: bytes, cluster: str) -> None:
        assert len(secret) == SECRET_BYTES
        self._secret = secret
        self._cluster = cluster.encode()

    def show(
        self,
        method: str,
        target: str,
        at_ms: int,
        random_bytes: Callable[[int], bytes] = secrets.token_bytes,
    ) -> ProofHeader:
        """The headers to send with a request."""
        nonce = random_bytes(NONCE_BYTES)
        proof = self.of(method.encode(), target.encode(), at_ms, nonce)
        return ProofHeader(b"%d %b %b" % (at_ms, nonce.hex().encode(), proof.hex().encode()), nonce)

    def of(self, method: bytes, target: bytes, at_ms: int, nonce: bytes) -> bytes:
        """The proof itself."""
        # The nonce has a fixed length and stands last; nothing else has a line break.
        words = (_WHAT, self._cluster, method, target, b"%d" % at_ms, nonce)
        return hmac.digest(self._secret, b"\n".join(words), "sha256")

    def sealer(self, asked: bytes, answered: bytes) -> Sealer:
        """The sealer of the answer to a request, made of both nonces."""
        return Sealer(self._key(asked, answered))

    def opener(self, asked: bytes, answered: bytes) -> Opener:
        """The same, for who has asked."""
        return Opener(self._key(asked, answered))

    def _key(self, asked: bytes, answered: bytes) -> bytes:
        info = _WHAT + b" answer\n" + asked + answered + self._cluster
        return HKDF(SHA256(), _KEY_BYTES, salt=None, info=info).derive(self._secret)


class Guard:
    """Whether a request comes from a node of the cluster, and for the first time."""

    def __init__(self, proofs: Proofs, clock: Callable[[], int]) -> None:
        """`clock`: milliseconds since the epoch."""
        self._proofs = proofs
        self._clock = clock
        self._seen: set[bytes] = set()
        self._order: deque[tuple[int, bytes]] = deque()

    def nonce_of(self, method: bytes, target: bytes, shown: bytes) -> bytes | None:
        """The nonce of a request that shows this; None: it may not be served."""
        try:
            at, nonce_hex, proof_hex = shown.split(b" ")
            at_ms = int(at)
            nonce, proof = (bytes.fromhex(text.decode()) for text in (nonce_hex, proof_hex))
        except ValueError:
            return None
        if len(nonce) != NONCE_BYTES:
            return None
        if not hmac.compare_digest(self._proofs.of(method, target, at_ms, nonce), proof):
            return None
        now_ms = self._clock()
        while self._order and self._order[0][0] < now_ms - 2 * WINDOW_MS:
            self._seen.discard(self._order.popleft()[1])
        is_new = nonce not in self._seen and len(self._seen) < REMEMBERED_MAX
        if abs(now_ms - at_ms) > WINDOW_MS or not is_new:
            return None
        self._seen.add(nonce)
        self._order.append((now_ms, nonce))
        return nonce
