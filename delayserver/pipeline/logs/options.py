"""What the data sources are told: options of a read, checked, with errors that name them.

Cost: none. Threads: values.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from os import cpu_count

from delayserver.errors import InputError

TASKS_PER_CORE = 2


@dataclass(frozen=True, slots=True)
class Options:
    """The options that a source was given."""

    source: str
    given: dict[str, str]

    @property
    def root(self) -> str:
        """The data directory."""
        return self.given["path"].removeprefix("file:")

    @property
    def partitions(self) -> int:
        """How many tasks at most."""
        return max(1, self.number("partitions", TASKS_PER_CORE * (cpu_count() or 1)))

    def choice(self, name: str, *values: str) -> str:
        """One of these values, the first if nothing was said. Raises InputError."""
        value = self.given.get(name.lower(), values[0]).lower()
        if value not in values:
            raise InputError(
                f"the option {name} of {self.source} is {' or '.join(values)}, not {value!r}"
            )
        return value

    def text(self, name: str) -> str | None:
        """What was said, if anything was."""
        return self.given.get(name.lower())

    def number(self, name: str, default: int) -> int:
        """A whole number. Raises InputError."""
        text = self.given.get(name.lower(), str(default))
        if not text.isdecimal():
            raise InputError(f"the option {name} of {self.source} is a number, not {text!r}")
        return int(text)

    def check_columns(self, wanted: Iterable[str], known: Collection[str]) -> None:
        """Raises InputError for a column that the source does not have."""
        unknown = [name for name in wanted if name not in known]
        if unknown:
            raise InputError(
                f"{self.source} has no column {unknown[0]!r} here; it has {', '.join(known)}"
            )


def parse_options(source: str, options: Mapping[str, str], names: Collection[str]) -> Options:
    """Of a source that reads. Raises InputError for an option that it does not have, or without a
    path."""
    parsed = parse_named(source, options, ("path", *names))
    if "path" not in parsed.given:
        raise InputError(f"{source} needs the data directory: .load('/var/lib/delayserver')")
    return parsed


def parse_named(source: str, options: Mapping[str, str], names: Collection[str]) -> Options:
    """Raises InputError for an option that the source does not have."""
    given = {name.lower(): text for name, text in options.items()}
    if unknown := sorted(given.keys() - {name.lower() for name in names}):
        raise InputError(f"{source} has no option {unknown[0]!r}; it has {', '.join(names)}")
    return Options(source, given)
