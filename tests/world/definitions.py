"""After every start: the definitions log, each byte of it, says what the catalog says.

Cost: reads the log once. Threads: none.
"""

from delayserver.records.tables import read_definitions_place
from delayserver.recovery.definitions import differences, read_generation
from storage.definitions_log import DIRECTORY, definitions_path
from storage.directory import open_identity
from storage.files import Files, size_of
from tests.world.server import SimulatedServer
from tests.world.violation import Violation


def check_definitions(server: SimulatedServer, disk: Files) -> None:
    """Raises Violation. `server` has just recovered, and `disk` is below its faults."""
    place, names = read_definitions_place(server.catalog), disk.list(DIRECTORY)
    if place is None or len(names) != bool(place.generation):
        raise Violation(f"the catalog names {place}, there are {names} (I7)")
    if not place.generation:
        return
    size = size_of(disk, definitions_path(place.generation))
    if size != place.length:
        raise Violation(f"the definitions log has {size} bytes, the catalog says {place} (I7)")
    stamp = open_identity(disk, random_bytes=None).stamp
    defined = read_generation(disk, place.generation, stamp=stamp, end=size)
    for found in (*defined.damage, *differences(defined.state, server.catalog)):
        raise Violation(f"the definitions log and the catalog differ: {found} (I6)")
