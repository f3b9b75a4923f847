"""Who may do what: every call with a token that may, one that may not, and none."""

import pytest

from delayserver.api.scopes import PUBLIC, RULES, Of
from delayserver.config import Settings
from delayserver.errors import AccessError
from delayserver.security.tokens import Action, TokenFile
from delayserver.server.server import Server
from storage.files import OsFiles
from tests.integration.api_support import ApiServer, make_token, wait_until

MINE, MINE_TOO, OTHERS = "mine.a", "mine.b", "others.a"
LEASES = {"leases": ["none"]}
LATER = {"subject": MINE, "delay": "1h"}
# What each call is asked with: about the subjects `mine.*`.
BODIES = {
    ("POST", "/v1/messages"): LATER,
    ("POST", "/v1/messages/batch"): [LATER],
    ("POST", "/v1/messages/cancel"): {"ids": ["{message_id}"]},
    ("PATCH", "/v1/messages/{message_id}"): {"delay": "2h"},
    ("PATCH", "/v1/subjects/{subject}/keys/{key}"): {"delay": "2h"},
    ("PUT", "/v1/subjects/{subject}/keys/{key}"): {"delay": "2h"},
    ("PUT", "/v1/subscriptions/{name}"): {"subject": "mine.*", "type": "pull"},
    ("POST", "/v1/subscriptions/{name}/pull"): {"wait": 0},
    ("POST", "/v1/subscriptions/{name}/ack"): LEASES,
    ("POST", "/v1/subscriptions/{name}/nack"): LEASES,
    ("POST", "/v1/subscriptions/{name}/extend"): {**LEASES, "lease": "1s"},
    ("POST", "/v1/subscriptions/{name}/dead-letters/redrive"): {},
}
BODIES[("PUT", "/v1/imports/{import_id}")] = {"subjects": [MINE]}
BODIES[("POST", "/v1/imports")] = {"manifest": "imports/nobodys.manifest"}
BODIES[("PUT", "/v1/archives/{hour}")] = dict.fromkeys(
    ("schedule_bytes", "dispatch_bytes", "last_seq", "count"), 0
)
HEARTBEAT = {"timeout": "1h", "subject": MINE}
BODIES[("PUT", "/v1/heartbeats/{key}")] = HEARTBEAT
CALLS = sorted(RULES)
NOT_REFUSED = {200, 201, 204, 404}


def fatal(error):
    raise AssertionError from error


def bearer(text):
    return {"authorization": f"Bearer {text}"}


@pytest.fixture(scope="module")
def api(tmp_path_factory):
    server = ApiServer(tmp_path_factory.mktemp("access"))
    tokens = {
        "publisher": ["publish:mine.*"],
        "everything": ["publish:*"],
        "consumer": ["consume:mine.*"],
        "narrow": ["publish:mine.b", "consume:mine.b"],
        "other": ["publish:others.*", "consume:others.*"],
        "observer": ["observe"],
        "admin": ["admin"],
    }
    for name, scopes in tokens.items():
        server.tokens[name] = make_token(server.data_dir, name, *scopes)
    server.start()
    server.headers.update(bearer(server.tokens["admin"]))
    yield server
    server.shut_down()


@pytest.fixture
def fields(api):
    """What stands in the paths: a message of `mine.a`, and a subscription of `mine.*`."""
    definition = {"subject": "mine.*", "type": "pull"}
    api.put("/v1/subscriptions/mine", json=definition).raise_for_status()
    published = api.publish(MINE, delay="1h")
    api.put(f"/v1/subjects/{MINE}/keys/k", json={"delay": "1h"}).raise_for_status()
    api.put("/v1/heartbeats/k", json=HEARTBEAT).raise_for_status()
    return {
        "message_id": published["id"],
        "name": "mine",
        "subject": MINE,
        "key": "k",
        "import_id": "nobodys",
        "hour": "2020-01-01T00",
    }


def ask(api, call, fields, headers):
    method, path = call
    body = BODIES.get(call)
    if call == ("POST", "/v1/messages/cancel"):
        body = {"ids": [fields["message_id"]], "keys": [{"subject": MINE, "key": "k"}]}
    content = {} if body is None else {"json": body}
    return api.request(method, path.format(**fields), headers=headers, **content)


def holders(call):
    """Who may, and who may not."""
    actions = RULES[call].actions
    by_action = {
        Action.PUBLISH: "publisher",
        Action.CONSUME: "consumer",
        Action.OBSERVE: "observer",
    }
    allowed = {by_action[action] for action in actions if action in by_action}
    if RULES[call].of is Of.EVERYTHING:
        allowed = {"everything"}
    return allowed | {"admin"}, {"publisher", "consumer", "narrow", "other", "observer"} - allowed


@pytest.mark.parametrize("call", CALLS, ids=" ".join)
def test_who_has_the_scope_may(api, fields, call):
    if RULES[call] is PUBLIC:
        assert ask(api, call, fields, {"authorization": ""}).status_code == 200
        return
    for name in holders(call)[0]:
        answer = ask(api, call, fields, bearer(api.tokens[name]))
        assert answer.status_code in NOT_REFUSED, (name, answer.text)
        fields |= {"message_id": api.publish(MINE, delay="1h")["id"]}
        api.put(f"/v1/subjects/{MINE}/keys/k", json={"delay": "1h"}).raise_for_status()
        api.put("/v1/subscriptions/mine", json={"subject": "mine.*", "type": "pull"})


@pytest.mark.parametrize(
    "call", [call for call in CALLS if RULES[call] is not PUBLIC], ids=" ".join
)
def test_who_has_it_not_may_not(api, fields, call):
    for headers in ({"authorization": ""}, bearer("guess")):
        assert ask(api, call, fields, headers).status_code == 401
    for name in holders(call)[1]:
        answer = ask(api, call, fields, bearer(api.tokens[name]))
        if call == ("GET", "/v1/subscriptions"):
            assert answer.json() == {"subscriptions": []}
        elif call == ("POST", "/v1/messages/cancel"):
            results = answer.json()["results"]
            assert all("has no scope for publish:mine.a" in one["error"] for one in results)
        else:
            assert answer.status_code == 403, (name, answer.text)
            assert answer.json()["type"] == "urn:delayserver:problem:forbidden"
            assert f"'{name}' has no scope for" in answer.json()["detail"]
    # None of it had any effect.
    assert api.look_up(fields["message_id"])["state"] == "scheduled"
    assert api.ask("GET", f"/v1/subjects/{MINE}/keys/k")["state"] == "scheduled"
    assert not api.ask("GET", "/v1/subscriptions/mine")["paused"]


def test_a_subscription_is_changed_by_who_may_consume_what_it_was_and_what_it_becomes(api, fields):
    narrow = bearer(api.tokens["narrow"])
    definition = {"subject": MINE_TOO, "type": "pull"}
    assert api.put("/v1/subscriptions/mine", json=definition, headers=narrow).status_code == 403
    path = "/v1/subscriptions/mine-too"
    assert api.put(path, json=definition, headers=narrow).status_code == 201
    wider = {"subject": "mine.*", "type": "pull"}
    assert api.put(path, json=wider, headers=narrow).status_code == 403
    listed = api.ask("GET", "/v1/subscriptions", headers=narrow)["subscriptions"]
    assert [one["name"] for one in listed] == ["mine-too"]
    assert api.delete(path, headers=narrow).status_code == 204


def test_who_takes_over_a_name_does_not_get_the_dead_letters_of_others(api):
    path, consumer, other = (
        "/v1/subscriptions/till",
        bearer(api.tokens["consumer"]),
        bearer(api.tokens["other"]),
    )
    api.subscribe("till", "mine.till", url="http://127.0.0.1:9/", retry={"max_attempts": 1})
    secret = api.publish("mine.till", body="secret")["id"]
    wait_until(lambda: api.ask("GET", f"{path}/dead-letters")["dead_letters"])
    api.ask("DELETE", path, 204)
    api.ask("GET", f"{path}/dead-letters", 403, headers=other)
    api.subscribe("till", "others.till")
    assert api.ask("GET", f"{path}/dead-letters", headers=other)["dead_letters"] == []
    assert api.ask("POST", f"{path}/dead-letters/redrive", headers=other)["redriven"] == 0
    api.ask("DELETE", f"{path}/dead-letters/{secret}", 404, headers=other)
    # Who may consume what it was about, and not the subscription that has the name.
    (letter,) = api.ask("GET", f"{path}/dead-letters", headers=consumer)["dead_letters"]
    assert letter["id"] == secret
    api.ask("POST", f"{path}/dead-letters/redrive", 403, headers=consumer)
    api.ask("DELETE", f"{path}/dead-letters/{secret}", 204, headers=consumer)


def test_the_subject_of_a_message_is_known_after_it_was_filed_and_after_a_restart(api, fields):
    other = bearer(api.tokens["other"])
    path = f"/v1/messages/{fields['message_id']}"
    for step in (lambda: api.ask("GET", "/v1/forecast"), api.restart):
        step()
        assert api.get(path, headers=other).status_code == 403
        assert api.delete(path, headers=other).status_code == 403
        assert api.get(path, headers=bearer(api.tokens["publisher"])).status_code == 200
    unknown = "0" * 36
    assert api.get(f"/v1/messages/{unknown}", headers=other).status_code == 404


def test_documents_are_for_who_has_a_token(api):
    for path in ("/docs", "/openapi.json", "/nowhere"):
        assert api.get(path, headers={"authorization": ""}).status_code == 401
        wanted = 404 if path == "/nowhere" else 200
        assert api.get(path, headers=bearer(api.tokens["observer"])).status_code == wanted


def test_a_change_takes_effect_while_the_server_runs(make_api):
    api = make_api()
    api.start()
    api.ask("GET", "/v1/stats")
    text = make_token(api.data_dir, "first", "admin")
    wait_until(lambda: api.get("/v1/stats").status_code == 401)
    assert api.post("/v1/messages", json=LATER).status_code == 401
    api.headers.update(bearer(text))
    published = api.publish(MINE, delay="1h")
    TokenFile(OsFiles(str(api.data_dir))).revoke("first")
    wait_until(lambda: api.post("/v1/messages", json=LATER).status_code == 401)
    assert api.get(f"/v1/messages/{published['id']}").status_code == 401
    assert text not in api.log


def test_a_token_file_that_is_damaged_opens_nothing(make_api):
    api = make_api()
    text = make_token(api.data_dir, "first", "admin")
    api.start()
    (api.data_dir / "TOKENS").write_text("garbage")
    wait_until(lambda: "the tokens stay as they were" in api.log)
    assert api.get("/v1/stats").status_code == 401
    assert api.get("/v1/stats", headers=bearer(text)).status_code == 200
    assert api.process.stop() == 0
    api.launch()
    wait_until(lambda: not api.process.is_running)
    assert "TOKENS is damaged" in api.log


def test_off_loopback_a_token_that_was_made_is_enough(tmp_path):
    settings = Settings(data_dir=tmp_path / "data", host="0.0.0.0")
    with pytest.raises(AccessError, match="delayserver token create"):
        Server(settings, fatal=fatal)
    make_token(settings.data_dir, "gone", "admin", expires_ms=1)
    with pytest.raises(AccessError, match="not a loopback address"):
        Server(settings, fatal=fatal)
    make_token(settings.data_dir, "shop", "publish:*")
    Server(settings, fatal=fatal).close()
