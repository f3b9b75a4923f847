"""Summaries: what operators look at instead of single messages, alone and over shards."""

import pytest

from tests.integration.api_support import make_token, unique
from tests.waiting import wait_until

ONCE = {"max_attempts": 1}
SETTING = "a-token-of-the-settings"
NOBODY = "http://127.0.0.1:9/nobody"


@pytest.fixture
def api(either_api):
    return either_api


@pytest.fixture
def prefix():
    return unique("summary")


def pages(api, path, field, **query):
    """All that a list holds, a page at a time, and the lengths of the pages."""
    page = api.ask("GET", path, params=query)
    found, lengths = page[field], [len(page[field])]
    while page["cursor"] is not None:
        page = api.ask("GET", path, params={**query, "cursor": page["cursor"]})
        found += page[field]
        lengths.append(len(page[field]))
    return found, lengths


def test_subscriptions_come_in_pages(api, prefix):
    names = [f"{prefix}-{n}" for n in range(5)]
    for name in names:
        api.subscribe(name, prefix)
    published = [api.publish(prefix, key=f"k{n}") for n in range(8)]
    api.ask("POST", f"/v1/subscriptions/{names[0]}/pull", json={"max": 1, "wait": "5s"})

    def waiting():
        found, lengths = pages(api, "/v1/subscriptions", "subscriptions", prefix=prefix, limit=2)
        assert ([one["name"] for one in found], lengths) == (names, [2, 2, 1])
        return [(one["queued"], one["in_flight"]) for one in found]

    each = len(published)
    wait_until(lambda: waiting() == [(each - 1, 1), *[(each, 0)] * 4])
    whole = api.ask("GET", "/v1/subscriptions")
    assert whole["cursor"] is None and len(whole["subscriptions"]) >= 5
    assert api.ask("GET", "/v1/subscriptions", params={"prefix": prefix + "?"}) == {
        "subscriptions": [],
        "cursor": None,
    }
    api.ask("GET", "/v1/subscriptions?limit=0", 422)
    api.ask("GET", "/v1/subscriptions?cursor=x", 422)


def test_subjects_say_what_was_counted_of_them(api, prefix):
    for n in range(3):
        for k in range(n + 4):
            api.publish(f"{prefix}-{n}", delay="1h", key=str(k))
        api.ask("DELETE", f"/v1/subjects/{prefix}-{n}/keys/0")
    found, lengths = pages(api, "/v1/subjects", "subjects", limit=2)
    assert max(lengths) <= 2
    names = [one["name"] for one in found]
    assert names == sorted(set(names))
    counts = {one["name"]: (one["accepted"], one["cancelled"], one["dead"]) for one in found}
    assert [counts[f"{prefix}-{n}"] for n in range(3)] == [(4, 1, 0), (5, 1, 0), (6, 1, 0)]


def test_a_receiver_that_is_down_is_named_until_it_answers(api, prefix, receiver):
    url = receiver.hook(200)
    name, path = prefix, f"/v1/subscriptions/{prefix}"
    definition = {"subject": prefix, "type": "webhook", "url": NOBODY, "retry": ONCE}
    assert api.ask("PUT", path, 201, json=definition)["failing_since"] is None
    for n in range(4):
        api.publish(prefix, key=str(n))

    def failing():
        named = {
            one["subscription"]: one["since"] for one in api.ask("GET", "/v1/stats")["failing"]
        }
        return named.get(name)

    wait_until(failing)
    assert api.ask("GET", path)["failing_since"] == failing()

    def counted():
        found, _ = pages(api, "/v1/dead-letters", "subscriptions", limit=1)
        return {one["name"]: one["count"] for one in found}.get(name)

    wait_until(lambda: counted() == 4)
    stats = api.ask("GET", "/v1/stats")
    assert stats["dead_letters"] >= 4
    assert len(stats["lateness"]["counts"]) == len(stats["lateness"]["bounds_ms"]) + 1
    api.ask("POST", f"{path}/pause")
    assert failing() is None and api.ask("GET", "/v1/stats")["paused"] >= 1
    api.ask("POST", f"{path}/resume")
    api.ask("PUT", path, 200, json={**definition, "url": url})
    assert api.ask("GET", path)["failing_since"] is None
    assert api.ask("POST", f"{path}/dead-letters/redrive") == {"redriven": 4}
    wait_until(lambda: counted() is None)


def test_who_is_not_asked_for_a_token_may_do_everything(shared_api):
    own = shared_api.ask("GET", "/v1/tokens/self")
    assert own == {"name": None, "scopes": ["admin"], "expires_at": None, "rate": None}
    assert shared_api.ask("GET", "/v1/tokens") == {"tokens": [], "cursor": None}


def test_a_token_says_what_it_may_and_an_administrator_sees_all(make_api):
    api = make_api(token=SETTING)
    texts = {
        name: make_token(api.data_dir, name, *scopes, **more)
        for name, scopes, more in (
            ("shop", ["publish:order.*", "observe"], {"rate_per_s": 50}),
            ("admin", ["admin"], {}),
            ("worker", ["consume:order.unpaid"], {"expires_ms": 4_000_000_000_000}),
        )
    }
    api.start()

    def ask(token, path, status=200):
        return api.ask("GET", path, status, headers={"authorization": f"Bearer {token}"})

    own = ask(texts["shop"], "/v1/tokens/self")
    assert own == {
        "name": "shop",
        "scopes": ["publish:order.*", "observe"],
        "expires_at": None,
        "rate": 50,
    }
    assert ask(SETTING, "/v1/tokens/self")["scopes"] == ["admin"]
    ask("guess", "/v1/tokens/self", 401)
    ask(texts["shop"], "/v1/tokens", 403)
    first = ask(texts["admin"], "/v1/tokens?limit=2")
    assert ([one["name"] for one in first["tokens"]], first["cursor"]) == (
        ["admin", "shop"],
        "shop",
    )
    (last,) = ask(texts["admin"], f"/v1/tokens?cursor={first['cursor']}")["tokens"]
    assert (last["name"], last["expires_at"]) == ("worker", "2096-10-02T07:06:40.000Z")
    assert not any(text in str(first) for text in texts.values())
