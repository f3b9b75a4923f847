"""A node on standby: what it waits for."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, cast

from delayserver.serve.candidacy import Awaited

if TYPE_CHECKING:
    from delayserver.serve.owner import OwnerNode


def test_who_is_told_to_stop_behind_its_claim_has_heard_it() -> None:
    async def run() -> None:
        office, owner = Awaited(), cast("OwnerNode", object())
        office.came(owner)
        office.stop()
        await office.wait()
        assert office.owner is owner
        assert office.is_stopping

    asyncio.run(run())


def test_who_claims_though_it_was_told_to_stop_has_an_office_to_leave() -> None:
    async def run() -> None:
        office, owner = Awaited(), cast("OwnerNode", object())
        office.stop()
        await office.wait()
        office.came(owner)
        assert office.owner is owner
        assert office.is_stopping

    asyncio.run(run())
