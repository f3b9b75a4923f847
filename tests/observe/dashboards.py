"""The dashboards as the tests use them: their panels, and the queries as Prometheus gets them."""

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

from tests.observe.rules import ROOT, WINDOW

FOLDER = ROOT / "deploy/grafana/dashboards"
VARIABLES = {"$job": "delayserver.*", "$subscription": ".*", "$__rate_interval": WINDOW}
"""What Grafana puts in their place: everything, and a window that a test can wait for."""


class Query(NamedTuple):
    """A query of a panel."""

    panel: str
    """Dashboard and title."""
    expression: str


def dashboards() -> dict[str, Any]:
    """All of them, by the name of their file."""
    return {path.name: json.loads(path.read_text("utf-8")) for path in sorted(FOLDER.iterdir())}


def panels(dashboard: Any) -> list[Any]:
    """Those that show something."""
    return [one for one in dashboard["panels"] if one["type"] != "row"]


def queries() -> Iterator[Query]:
    """Those of all panels, with something in the place of each variable."""
    for name, dashboard in dashboards().items():
        for panel in panels(dashboard):
            for target in panel["targets"]:
                expression: str = target["expr"]
                for variable, value in VARIABLES.items():
                    expression = expression.replace(variable, value)
                assert "$" not in expression, (name, expression)
                yield Query(f"{name}: {panel['title']}", expression)
