"""The leases of a shard that has replicas: an owner that leaves in order hands them to the next.

    planned stop ──▶ keep ──▶ Holder ──▶ LEASES, RELEASE in the log of the shard
                              the node whose CLAIM counts next ──▶ Holder ──▶ read

The log of the shard says who owns it, so it says as well who holds the leases: only the node whose
claim counts directly behind the release. After a kill the log has no release. The next owner holds
no lease then, and every replica notes the moment: whatever had fallen due by then may have been
handed out.

Cost: a million leases are 30 to 58 MB in the log, in 34 to 65 records. Beyond LEASES_MAX_BYTES the
leases end with the process, as after a kill. Threads: those of the shard, one after the other.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np
import structlog

from delayserver.records.kept_leases import (
    NONE_KEPT,
    KeptLeases,
    decode_kept_leases,
    encode_kept_leases,
)
from storage.directory import Identity
from storage.errors import DamageError
from storage.replicated.holder import Holder

LEASES_MAX_BYTES: Final = 64 * 1024 * 1024
"""A million leases fit, even if each of them was pulled by itself."""

log = structlog.get_logger()


class OfficeLeases:
    """The place of the leases of an owner: its office."""

    def __init__(self, holder: Holder, seized_ms: Sequence[int], identity: Identity) -> None:
        """`seized_ms`: when the office was taken from an owner that had not left in order."""
        self._holder = holder
        self._starts_ms = np.array(seized_ms, np.int64)
        self._identity = identity

    def read(self) -> KeptLeases:
        """See `LeasesPlace`. Bytes that this version cannot read count as those of a kill."""
        name, data = self._holder.log.name, self._holder.leases
        kept = NONE_KEPT if data is None else KeptLeases(is_clean=True)
        if data:
            try:
                kept = decode_kept_leases(data, self._identity.stamp, name)
            except DamageError as error:
                log.error("the leases of the last owner are lost", error=str(error))
                kept = NONE_KEPT
        return replace(kept, starts_ms=self._starts_ms)

    def begin(self, kept: KeptLeases) -> None:
        """See `LeasesPlace`. The claim has said so in the log already."""
        self._holder.leases = None

    def keep(self, kept: KeptLeases) -> None:
        """See `LeasesPlace`. The office is given away behind this, and the leases with it."""
        data = encode_kept_leases(kept, self._identity.stamp)
        if len(data) <= LEASES_MAX_BYTES:
            self._holder.leases = data
        else:
            log.error(
                "the leases end with this owner: they are more than a hand-over takes",
                leases=len(kept.leases),
                total_bytes=len(data),
                bytes_max=LEASES_MAX_BYTES,
            )
