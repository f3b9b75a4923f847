"""Tokens: the scopes of the caller's own one, and the list of tokens.

They are made and revoked by the command `delayserver token`, beside the server: no call gives away
the right to call.

Cost: about 100 µs per call; a page goes over all tokens. Threads: belongs to the event loop.
"""

import heapq
from operator import attrgetter

from fastapi import APIRouter, Response

from delayserver.api.documents import NAMED_PAGE_MAX
from delayserver.api.rest.authorize import CallerOf
from delayserver.api.rest.common import INVALID, PartsOf, json_answer
from delayserver.api.rest.named import CursorQuery, LimitQuery
from delayserver.api.rest.openapi import answer
from delayserver.security.tokens import SETTING_NAME, Action, Token
from delayserver.times import format_time
from delayserver.wire.operations import OwnTokenDocument, TokenDocument, TokenListDocument

router = APIRouter()


@router.get("/v1/tokens/self", tags=["tokens"], responses={200: answer(OwnTokenDocument)})
async def get_own_token(caller: CallerOf) -> Response:
    """The scopes of the caller. Any token will do; where none is needed, all calls are allowed."""
    if caller is None:
        return json_answer(OwnTokenDocument(None, [Action.ADMIN], None, None))
    token = caller.token
    return json_answer(
        OwnTokenDocument(token.name, list(token.scopes), _expires_at(token), token.rate_per_s)
    )


@router.get("/v1/tokens", tags=["tokens"], responses=INVALID | {200: answer(TokenListDocument)})
async def list_tokens(
    parts: PartsOf, limit: LimitQuery = NAMED_PAGE_MAX, cursor: CursorQuery = None
) -> Response:
    """Tokens that are valid now, in the order of their names; that of the setting `token` is not
    among them."""
    known = (caller.token for caller in parts.calls.tokens)
    behind = (one for one in known if one.name > (cursor or "") and one.name != SETTING_NAME)
    found = heapq.nsmallest(limit + 1, behind, key=attrgetter("name"))
    documents = [
        TokenDocument(
            token.name,
            list(token.scopes),
            _expires_at(token),
            token.rate_per_s,
            format_time(token.created_ms),
        )
        for token in found[:limit]
    ]
    following = found[limit - 1].name if len(found) > limit else None
    return json_answer(TokenListDocument(documents, following))


def _expires_at(token: Token) -> str | None:
    return None if token.expires_ms is None else format_time(token.expires_ms)
