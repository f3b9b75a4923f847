"""The lists of settings that are made from the code (`Heading` in `delayserver/config.py`). In the
first two files they stand between marks:

    docs/configuration.md                          the tables
    deploy/helm/delayserver/values.yaml            each in a comment, with its default
    deploy/helm/delayserver/values.schema.json     the names that the chart takes

Cost: none. Threads: none.
"""

import json
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from typing import Any, Final

from delayserver.cli.serve import flag
from delayserver.config import Heading, Settings, by_heading
from delayserver.times import format_duration

ROOT: Final = Path(__file__).parents[1]
CHART: Final = ROOT / "deploy/helm/delayserver"
BEGIN: Final = "settings: written by scripts/docs"
END: Final = "end of settings"
SET_BY_CHART: Final = {
    *("host", "port", "data_dir", "token", "tls_cert", "tls_key", "tls_client_ca"),
    *("cluster", "node", "zone", "advertise", "link_port", "kafka_config"),
}
"""Settings that the chart makes itself, and the zone, which cannot be the same in all pods."""


def shown(name: str, default: Any) -> str:
    """A default as people read it."""
    if default is None or default == ():
        return ""
    if isinstance(default, bool):
        return "on" if default else "off"
    if isinstance(default, int) and name.endswith("_ms"):
        return f"`{format_duration(default)}`"
    if isinstance(default, int) and name.endswith("_bytes"):
        return f"{default // 2**20} MiB" if default >= 2**20 else f"{default // 2**10} KiB"
    return f"`{default}`"


def with_tables(document: str) -> str:
    """docs/configuration.md with the tables as they are now."""
    return _between(document, f"<!-- {BEGIN} -->\n", f"<!-- {END} -->\n", _tables())


def with_comments(values: str) -> str:
    """The values of the chart with the settings as they are now."""
    lines = "".join(f"#  {line}\n" if line else "#\n" for line in _values())
    return _between(values, f"# {BEGIN}\n", f"# {END}\n", lines)


def with_names(schema: str) -> str:
    """The schema of the values with the settings as they are now."""
    document = json.loads(schema)
    document["properties"]["settings"]["properties"] = {
        name: {
            "title": heading.value,
            "description": Settings.model_fields[name].description,
            "$ref": "#/definitions/setting",
        }
        for heading, name in _of_values()
    }
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"


DOCUMENTS: Final[dict[Path, Callable[[str], str]]] = {
    ROOT / "docs/configuration.md": with_tables,
    CHART / "values.yaml": with_comments,
    CHART / "values.schema.json": with_names,
}
"""Each document, and how it is made from its present text."""


def _between(text: str, begin: str, end: str, new: str) -> str:
    before, _, rest = text.partition(begin)
    _, _, behind = rest.partition(end)
    assert behind, f"the document has no marks: {begin}"
    return before + begin + new + end + behind


def _tables() -> str:
    """Each heading, and a table of the settings under it."""
    parts = []
    for heading, names in by_heading().items():
        lines = [f"## {heading.value}", "", "| Flag | Default | What it sets |", "|---|---|---|"]
        for name in names:
            field = Settings.model_fields[name]
            lines.append(f"| `{flag(name)}` | {shown(name, field.default)} | {field.description} |")
        parts.append("\n".join(lines) + "\n")
    return "\n" + "\n".join(parts) + "\n"


def _of_values() -> Iterator[tuple[Heading, str]]:
    """The settings that the values of the chart may have, in their order, each with its heading."""
    for heading, names in by_heading().items():
        yield from ((heading, name) for name in names if name not in SET_BY_CHART)


def _values() -> Iterator[str]:
    """The lines of YAML below `settings`, if each has its default."""
    last = None
    for heading, name in _of_values():
        if heading is not last:
            yield from () if last is None else ("",)
            yield f"# {heading.value}"
            last = heading
        field = Settings.model_fields[name]
        yield f"{name}: {_in_yaml(name, field.default)}  # {field.description}"


def _in_yaml(name: str, default: Any) -> str:
    if isinstance(default, Enum):
        return str(default.value)
    if isinstance(default, int) and name.endswith("_ms"):
        return format_duration(default)
    return json.dumps(default)


def main() -> None:
    """Write the documents again."""
    for path, made in DOCUMENTS.items():
        path.write_text(made(path.read_text("utf-8")), "utf-8")


if __name__ == "__main__":
    main()
