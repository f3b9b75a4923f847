"""The parts of uvicorn that are used here and not promised, compared before the port is bound.

Connections take uvicorn's protocol apart (`connection`, `protocol`), and the wiring overrides parts
of its server. A release that renames one of these would not fail at the import, but at a client's
first request, or never: an overridden method that nobody calls is silent. So pyproject.toml bounds
the release, and the parts that are used are written down here, method by method with its
parameters, and attribute by attribute. A server on another uvicorn does not start.

One change stays unseen: a method of the same name and parameters that does something else.

Cost: 0.1 ms, once. Threads: any.
"""

from collections.abc import Mapping
from inspect import signature

import uvicorn
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from delayserver.errors import LibraryError

METHODS: Mapping[type, Mapping[str, tuple[str, ...]]] = {
    HttpToolsProtocol: {
        "__init__": ("config", "server_state", "app_state", "_loop"),
        "connection_made": ("transport",),
        "connection_lost": ("exc",),
        "data_received": ("data",),
        "eof_received": (),
        "on_message_begin": (),
        "on_headers_complete": (),
        "on_message_complete": (),
        "on_response_complete": (),
        "pause_writing": (),
        "resume_writing": (),
        "send_400_response": ("msg",),
        "shutdown": (),
        "_start_asgi_task": ("cycle", "app"),
        "_unset_keepalive_if_required": (),
    },
    FlowControl: {"pause_reading": (), "resume_reading": ()},
    uvicorn.Server: {
        "capture_signals": (),
        "handle_exit": ("sig", "frame"),
        "on_tick": ("counter",),
        "serve": ("sockets",),
        "shutdown": ("sockets",),
        "startup": ("sockets",),
    },
}
"""Methods that are called or overridden, by class, with their parameters behind `self`."""

ATTRIBUTES: Mapping[type, tuple[str, ...]] = {
    HttpToolsProtocol: (
        "cycle",
        "flow",
        "headers",
        "logger",
        "loop",
        "parser",
        "pipeline",
        "scope",
        "server_state",
        "transport",
        "url",
    ),
    FlowControl: ("read_paused", "write_paused"),
    RequestResponseCycle: (
        "disconnected",
        "keep_alive",
        "message_event",
        "more_body",
        "response_complete",
    ),
    ServerState: ("connections", "default_headers", "total_requests"),
    uvicorn.Server: ("force_exit", "server_state", "should_exit", "started"),
}
"""Attributes that objects of a class get when they are made, or a connection with a request.

A stand-in for a cycle (`protocol`) has all of RequestResponseCycle that the protocol looks at."""


def check_uvicorn() -> None:
    """Raises LibraryError that names all that the installed uvicorn lacks."""
    missing: list[str] = []
    for kind, methods in METHODS.items():
        for name, parameters in methods.items():
            # Inherited methods do not count: asyncio has some of these names, too, and they do
            # nothing.
            method = vars(kind).get(name)
            if method is None:
                missing.append(f"{kind.__name__}.{name}()")
            elif (found := tuple(signature(method).parameters)[1:]) != parameters:
                wanted = ", ".join(parameters)
                missing.append(f"{kind.__name__}.{name}({wanted}), it has ({', '.join(found)})")
    for kind, attributes in ATTRIBUTES.items():
        given = given_names(kind)
        missing += [f"{kind.__name__}.{name}" for name in attributes if name not in given]
    if missing:
        raise LibraryError(
            f"uvicorn {uvicorn.__version__} is not one that this server can run on, it lacks "
            f"{'; '.join(missing)}. Install the release that pyproject.toml asks for"
        )


def given_names(kind: type) -> set[str]:
    """The attributes that are given to objects of a class, among other names."""
    functions = (vars(kind).get(name) for name in ("__init__", "on_message_begin"))
    # A function is compiled with the names of all attributes that it gives.
    return {name for function in functions if function for name in function.__code__.co_names}
