"""How each part of a data directory is opened.

A server on its own opens logs in the directory itself. Those of an owner and of a standby stand on
a log that all replicas read (`recovery.replica`). Those of the simulation tell their ledger of
each step.

Cost: none. Threads: immutable values.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from delayserver.config import Settings
from delayserver.delivery.settler import Settler
from delayserver.recovery.leases_file import LeasesFile, LeasesPlace
from delayserver.schedule.expansion import Staging
from delayserver.schedule.loader import LOAD_SIZES, LoadSizes
from delayserver.schedule.replay import Replay
from storage.catalog import Catalog
from storage.definitions_log import DefinitionsLog
from storage.directory import Identity
from storage.files import Files
from storage.hour_log import HourLog
from storage.kinds import SERVED, Kind
from storage.message_log import MessageLog
from storage.replicated.transactions import SettledTransactions
from storage.tiered_catalog import KEY_TIERS, KeyTiers
from storage.write_ahead_log import CheckpointedLog, WriteAheadLog


def own_message_log(
    files: Files, catalog: Catalog, identity: Identity, settings: Settings
) -> WriteAheadLog:
    """The message log in the directory itself: that of a server on its own."""
    return MessageLog(
        files,
        stamp=identity.stamp,
        segment_bytes=settings.segment_bytes,
        durability=settings.durability,
        held_max_bytes=settings.backup_log_held_max_bytes if settings.ships_log else 0,
    )


def own_settler(dispatch: HourLog, catalog: Catalog, identity: Identity) -> Settler:
    """A settler that records settled deliveries in the directory itself, and nowhere else."""
    return Settler(dispatch)


@dataclass(frozen=True, slots=True)
class Openers:
    """The functions that open the parts, and the limits that they are given."""

    identity: Identity | None = None
    """The identity that the directory takes over, where others have a copy of it; None: its own."""
    of: frozenset[Kind] = SERVED
    """The kinds of directory that it may be."""
    load_sizes: LoadSizes = LOAD_SIZES
    key_tiers: KeyTiers = KEY_TIERS
    message_log: Callable[[Files, Catalog, Identity, Settings], CheckpointedLog] = own_message_log
    """Opens the message log. Only that of a standby is no `WriteAheadLog`."""
    settler: Callable[[HourLog, Catalog, Identity], Settler] = own_settler
    leases: Callable[[Files, Identity], LeasesPlace] = LeasesFile
    """Where leases are left to the next process."""
    closes_catalog: bool = True
    """Whether the catalog ends with the directory; one in memory has to outlive it."""
    transactions: SettledTransactions | None = None
    """Where a batch of deliveries and that it is settled may be one; None: nowhere."""
    replay: type[Replay] | Callable[..., Replay] = Replay
    staging: type[Staging] | Callable[..., Staging] = Staging
    definitions: type[DefinitionsLog] | Callable[..., DefinitionsLog] = DefinitionsLog


OWN_DIRECTORY: Final = Openers()
"""All stands in the directory itself."""
