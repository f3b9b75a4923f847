"""Time zones as this machine has them, and whether their rules have changed since they were read.

    zone_of("Europe/Berlin")      read from a file once, and kept
    have_changed()                the file of a zone is another one now, or a missing one has come
    forget()                      the next `zone_of` reads again

A package of zone data replaces these files while servers run, and `zoneinfo` would keep the rules
that it has read for as long as the process lives. So nothing here comes from its cache.

Cost: 100 µs to read a zone, a stat for each zone in use for `have_changed`. Threads: belongs to the
event loop; code that only plans may run anywhere.
"""

import os
import zoneinfo
from itertools import chain
from typing import Final
from zoneinfo import ZoneInfo

from delayserver.errors import InputError

FAILED_MAX: Final = 256
"""Names that were asked for and are no zones, as many as are kept."""
_FORMS: Final = "give a name as Europe/Berlin or UTC"
_MACHINE_ZONES: Final = frozenset(("localtime", "posixrules", "Factory"))
"""Names that mean another zone on each machine, or none."""
_MACHINE_FOLDERS: Final = ("posix/", "right/")

Stamp = tuple[int, int, int] | None
"""Inode, time of change and length of a file; None: there is none where zones are looked for."""

_zones: dict[str, tuple[ZoneInfo, Stamp]] = {}
_failed: dict[str, Stamp] = {}


def check_zone(timezone: str) -> None:
    """Raises InputError at `/timezone`: it is none, or means another one on each machine."""
    if timezone in _MACHINE_ZONES or timezone.startswith(_MACHINE_FOLDERS):
        raise InputError(
            f"{timezone!r} is not the same zone on each machine: {_FORMS}", "/timezone"
        )
    zone_of(timezone)


def zone_of(timezone: str) -> ZoneInfo:
    """The zone of that name. Raises InputError at `/timezone`."""
    known = _zones.get(timezone)
    if known is not None:
        return known[0]
    stamp = _stamp_of(timezone)  # before it is read: a file replaced in between has changed
    try:
        zone = ZoneInfo.no_cache(timezone)
    except Exception as error:  # a folder, a table, a file that was cut off: each has its own
        if len(_failed) < FAILED_MAX:
            _failed[timezone] = stamp
        raise InputError(
            f"{timezone!r} is no time zone that is known here: {_FORMS}", "/timezone"
        ) from error
    _zones[timezone] = zone, stamp
    return zone


def have_changed() -> bool:
    """Whether a zone that was read has other rules now, or one that was missing is there."""
    read = ((name, stamp) for name, (_, stamp) in _zones.items())
    return any(_stamp_of(name) != stamp for name, stamp in chain(read, _failed.items()))


def forget() -> None:
    """Read zones again."""
    _zones.clear()
    _failed.clear()


def _stamp_of(timezone: str) -> Stamp:
    for folder in zoneinfo.TZPATH:
        try:
            found = os.stat(os.path.join(folder, timezone))
        except (OSError, ValueError):
            continue
        return found.st_ino, found.st_mtime_ns, found.st_size
    return None
