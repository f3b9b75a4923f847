"""The options of the data sources: checked when they are read, with errors that name them.

Spark makes a source in a process of its own beside the driver, in the working directory of the
driver's JVM. There a relative path becomes absolute, before a task on another machine, which works
in another directory, could read it as something else. Jobs of this package have resolved it before
that, where the caller is (`absolute_root`).

Cost: none. Threads: values.
"""

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from os import cpu_count

from delayserver.errors import InputError
from delayserver.pipeline.exports.place import absolute_root
from delayserver.pipeline.logs.columns import CORRUPT

TASKS_PER_CORE = 2
_PATHS = "paths"


def paths_of(roots: Iterable[str]) -> dict[str, str]:
    """The options that give a source its paths; a stream has no other way to get several."""
    return {_PATHS: json.dumps([absolute_root(root) for root in roots])}


@dataclass(frozen=True, slots=True)
class Options:
    """The options that a source was given."""

    source: str
    given: dict[str, str]

    @property
    def roots(self) -> tuple[str, ...]:
        """The data directories, by their absolute paths, or the URLs of exports."""
        return tuple(json.loads(self.given[_PATHS]))

    @property
    def damage_as_rows(self) -> bool:
        """Whether a damaged place becomes a row that names it, instead of ending the read."""
        return self.choice("damage", "error", "rows") == "rows"

    @property
    def partitions(self) -> int:
        """How many tasks at most."""
        return max(1, self.number("partitions", TASKS_PER_CORE * (cpu_count() or 1)))

    def choice(self, name: str, *values: str) -> str:
        """One of these values, the first by default. Raises InputError."""
        value = self.given.get(name.lower(), values[0]).lower()
        if value not in values:
            raise self.error(name, " or ".join(values))
        return value

    def text(self, name: str) -> str | None:
        """The text of the option, if it was given."""
        return self.given.get(name.lower())

    def number(self, name: str, default: int) -> int:
        """A whole number. Raises InputError."""
        text = self.given.get(name.lower(), str(default))
        if not text.isdecimal():
            raise self.error(name, "a number")
        return int(text)

    def names(self, name: str) -> tuple[str, ...]:
        """The names between commas; none if the option was not given. Raises InputError."""
        text = self.text(name)
        if text is None:
            return ()
        found = tuple(part.strip() for part in text.split(","))
        if "" in found:
            raise self.error(name, "names separated by commas")
        return found

    def error(self, name: str, wanted: str) -> InputError:
        """The error that the option has a value other than the wanted ones."""
        given = self.text(name)
        return InputError(f"the option {name} of {self.source} is {wanted}, not {given!r}")

    def check_columns(self, wanted: Iterable[str], known: Collection[str]) -> None:
        """Raises InputError for a column that the source does not have."""
        unknown = [name for name in wanted if name not in known]
        if unknown:
            raise InputError(
                f"{self.source} has no column {unknown[0]!r} here; it has {', '.join(known)}"
            )

    def check_damage(self, wanted: Collection[str]) -> None:
        """Raises InputError if damage becomes rows, and no column can name it."""
        if self.damage_as_rows and CORRUPT not in wanted:
            raise InputError(f"with damage=rows the schema must have the column {CORRUPT}")


def parse_options(source: str, options: Mapping[str, str], names: Collection[str]) -> Options:
    """The options of a source that reads. Raises InputError for an option that it does not have, or
    without a path."""
    parsed = parse_named(source, options, ("path", _PATHS, *names))
    # Spark hands over the argument of `load` in this form: one path, or several.
    given = json.loads(parsed.given.get(_PATHS, "[]")) or [parsed.given.get("path")]
    if None in given:
        raise InputError(f"{source} needs the data directory: .load('/var/lib/delayserver')")
    roots = json.dumps([absolute_root(path) for path in given])
    return replace(parsed, given={**parsed.given, _PATHS: roots})


def parse_named(source: str, options: Mapping[str, str], names: Collection[str]) -> Options:
    """Raises InputError for an option that the source does not have."""
    given = {name.lower(): text for name, text in options.items()}
    if unknown := sorted(given.keys() - {name.lower() for name in names}):
        raise InputError(f"{source} has no option {unknown[0]!r}; it has {', '.join(names)}")
    return Options(source, given)
