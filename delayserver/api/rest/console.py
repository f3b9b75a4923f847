"""/console: the server for operators, in a browser; static files that make the calls of the API.

The files (`delayserver/console`) are for everybody, also where tokens are asked for: they hold
nothing of the server. The data that they show, they ask for with the token of the user.

The browser allows a page only the things that these files need (Content-Security-Policy): scripts,
styles and calls of this origin, none of them in the page itself, no frame around it. A file keeps
its name in the next version, so a browser asks each time whether it is the same (`ETag`).

Cost: 50 ms of a thread at the first request, then 0.1 ms; 0.3 MB are kept, compressed
and not. Threads: belongs to the event loop; files are read in another.
"""

import asyncio
import gzip
import hashlib
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Annotated, Final, NamedTuple

from fastapi import APIRouter, Header, Request, Response
from starlette.exceptions import HTTPException

from delayserver.api.conditions import is_known
from delayserver.api.finish import accepts_gzip
from delayserver.api.scopes import CONSOLE_FILES, CONSOLE_PATH

_ROOT: Final = files("delayserver") / "console"
_PAGE: Final = "index.html"
_MEDIA_TYPES: Final = {
    "css": "text/css",
    "html": "text/html",
    "js": "text/javascript",
    "svg": "image/svg+xml",
    "LICENSE": "text/plain",
}
"""By the end of the name; a file with another one is not served."""
_HEADERS: Final = {
    "cache-control": "no-cache",
    "vary": "accept-encoding",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "content-security-policy": "; ".join(
        (
            "default-src 'none'",
            "script-src 'self'",
            "style-src 'self'",
            "connect-src 'self'",
            "img-src 'self' data:",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        )
    ),
}
Known = Annotated[str | None, Header(alias="if-none-match")]

router = APIRouter(include_in_schema=False)


class _File(NamedTuple):
    media_type: str
    data: bytes
    compressed: bytes
    version: str


@router.get(CONSOLE_PATH)
async def get_console(request: Request, if_none_match: Known = None) -> Response:
    """The page. Its addresses are relative: a gateway may put a prefix before them."""
    return await _answer(_PAGE, request, if_none_match)


@router.get(CONSOLE_FILES + "{name:path}")
async def get_file(name: str, request: Request, if_none_match: Known = None) -> Response:
    """A file of the page."""
    return await _answer(name, request, if_none_match)


async def _answer(name: str, request: Request, known: str | None) -> Response:
    # A look-up by name in files that were read before: no path of a client ever reaches the disk.
    file = (await asyncio.to_thread(_read_files)).get(name)
    if file is None:
        raise HTTPException(404)
    is_compressed = accepts_gzip(request.scope["headers"])
    # The two forms of a file are different answers.
    version = file.version + "-gzip" * is_compressed
    headers = _HEADERS | {"etag": f'"{version}"'}
    if is_known(known, version):
        return Response(status_code=304, headers=headers)
    if not is_compressed:
        return Response(file.data, headers=headers, media_type=file.media_type)
    headers["content-encoding"] = "gzip"
    return Response(file.compressed, headers=headers, media_type=file.media_type)


@cache
def _read_files() -> Mapping[str, _File]:
    """All of them by their names from the folder of the console on."""
    return dict(_walk(_ROOT, ""))


def _walk(folder: Traversable, above: str) -> Iterator[tuple[str, _File]]:
    for one in folder.iterdir():
        name = above + one.name
        if one.is_dir():
            yield from _walk(one, name + "/")
        elif media_type := _MEDIA_TYPES.get(one.name.rpartition(".")[2]):
            data = one.read_bytes()
            version = hashlib.sha256(data).hexdigest()[:32]
            yield name, _File(media_type, data, gzip.compress(data, 9, mtime=0), version)
