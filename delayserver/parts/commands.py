"""The commands of the parts, for the command line: which module adds which commands.

Apart from `installed`: a command line imports the one module that it needs, in 0.2 s, and this
module imports none of them. Cost: none. Threads: immutable values.
"""

from typing import Final

COMMANDS: Final = {
    "delayserver.parts.attempts.commands": ("messages",),
    "delayserver.parts.heartbeats.commands": ("heartbeat", "event"),
    "delayserver.parts.schedules.commands": ("schedules",),
    "delayserver.parts.sources.commands": ("sources",),
}
"""By module, in the order of the help."""
