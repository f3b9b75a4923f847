"""Which call needs which scope: one row for each call of the API, and nothing else decides.

A call without a row is for `admin` alone. Where a row says BODY, the subjects stand in the request
itself, and the handler asks with `Caller.require`; everywhere else it was asked before.

`delayserver.api.rest.authorize` asks. Cost: none. Threads: any.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum, auto

from delayserver.parts.part import Parts
from delayserver.security.tokens import Action


class CoveredSubject(Enum):
    """Whose subject a scope has to cover."""

    NOTHING = auto()
    """The scope has no subject."""
    EVERYTHING = auto()
    """It may change messages of any subject: only a scope for all of them will do."""
    SUBJECT = auto()
    """The one in the path."""
    MESSAGE = auto()
    """The subject of the message whose id is in the path."""
    SUBSCRIPTION = auto()
    """The subject of the subscription whose name is in the path."""
    ANYONE = auto()
    """Any token will do, whatever its scopes."""
    BODY = auto()
    """All that the request names, or lists: the handler asks."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One of these actions has to be allowed."""

    actions: tuple[Action, ...]
    of: CoveredSubject = CoveredSubject.NOTHING


PUBLIC = Rule(())
"""Every caller, without a token."""
KNOWN = Rule((), CoveredSubject.ANYONE)
"""Every caller with a token. The places of the shards are such a call: each shard asks for the same
token, and publishers and consumers alike need to know them."""
ADMIN = Rule((Action.ADMIN,))
OBSERVE = Rule((Action.OBSERVE,))
_PUBLISH = (Action.PUBLISH,)
_CONSUME = (Action.CONSUME,)
_EITHER = (Action.PUBLISH, Action.CONSUME)

RULES: Mapping[tuple[str, str], Rule] = {
    ("POST", "/v1/messages"): Rule(_PUBLISH, CoveredSubject.BODY),
    ("POST", "/v1/messages/batch"): Rule(_PUBLISH, CoveredSubject.BODY),
    ("POST", "/v1/messages/cancel"): Rule(_PUBLISH, CoveredSubject.BODY),
    ("GET", "/v1/messages/{message_id}"): Rule(_EITHER, CoveredSubject.MESSAGE),
    ("DELETE", "/v1/messages/{message_id}"): Rule(_PUBLISH, CoveredSubject.MESSAGE),
    ("PATCH", "/v1/messages/{message_id}"): Rule(_PUBLISH, CoveredSubject.MESSAGE),
    ("GET", "/v1/subjects"): Rule(_EITHER, CoveredSubject.BODY),
    ("GET", "/v1/subjects/{subject}/messages"): Rule(_EITHER, CoveredSubject.SUBJECT),
    ("GET", "/v1/subjects/{subject}/keys/{key}"): Rule(_EITHER, CoveredSubject.SUBJECT),
    ("DELETE", "/v1/subjects/{subject}/keys/{key}"): Rule(_PUBLISH, CoveredSubject.SUBJECT),
    ("PATCH", "/v1/subjects/{subject}/keys/{key}"): Rule(_PUBLISH, CoveredSubject.SUBJECT),
    ("PUT", "/v1/subjects/{subject}/keys/{key}"): Rule(_PUBLISH, CoveredSubject.SUBJECT),
    ("PUT", "/v1/subscriptions/{name}"): Rule(_CONSUME, CoveredSubject.BODY),
    ("GET", "/v1/subscriptions"): Rule(_CONSUME, CoveredSubject.BODY),
    ("GET", "/v1/subscriptions/{name}"): Rule(_CONSUME, CoveredSubject.SUBSCRIPTION),
    ("DELETE", "/v1/subscriptions/{name}"): Rule(_CONSUME, CoveredSubject.SUBSCRIPTION),
    ("POST", "/v1/subscriptions/{name}/pause"): Rule(_CONSUME, CoveredSubject.SUBSCRIPTION),
    ("POST", "/v1/subscriptions/{name}/resume"): Rule(_CONSUME, CoveredSubject.SUBSCRIPTION),
    ("POST", "/v1/subscriptions/{name}/pull"): Rule(_CONSUME, CoveredSubject.SUBSCRIPTION),
    ("POST", "/v1/subscriptions/{name}/ack"): Rule(_CONSUME, CoveredSubject.SUBSCRIPTION),
    ("POST", "/v1/subscriptions/{name}/nack"): Rule(_CONSUME, CoveredSubject.SUBSCRIPTION),
    ("POST", "/v1/subscriptions/{name}/extend"): Rule(_CONSUME, CoveredSubject.SUBSCRIPTION),
    ("GET", "/v1/dead-letters"): Rule(_CONSUME, CoveredSubject.BODY),
    ("GET", "/v1/subscriptions/{name}/dead-letters"): Rule(_CONSUME, CoveredSubject.BODY),
    ("POST", "/v1/subscriptions/{name}/dead-letters/redrive"): Rule(_CONSUME, CoveredSubject.BODY),
    ("DELETE", "/v1/subscriptions/{name}/dead-letters/{message_id}"): Rule(
        _CONSUME, CoveredSubject.BODY
    ),
    ("POST", "/v1/backups"): ADMIN,
    ("GET", "/v1/backups"): ADMIN,
    ("GET", "/v1/backups/{name}"): ADMIN,
    ("DELETE", "/v1/backups/{name}"): ADMIN,
    ("GET", "/metrics"): OBSERVE,
    ("GET", "/v1/cluster"): KNOWN,
    ("GET", "/v1/tokens/self"): KNOWN,
    ("GET", "/v1/tokens"): ADMIN,
    ("GET", "/v1/stats"): OBSERVE,
    ("GET", "/v1/forecast"): OBSERVE,
    ("GET", "/healthz"): PUBLIC,
    ("GET", "/readyz"): PUBLIC,
}
PUBLISH_BODY = Rule(_PUBLISH, CoveredSubject.BODY)
EITHER_BODY = Rule(_EITHER, CoveredSubject.BODY)
DOCS_PATH = "/docs"
DOCUMENT_PATH = "/openapi.json"
CONSOLE_PATH = "/console"
CONSOLE_FILES = "/console/"
"""Before the name of a file of it."""
PUBLIC_PATHS = frozenset(path for (_, path), rule in RULES.items() if rule is PUBLIC)
_UNGUARDED_PATHS = PUBLIC_PATHS | {
    DOCS_PATH,
    DOCUMENT_PATH,
    CONSOLE_PATH,
    f"{DOCS_PATH}/swagger-ui.css",
    f"{DOCS_PATH}/swagger-ui-bundle.js",
}


def named_rules(collection: str, verbs: Iterable[str]) -> dict[tuple[str, str], Rule]:
    """The rules of definitions under names: a caller that may publish to the subject may change
    one, and a caller that may publish or consume sees it."""
    one = f"/v1/{collection}/{{name}}"
    return {
        ("GET", f"/v1/{collection}"): EITHER_BODY,
        ("PUT", one): PUBLISH_BODY,
        ("GET", one): EITHER_BODY,
        ("DELETE", one): PUBLISH_BODY,
        **{("POST", f"{one}/{verb}"): PUBLISH_BODY for verb in verbs},
    }


def rule_of(parts: Parts, method: str, path: str) -> Rule:
    """The rule of a call, by the pattern of its path."""
    for rules in (RULES, *(part.rules for part in parts)):
        if (rule := rules.get((method, path))) is not None:
            return rule
    return ADMIN


def is_unguarded(path: str) -> bool:
    """Whether the call needs no token: the health of the server, the description of the API, and
    files that hold nothing of the server."""
    return path in _UNGUARDED_PATHS or path.startswith(CONSOLE_FILES)
