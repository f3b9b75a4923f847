"""Hours that are kept until they were archived, and who says so, across restarts."""

import pytest

from tests.integration.api_support import now_ms, unique
from tests.waiting import wait_until

HOUR_MS = 3_600_000
WHAT = ("schedule_bytes", "dispatch_bytes", "last_seq", "count")


@pytest.fixture
def subject():
    return unique("archives")


@pytest.fixture
def api(make_api, subject):
    """A server that keeps hours until they were archived, with one that is settled.

    Its clock begins with an hour, which no test is long enough to see the end of."""
    settings = {"archive": True, "retention_ms": 0, "checkpoint_ms": 50}
    api = make_api(**settings, clock_offset_ms=-(now_ms() % HOUR_MS))
    api.start()
    path = api.subscribe("consumer", subject)
    for number in range(3):
        api.publish(subject, body=number)
    api.pull_all(path, 3)
    pass_time(api, hours=2)
    return api


def pass_time(api, *, hours, **how):
    api.restart(clock_offset_ms=api.settings.get("clock_offset_ms", 0) + hours * HOUR_MS, **how)


def listed(api, state="waiting"):
    return api.ask("GET", f"/v1/archives?state={state}")["hours"]


def waiting(api):
    """The one hour that waits; it retires soon after the start."""
    return wait_until(lambda: listed(api))[0]


def confirm(api, hour, status=200, **changes):
    document = {name: hour[name] for name in WHAT}
    document.update(checksum="c0ffee", location="/archive", **changes)
    return api.ask("PUT", f"/v1/archives/{hour['hour']}", status, json=document)


def files_of(api, hour):
    return [path.name for path in api.data_dir.glob(f"*/{hour['hour']}.*")]


def test_an_hour_waits_until_it_was_archived_and_is_deleted_then(api):
    hour = waiting(api)
    assert (hour["state"], hour["count"]) == ("waiting", 3)
    assert hour["schedule_bytes"] > 0
    assert hour["dispatch_bytes"] > 0
    assert api.ask("GET", "/v1/archives")["archive"] is True
    stats = api.ask("GET", "/v1/stats")
    assert stats["archive_waiting_hours"] == 1
    total_bytes = hour["schedule_bytes"] + hour["dispatch_bytes"]
    assert stats["archive_waiting_bytes"] == total_bytes
    assert f"delayserver_archive_waiting_bytes {total_bytes}.0" in api.get("/metrics").text
    assert len(files_of(api, hour)) == 2
    answer = confirm(api, hour)
    assert (answer["hour"], answer["state"]) == (hour["hour"], "archived")
    wait_until(lambda: not files_of(api, hour))
    assert listed(api, "all") == []
    assert api.ask("GET", "/v1/stats")["archive_waiting_hours"] == 0
    assert confirm(api, hour, 404)["status"] == 404


def test_what_was_confirmed_outlasts_a_kill_and_the_retention_holds(api):
    hour = waiting(api)
    api.restart(retention_ms=24 * HOUR_MS)
    confirm(api, hour)
    api.restart(kill=True)
    (archived,) = listed(api, "archived")
    assert {name: archived[name] for name in WHAT} == {name: hour[name] for name in WHAT}
    assert (archived["checksum"], archived["location"]) == ("c0ffee", "/archive")
    assert archived["archived_at"]
    assert listed(api) == []
    assert len(files_of(api, hour)) == 2
    confirm(api, hour)  # Whoever did not get the answer says it again.
    pass_time(api, hours=24, kill=True)
    wait_until(lambda: not files_of(api, hour))


@pytest.mark.parametrize("field", WHAT)
def test_a_confirmation_of_something_else_is_refused(api, field):
    hour = waiting(api)
    problem = confirm(api, hour, 409, **{field: hour[field] + 1})
    assert problem["state"] == "changed"
    assert "archive it again" in problem["detail"]
    assert len(files_of(api, hour)) == 2


def test_an_hour_that_comes_back_waits_again(api, subject):
    before = waiting(api)
    api.restart(retention_ms=24 * HOUR_MS)
    confirm(api, before)
    pass_time(api, hours=-2)
    late = api.publish(subject, delay="1m")
    pass_time(api, hours=2)
    problem = confirm(api, before, 409)
    assert problem["state"] in ("open", "changed")
    assert [one["id"] for one in api.pull_all("/v1/subscriptions/consumer", 1)] == [late["id"]]
    hour = waiting(api)
    assert (hour["hour"], hour["count"]) == (before["hour"], 4)
    assert hour["last_seq"] > before["last_seq"]
    pass_time(api, hours=24)
    assert files_of(api, hour)
    confirm(api, hour)
    wait_until(lambda: not files_of(api, hour))


def test_the_list_comes_in_pages(make_api, subject):
    api = make_api(archive=True, retention_ms=0, checkpoint_ms=50)
    api.start()
    path = api.subscribe("consumer", subject)
    for _ in range(3):
        api.publish(subject)
        api.pull_all(path, 1)
        pass_time(api, hours=1)
    pass_time(api, hours=1)
    wait_until(lambda: len(listed(api)) == 3)
    hours = listed(api)
    assert [one["hour"] for one in hours] == sorted(one["hour"] for one in hours)
    page = api.ask("GET", "/v1/archives?limit=2")
    assert page["hours"] == hours[:2]
    assert page["cursor"] == hours[2]["hour"]
    rest = api.ask("GET", f"/v1/archives?limit=2&cursor={page['cursor']}")
    assert (rest["hours"], rest["cursor"]) == (hours[2:], None)


def test_without_the_setting_nothing_is_waited_for(make_api, subject):
    api = make_api(retention_ms=0, checkpoint_ms=50)
    api.start()
    path = api.subscribe("consumer", subject)
    api.publish(subject)
    api.pull_all(path, 1)
    pass_time(api, hours=2)
    wait_until(lambda: not list(api.data_dir.glob("schedule/*")))
    assert api.ask("GET", "/v1/archives") == {"archive": False, "hours": [], "cursor": None}
    assert api.ask("GET", "/v1/stats")["archive_waiting_hours"] == 0


@pytest.mark.parametrize("hour", ["2026-11-20T24", "2026-11-20", "now", "1969-12-31T23"])
def test_other_names_are_no_hours(shared_api, hour):
    document = dict.fromkeys(WHAT, 0)
    shared_api.ask("PUT", f"/v1/archives/{hour}", 422, json=document)
