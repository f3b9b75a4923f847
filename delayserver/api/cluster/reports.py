"""`delayserver.cluster.reports` under its former name: what is set here is set there."""

import sys
from types import ModuleType
from typing import Any

from delayserver.cluster import reports


class _Forwarding(ModuleType):
    def __getattr__(self, name: str) -> Any:
        return getattr(reports, name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(reports, name, value)


sys.modules[__name__].__class__ = _Forwarding
