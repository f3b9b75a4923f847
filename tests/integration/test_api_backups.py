"""Backups over real HTTP, of a server alone and of one with shards; and of what they are made."""

import asyncio
import json
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from delayserver.backup.restoring import restore
from delayserver.cli import make_app, modules_of
from delayserver.client import AsyncClient
from delayserver.times import parse_time_ms
from storage.message_log import DIRECTORY as MESSAGES
from tests.integration.api_support import ApiServer, now_ms, unique
from tests.waiting import wait_until


def backups_of(api: ApiServer) -> Path:
    return Path(str(api.settings["backup_dir"]))


def complete(api: ApiServer, name: str) -> dict[str, object]:
    """The backup once it has ended, which it has well."""
    found: dict[str, object] = {}

    def has_ended() -> bool:
        found.update(api.ask("GET", f"/v1/backups/{name}"))
        return found["state"] != "running"

    wait_until(has_ended)
    assert (found["state"], found["error"]) == ("complete", None)
    return found


def test_a_backup_is_made_and_a_directory_of_it(either_api: ApiServer, tmp_path: Path) -> None:
    api, name = either_api, unique("made")
    subject = unique("backed")
    for number in range(20):
        api.publish(subject, key=f"k{number}", delay="1h")
    answer = api.post("/v1/backups", json={"name": name})
    assert (answer.status_code, answer.headers["location"]) == (202, f"/v1/backups/{name}")
    assert answer.json()["state"] == "running"
    assert api.post("/v1/backups", json={"name": name}).status_code == 409
    made = complete(api, name)
    count = int(str(api.settings.get("shards", 1)))
    shards = made["shards"]
    assert isinstance(shards, list) and [one["shard"] for one in shards] == [*range(count)]
    assert made["verified"] and made["done_bytes"] == made["total_bytes"]
    assert name in [one["name"] for one in api.ask("GET", "/v1/backups")["backups"]]
    assert api.metric("backup_last_timestamp_seconds") > time.time() - 600

    restored = restore(backups_of(api) / name, tmp_path / "data", now_ms=now_ms())
    assert [one.problem for one in restored] == [""] * count
    assert [one.last_seq for one in restored] == [one["checkpoint_seq"] for one in shards]
    assert not list((tmp_path / "data").rglob(f"{MESSAGES}/*"))

    assert api.delete(f"/v1/backups/{name}").status_code == 204
    for method in ("GET", "DELETE"):
        api.ask(method, f"/v1/backups/{name}", 404)
    assert not (backups_of(api) / name).exists()


def test_a_name_is_given_by_the_time_where_there_is_none(either_api: ApiServer) -> None:
    name = either_api.ask("POST", "/v1/backups", 202)["name"]
    complete(either_api, name)
    assert (backups_of(either_api) / name).is_dir()
    either_api.ask("DELETE", f"/v1/backups/{name}", 204)


def test_a_backup_is_brought_forward_to_a_moment(either_api: ApiServer, tmp_path: Path) -> None:
    api, name, subject = either_api, unique("moment"), unique("moved")
    api.publish(subject, key="first", delay="1h")
    api.ask("POST", "/v1/backups", 202, json={"name": name})
    taken = {one["shard"]: one["checkpoint_seq"] for one in complete(api, name)["shards"]}  # type: ignore[attr-defined]
    for number in range(10):
        api.publish(subject, key=f"k{number}", delay="1h")
    until_ms = now_ms()
    wait_until(lambda: now_ms() > until_ms)
    api.publish(subject, key="last", delay="1h")

    def reaches() -> bool:
        found = api.ask("GET", f"/v1/backups/{name}")["log_reaches_at"]
        return found is not None and parse_time_ms(found) > until_ms

    wait_until(reaches)
    arguments = ["restore", str(backups_of(api)), str(tmp_path / "data"), "--json"]
    arguments += ["--until", str(until_ms)]
    ended = CliRunner().invoke(make_app(modules_of(arguments)), arguments)
    assert ended.exit_code == 0, ended.output
    restored = json.loads(ended.stdout)["shards"]
    # A shard that had no message of the subject gives it a number first.
    count = sum(one["last_seq"] - taken[one["shard"]] for one in restored)
    assert 10 <= count < 10 + len(restored)
    accepted = [one["last_accepted_at"] for one in restored if one["last_accepted_at"]]
    assert accepted and all(parse_time_ms(one) <= until_ms for one in accepted)
    api.ask("DELETE", f"/v1/backups/{name}", 204)


@pytest.mark.parametrize("name", ["../up", "a/b", ".a", ""])
def test_a_name_leads_nowhere_else(either_api: ApiServer, name: str) -> None:
    answer = either_api.ask("POST", "/v1/backups", 422, json={"name": name})
    assert [one["pointer"] for one in answer["errors"]] == ["/name"]


def test_the_command_and_the_client_library(either_api: ApiServer, tmp_path: Path) -> None:
    url, name = either_api.process.url, unique("command")

    def run(*arguments: str) -> dict[str, object]:
        ended = CliRunner().invoke(make_app(modules_of(list(arguments))), list(arguments))
        assert ended.exit_code == 0, ended.output
        document: dict[str, object] = json.loads(ended.stdout)
        return document

    made = run("backup", name, "--url", url, "--json")
    assert (made["name"], made["state"]) == (name, "complete")
    source = backups_of(either_api) / name
    restored = run("restore", str(source), str(tmp_path / "data"), "--json")
    assert restored["is_sound"] is True

    async def main() -> None:
        async with AsyncClient(url) as client:
            backups = client.backups
            again = await backups.wait((await backups.begin()).name)
            assert (again.state, again.verified) == ("complete", True)
            assert [one.name for one in await backups.list()] == [name, again.name]
            await backups.delete(again.name)
            await backups.delete(name)
            assert await backups.list() == []

    asyncio.run(main())
