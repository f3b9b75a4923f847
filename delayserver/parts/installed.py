"""The parts of this server, in one tuple: a feature is added here, and nowhere else in the core.

The entry points hand it down: the server, a replica, a restore, check and repair. Everything below
them gets the tuple as an argument.

Cost: the import of the decisions of all parts. Threads: immutable values.
"""

from typing import Final

from delayserver.parts.attempts.part import ATTEMPTS_PART
from delayserver.parts.heartbeats.part import HEARTBEATS_PART
from delayserver.parts.imports.part import ARCHIVES_PART, IMPORTS_PART
from delayserver.parts.part import Parts
from delayserver.parts.schedules.part import SCHEDULES_PART
from delayserver.parts.sources.part import SOURCES_PART

PARTS: Final[Parts] = (
    HEARTBEATS_PART,
    SCHEDULES_PART,
    SOURCES_PART,
    IMPORTS_PART,
    ARCHIVES_PART,
    ATTEMPTS_PART,
)
