"""Who may do what: every call with a token that may, one that may not, and none."""

from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from delayserver.api.scopes import PUBLIC, CoveredSubject
from delayserver.api.scopes import RULES as CORE_RULES
from delayserver.config import Settings
from delayserver.errors import AccessError
from delayserver.parts.installed import PARTS
from delayserver.security.tokens import Action, TokenFile
from delayserver.serve.app import TOLD_HEADERS
from delayserver.server.server import Server
from storage.files import OsFiles
from tests.integration.api_support import ApiServer, make_token, unique
from tests.waiting import DEADLINE_S, wait_until

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
SCHEDULE = {"every": "1d", "subject": MINE}
BODIES[("PUT", "/v1/schedules/{name}")] = SCHEDULE
BODIES[("POST", "/v1/schedules/preview")] = SCHEDULE
# Nobody listens there: a source tries again and again.
SOURCE = {"type": "kafka", "bootstrap": "127.0.0.1:9", "topic": "t", "subject": MINE}
BODIES[("PUT", "/v1/sources/{name}")] = SOURCE
RULES = {**CORE_RULES, **{call: rule for part in PARTS for call, rule in part.rules.items()}}
CALLS = sorted(RULES)
NOT_REFUSED = {200, 201, 204, 404, 409}
"""409: this server has no directory for backups."""


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
        "sender": ["publish:sent.*", "target:127.0.0.1:9"],
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
    api.put("/v1/schedules/mine", json=SCHEDULE).raise_for_status()
    api.put("/v1/sources/mine", json=SOURCE).raise_for_status()
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
    everybody = {"publisher", "consumer", "narrow", "other", "observer"}
    by_action = {
        Action.PUBLISH: "publisher",
        Action.CONSUME: "consumer",
        Action.OBSERVE: "observer",
    }
    allowed = {by_action[action] for action in actions if action in by_action}
    if RULES[call].of is CoveredSubject.EVERYTHING:
        allowed = {"everything"}
    if RULES[call].of is CoveredSubject.ANYONE:
        allowed = everybody
    return allowed | {"admin"}, everybody - allowed


@pytest.mark.parametrize("call", CALLS, ids=" ".join)
def test_who_has_the_scope_may(api, fields, call):
    if RULES[call] is PUBLIC:
        assert ask(api, call, fields, {"authorization": ""}).status_code == 200
        return
    for name in holders(call)[0]:
        answer = ask(api, call, fields, bearer(api.tokens[name]))
        # What waits is not replayed, and who may not ask is not told so.
        fine = NOT_REFUSED | ({409} if call[1].endswith("/replay") else set())
        assert answer.status_code in fine, (name, answer.text)
        fields |= {"message_id": api.publish(MINE, delay="1h")["id"]}
        api.put(f"/v1/subjects/{MINE}/keys/k", json={"delay": "1h"}).raise_for_status()
        api.put("/v1/subscriptions/mine", json={"subject": "mine.*", "type": "pull"})
        api.put("/v1/schedules/mine", json=SCHEDULE).raise_for_status()
        api.put("/v1/sources/mine", json=SOURCE).raise_for_status()


@pytest.mark.parametrize(
    "call", [call for call in CALLS if RULES[call] is not PUBLIC], ids=" ".join
)
def test_who_has_it_not_may_not(api, fields, call):
    for headers in ({"authorization": ""}, bearer("guess")):
        assert ask(api, call, fields, headers).status_code == 401
    for name in holders(call)[1]:
        answer = ask(api, call, fields, bearer(api.tokens[name]))
        if call in (("GET", "/v1/subscriptions"), ("GET", "/v1/dead-letters")):
            assert answer.json() == {"subscriptions": [], "cursor": None}
        elif call == ("GET", "/v1/subjects"):
            assert not any(one["name"].startswith("mine.") for one in answer.json()["subjects"])
        elif call == ("GET", "/v1/schedules"):
            assert answer.json() == {"schedules": [], "cursor": None}
        elif call == ("GET", "/v1/sources"):
            assert answer.json() == {"sources": [], "cursor": None}
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
    assert not api.ask("GET", "/v1/schedules/mine")["paused"]


@pytest.mark.parametrize("option", ["on_delivered", "on_dead"])
def test_who_has_a_message_published_with_an_outcome_may_publish_it(api, option):
    wanted = {option: {"subject": "others.told"}}
    one = {"subject": "mine.told", **wanted}
    key = "/v1/subjects/mine.told/keys/told"
    calls = [
        ("POST", "/v1/messages", one),
        ("POST", "/v1/messages/batch", [{"subject": "mine.told"}, one]),
        ("PUT", key, wanted),
    ]
    for method, path, document in calls:
        for name, is_allowed in (("publisher", False), ("everything", True)):
            headers = bearer(api.tokens[name])
            answer = api.request(method, path, json=document, headers=headers)
            assert answer.is_success == is_allowed, answer.text
            if not is_allowed:
                assert answer.status_code == 403
                assert "has no scope for publish:others.told" in answer.json()["detail"]


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


@pytest.mark.parametrize("query", ["", "?way=asgi"])
def test_a_heartbeat_is_replaced_by_who_may_publish_what_it_was_and_what_it_becomes(api, query):
    path = "/v1/heartbeats/of-others"
    theirs = {"timeout": "1h", "subject": OTHERS, "body": "the alarm"}
    mine = {"timeout": "2h", "subject": MINE}
    api.put(path, json=theirs).raise_for_status()
    for name, document in (("publisher", mine), ("publisher", theirs), ("other", mine)):
        answer = api.put(path + query, json=document, headers=bearer(api.tokens[name]))
        assert answer.status_code == 403
    assert api.ask("GET", path)["subject"] == OTHERS
    for name, document in (("other", theirs), ("everything", mine), ("publisher", mine)):
        headers = bearer(api.tokens[name])
        assert api.put(path + query, json=document, headers=headers).status_code == 200
    assert api.ask("GET", path)["subject"] == MINE


def test_a_schedule_is_replaced_by_who_may_publish_what_it_was_and_what_it_becomes(api):
    path = "/v1/schedules/of-others"
    theirs = {"every": "1h", "subject": OTHERS}
    api.put(path, json=theirs).raise_for_status()
    for name, document in (("publisher", SCHEDULE), ("publisher", theirs), ("other", SCHEDULE)):
        assert api.put(path, json=document, headers=bearer(api.tokens[name])).status_code == 403
    listed = api.ask("GET", "/v1/schedules", headers=bearer(api.tokens["other"]))["schedules"]
    assert [one["name"] for one in listed] == ["of-others"]
    headers = bearer(api.tokens["everything"])
    assert api.put(path, json=SCHEDULE, headers=headers).status_code == 200
    api.ask("DELETE", path, 204)


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


def test_a_consumer_reads_only_its_subjects_whatever_the_subscription_had_before(api):
    path, other = "/v1/subscriptions/moved", bearer(api.tokens["other"])
    once = {"type": "pull", "retry": {"max_attempts": 1}}
    api.put(path, json={"subject": "mine.*", **once}).raise_for_status()
    dead = api.publish("mine.moved", body="dead")["id"]
    (message,) = api.pull(path)
    api.ask("POST", f"{path}/nack", json={"leases": [message["lease"]], "delay": "1ms"})
    secret = [api.publish("mine.moved", body=n)["id"] for n in range(2)]
    wait_until(lambda: api.ask("GET", "/v1/stats")["queued"] >= 2)
    api.put(path, json={"subject": "others.*", **once}).raise_for_status()
    theirs = api.publish("others.a", body="theirs")["id"]
    (message,) = api.ask("POST", f"{path}/pull", json={"wait": "5s"}, headers=other)["messages"]
    assert message["id"] == theirs
    assert api.ask("POST", f"{path}/pull", json={}, headers=other)["messages"] == []
    wait_until(lambda: api.ask("GET", f"{path}/dead-letters")["dead_letters"])
    assert api.ask("GET", f"{path}/dead-letters", headers=other)["dead_letters"] == []
    assert api.ask("POST", f"{path}/dead-letters/redrive", headers=other)["redriven"] == 0
    api.ask("DELETE", f"{path}/dead-letters/{dead}", 404, headers=other)
    assert [one["id"] for one in api.pull(path)] == secret
    api.ask("DELETE", path, 204)


def test_what_waits_is_not_sent_elsewhere_by_one_who_may_not_read_it(api):
    path, other = "/v1/subscriptions/sends", bearer(api.tokens["other"])
    hook = {"type": "webhook", "url": "http://127.0.0.1:9/"}
    api.put(path, json={"subject": "mine.*", **hook}).raise_for_status()
    api.publish("mine.sent", body="secret")
    api.put(path, json={"subject": OTHERS, **hook}).raise_for_status()
    answer = api.put(path, json={"subject": OTHERS, **hook}, headers=other)
    assert answer.status_code == 403
    api.ask("DELETE", path, 204)


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


def test_who_says_where_a_message_goes_may_send_there(api):
    """In each of the ways to publish."""

    def statuses(who, url):
        headers = bearer(api.tokens[who])
        message = {"to": {"url": url}, "delay": "1h"}
        subject = {"subject": "sent.a" if who != "everything" else "mine.a"}
        path = f"/v1/subjects/{subject['subject']}/keys/{who}"
        return [
            api.post("/v1/messages", json=message | subject, headers=headers).status_code,
            api.post("/v1/messages/batch", json=[message | subject], headers=headers).status_code,
            api.put(path, json=message, headers=headers).status_code,
        ]

    assert statuses("sender", "http://127.0.0.1:9/") == [201, 200, 201]
    assert statuses("sender", "http://127.0.0.1:8/") == [403] * 3
    assert statuses("everything", "http://127.0.0.1:9/") == [403] * 3
    assert statuses("admin", "http://127.0.0.1:8/") == [201, 200, 201]
    letters = "/v1/subscriptions/_to/dead-letters"
    assert api.get(letters, headers=bearer(api.tokens["consumer"])).status_code == 403
    assert api.get(letters).json() == {"dead_letters": [], "cursor": None}


def test_documents_are_for_everybody(api):
    """A browser sends no token when it opens a page. What is not there is asked for a token."""
    unguarded = ("/docs", "/docs/swagger-ui.css", "/openapi.json", "/console", "/console/app.js")
    for path in unguarded:
        assert api.get(path, headers={"authorization": ""}).status_code == 200
        assert api.get(path, headers=bearer(api.tokens["observer"])).status_code == 200
    for path in ("/docs/nothing", "/redoc", "/nowhere"):
        assert api.get(path, headers={"authorization": ""}).status_code == 401


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


def test_a_pull_that_waits_ends_with_its_token(api):
    path = api.subscribe(unique("watched"), unique("watched"))
    token = bearer(make_token(api.data_dir, "leaving", "consume:*"))
    wait_until(lambda: api.get(path, headers=token).status_code == 200)
    before = api.metric("waiting_pulls")
    with ThreadPoolExecutor() as threads:

        def pull(query):
            return httpx.post(
                f"{api.process.url}{path}/pull{query}",
                json={"wait": "60s"},
                headers=token,
                timeout=DEADLINE_S,
            )

        answers = threads.map(pull, ["", "?way=asgi"])
        wait_until(lambda: api.metric("waiting_pulls") == before + 2)
        TokenFile(OsFiles(str(api.data_dir))).revoke("leaving")
        assert [answer.status_code for answer in answers] == [401, 401]
    assert api.metric("waiting_pulls") == before


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


PAGE = "https://shop.example"


@pytest.fixture(scope="module", params=[None, "a token for the shop"], ids=["open", "token"])
def shop(tmp_path_factory, request):
    server = ApiServer(tmp_path_factory.mktemp("cors"), cors_origins=PAGE)
    server.start(**({"token": request.param} if request.param else {}))
    if request.param:
        server.headers.update(bearer(request.param))
    yield server
    server.shut_down()


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages?ack=durable"])
def test_a_page_of_an_origin_that_is_allowed_may_call(shop, path):
    wanted = {"access-control-request-method": "POST"}
    asked = {**wanted, "access-control-request-headers": "authorization,content-type,if-match"}
    answer = shop.options(path, headers={"origin": PAGE, "authorization": "", **asked})
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == PAGE
    for _ in range(2):  # a head that is known is served in the same way
        answer = shop.post(path, json=LATER, headers={"origin": PAGE})
        assert answer.status_code == 201
        assert answer.headers["access-control-allow-origin"] == PAGE
        exposed = answer.headers["access-control-expose-headers"]
        assert set(exposed.split(", ")) == set(TOLD_HEADERS)
        assert "Origin" in answer.headers["vary"]
        assert "access-control-allow-credentials" not in answer.headers
    answer = shop.post(path, json=LATER)
    assert answer.status_code == 201
    assert "access-control-allow-origin" not in answer.headers


def test_a_page_may_read_why_it_was_refused(shop):
    answer = shop.get("/v1/messages/nothing", headers={"origin": PAGE})
    assert answer.status_code == 404
    assert answer.headers["access-control-allow-origin"] == PAGE
    if "authorization" in shop.headers:
        answer = shop.get("/v1/stats", headers={"origin": PAGE, "authorization": "Bearer wrong"})
        assert answer.status_code == 401
        assert answer.headers["access-control-allow-origin"] == PAGE


def test_caches_are_told_that_answers_depend_on_the_page(shop):
    """Also the one that was asked for without an origin, and the one that is refused."""
    for origin in ({}, {"origin": "https://evil.example"}, {"origin": PAGE}):
        answer = shop.get("/metrics", headers={**origin, "accept-encoding": "gzip"})
        assert answer.headers["vary"].lower().count("origin") == 1
        if answer.status_code == 200:
            assert answer.headers["vary"].lower().count("accept-encoding") == 1


def test_a_page_of_another_origin_may_not(shop):
    evil = {"origin": "https://evil.example"}
    wanted = {"access-control-request-method": "POST"}
    preflight = shop.options("/v1/messages", headers={**evil, **wanted})
    assert preflight.status_code == 400
    answer = shop.post("/v1/messages", json=LATER, headers=evil)
    assert "access-control-allow-origin" not in answer.headers
    assert answer.status_code == (201 if "authorization" in shop.headers else 403)


def test_without_the_setting_no_page_is_told_anything(api):
    answer = api.get("/healthz", headers={"origin": PAGE})
    assert not [name for name in answer.headers if name.startswith("access-control")]
    assert "vary" not in answer.headers
