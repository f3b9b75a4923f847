"""The README says what is true: its table of settings is that of the code, its example runs."""

import re
from pathlib import Path
from typing import Any

from delayserver.cli.serve import flag
from delayserver.config import Settings
from delayserver.times import format_duration

README = (Path(__file__).parents[2] / "README.md").read_text()


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


def settings_table() -> str:
    """The table as it has to stand in the README."""
    lines = ["| Flag | Default | What it sets |", "|---|---|---|"]
    for name, field in Settings.model_fields.items():
        lines.append(f"| `{flag(name)}` | {shown(name, field.default)} | {field.description} |")
    return "\n".join(lines)


def test_the_table_of_settings_is_that_of_the_code() -> None:
    assert settings_table() in README


def test_every_command_of_the_readme_exists() -> None:
    root = Path(__file__).parents[2]
    for script in set(re.findall(r"\bscripts/[a-z]+\b(?!/)(?:\.[a-z]+)?", README)):
        assert (root / script).is_file(), script


def test_the_timer_example_runs() -> None:
    examples = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    (example,) = (one for one in examples if "HierarchicalTimer" in one)
    smaller = example.replace("1_000_000", "10_000").replace("500_000", "5_000")
    exec(compile(smaller, "README.md", "exec"), {})
