"""What stands in docs/ and is made from the code: the tables of settings in configuration.md.

A document has two marks, and what stands between them is made here:

    <!-- settings: written by scripts/docs -->
    …
    <!-- end of settings -->

Cost: none. Threads: none.
"""

from pathlib import Path
from typing import Any, Final

from delayserver.cli.serve import flag
from delayserver.config import Settings
from delayserver.times import format_duration

DOCUMENT: Final = Path(__file__).parents[1] / "docs" / "configuration.md"
BEGIN: Final = "<!-- settings: written by scripts/docs -->\n"
END: Final = "<!-- end of settings -->\n"

GROUPS: Final = {
    "Where": ("host", "port", "data_dir"),
    "Access": ("token", "tls_cert", "tls_key", "tls_client_ca", "webhook_targets"),
    "What is kept, and for how long": (
        "durability",
        "dedupe_window_ms",
        "retention_ms",
        "archive",
        "disk_reserve_bytes",
    ),
    "Logs, metrics, traces": ("log_json", "log_level", "otel", "metrics_subjects_max"),
    "What is accepted": (
        "delay_max_ms",
        "body_max_bytes",
        "batch_max_messages",
        "batch_max_bytes",
        "import_max_messages",
        "imports_waiting_max",
        "subjects_max",
        "subscriptions_max",
        "heartbeats_max",
        "unfiled_max_bytes",
    ),
    "Connections": (
        "connections_max",
        "headers_max",
        "head_max_bytes",
        "head_timeout_ms",
        "body_timeout_ms",
        "write_timeout_ms",
        "idle_timeout_ms",
    ),
    "Delivery": (
        "in_flight_max",
        "answer_max_bytes",
        "lead_ms",
        "drain_ms",
        "fire_rows_max",
        "clock_offset_ms",
    ),
    "Logs on the disk": (
        "segment_bytes",
        "group_max_bytes",
        "file_ms",
        "checkpoint_ms",
        "checkpoint_bytes",
        "settle_sync_ms",
        "catalog_max_bytes",
    ),
}
"""Headings, and the settings below them. A new setting is put into one of these."""


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


def settings_tables() -> str:
    """A heading and a table for each group of settings."""
    grouped = [name for names in GROUPS.values() for name in names]
    assert sorted(grouped) == sorted(Settings.model_fields), "GROUPS has each setting once"
    parts = []
    for heading, names in GROUPS.items():
        lines = [f"## {heading}", "", "| Flag | Default | What it sets |", "|---|---|---|"]
        for name in names:
            field = Settings.model_fields[name]
            lines.append(f"| `{flag(name)}` | {shown(name, field.default)} | {field.description} |")
        parts.append("\n".join(lines) + "\n")
    return "\n" + "\n".join(parts) + "\n"


def with_settings(document: str) -> str:
    """The document with the tables as they are now."""
    before, _, rest = document.partition(BEGIN)
    _, _, behind = rest.partition(END)
    return before + BEGIN + settings_tables() + END + behind


def main() -> None:
    """Write the document again."""
    DOCUMENT.write_text(with_settings(DOCUMENT.read_text("utf-8")), "utf-8")


if __name__ == "__main__":
    main()
