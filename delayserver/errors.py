"""The errors of the server above the disk, in one tree; those of the disk are in storage.errors.

DelayServerError
├── InputError              a request or a setting is wrong; nothing was changed
│   ├── InputErrors         several of them at once (a batch), each with its own pointer
│   └── TooLargeError       longer than a limit allows
├── SignatureError          a webhook that was received is not authentic (security.signing)
├── NotFoundError           no such message, key, subscription, …
├── ConflictError           the state does not allow it; carries the state
│   └── KeyConflictError    a key stands for a message with other content
├── PreconditionError       it is not the version that the caller expected; carries the version
├── OverloadedError         a bounded queue is full: try again after `retry_after_ms`
├── RateLimitedError        a token is used more often than it may be, likewise
├── HeadTooLargeError       a request has more headers, or longer ones, than the limits allow
├── MalformedError          a request is not as HTTP wants it
├── CodingError             the body of a request is compressed
├── MediaTypeError          the body's type needs a package that is not installed
├── DiskReserveError        the disk is nearly full: publishing is refused, dispatch goes on
├── AckTimeoutError         a publish was accepted and is not durable within its timeout
├── StoppingError           the server is shutting down or has stopped after a failed fsync
├── ShardAwayError          the shard that is asked starts, or has just ended
├── StandbyError            who was asked is on standby for a shard, and cannot say more now
├── MisdirectedError        another shard has it, and the caller wants to ask there by itself
├── LinkError               bytes over a link are not from another shard (shards.sealed)
├── TimerShutdownError      a timer that was shut down was given work (delayserver.timers)
├── OutletError             a client of a broker cannot be opened (delivery.outlet)
├── FeedError               a topic cannot be read (parts.sources.feeds)
├── LibraryError            an installed library is not one that the server can run on
├── PipelineError           a job of the data pipeline cannot run (delayserver.pipeline)
└── AccessError             no token, a wrong one, or one without the scope
"""

from collections.abc import Sequence


class DelayServerError(Exception):
    """Base of all errors of the server itself."""


class InputError(DelayServerError):
    """Something that came from outside is wrong.

    `pointer` is a JSON pointer to the field (RFC 6901), empty for the whole document."""

    def __init__(self, detail: str, pointer: str = "") -> None:
        super().__init__(detail)
        self.detail = detail
        self.pointer = pointer

    def below(self, prefix: str) -> "InputError":
        """The same error as seen from the document that holds this one at `prefix`."""
        return InputError(self.detail, prefix + self.pointer)


class InputErrors(InputError):
    """Several errors of one document; nothing of it was accepted."""

    def __init__(self, detail: str, errors: Sequence[InputError]) -> None:
        super().__init__(detail)
        self.errors = errors


class TooLargeError(InputError):
    """A request, a body or a batch is longer than the limit."""


class NotFoundError(DelayServerError):
    """Nothing goes by that name."""


class ConflictError(DelayServerError):
    """The state of the thing does not allow the call. `state` is that state."""

    def __init__(self, detail: str, state: str = "") -> None:
        super().__init__(detail)
        self.state = state


class KeyConflictError(ConflictError):
    """A key stands for a message with other content. `state` is the state of that message."""


class PreconditionError(DelayServerError):
    """The thing is not in the version that the caller expected; nothing was changed. `version` is
    its version, empty where there is none."""

    def __init__(self, detail: str, version: str = "") -> None:
        super().__init__(detail)
        self.version = version


class OverloadedError(DelayServerError):
    """A bounded queue is full; nothing was accepted."""

    def __init__(self, detail: str, retry_after_ms: int = 1000) -> None:
        super().__init__(detail)
        self.retry_after_ms = retry_after_ms


class RateLimitedError(DelayServerError):
    """More requests or messages per second than a token allows; nothing was accepted."""

    def __init__(self, detail: str, retry_after_ms: int) -> None:
        super().__init__(detail)
        self.retry_after_ms = retry_after_ms


class HeadTooLargeError(DelayServerError):
    """The head of a request (its address and headers) is longer than the limits allow."""


class MalformedError(DelayServerError):
    """A request that every part of HTTP could read in another way."""


class CodingError(DelayServerError):
    """The body of a request has a content coding, and none is known here."""


class MediaTypeError(DelayServerError):
    """The body of a request is of a type that this server cannot read."""


class DiskReserveError(DelayServerError):
    """Publishing would eat the space that recovery and dispatch need."""


class AckTimeoutError(DelayServerError):
    """A publish was accepted, and was not durable within the time that its client gave it. `ids`:
    of its messages."""

    def __init__(self, detail: str, ids: list[str]) -> None:
        super().__init__(detail)
        self.ids = ids


class StoppingError(DelayServerError):
    """The server does not accept work any more."""


class ShardAwayError(DelayServerError):
    """The shard that a call belongs to cannot be asked now."""

    def __init__(self, shard: int, *, is_unknown: bool = False) -> None:
        """`is_unknown`: it was asked, and ended before it answered; or others were asked beside it,
        and may have done their part."""
        super().__init__(
            f"shard {shard} has not answered, so whether the call had its effect is not "
            "known; repeat it: under its key a message is published once, and all else is the same "
            "when it is done twice"
            if is_unknown
            else f"shard {shard} starts, or is away; try again"
        )
        self.is_unknown = is_unknown


class FormerOwnerError(ShardAwayError):
    """The process that was asked may have lost its shard to another one."""

    def __init__(self, shard: int) -> None:
        super().__init__(shard, is_unknown=True)
        self.args = (
            f"the log of shard {shard} does not answer, so another process may own the shard by "
            "now: whether the call had its effect is not known; repeat it, under its key a message "
            "is published once, and all else is the same when it is done twice",
        )


class StandbyError(DelayServerError):
    """The process follows a shard that another process owns, and cannot have the call answered
    now; nothing was done."""


class MisdirectedError(DelayServerError):
    """A call belongs to another shard, and its client does not want it forwarded; nothing was
    done. `owner`: the URL of that shard."""

    def __init__(self, shard: int, owner: str) -> None:
        super().__init__(
            f"it belongs to shard {shard}: ask {owner}, or leave `delay-forward: no` out, and it "
            "is forwarded"
        )
        self.owner = owner


class LinkError(DelayServerError):
    """Bytes over a connection between machines are not from a node of the cluster, or were changed
    on their way; the connection is of no use any more. The text holds none of these bytes."""


class LibraryError(DelayServerError):
    """A library that is installed lacks a part that the server uses; the text names it."""


class PipelineError(DelayServerError):
    """A job of the data pipeline cannot run; the text names the missing thing."""


class AccessError(DelayServerError):
    """Not allowed. `authenticated` tells a wrong scope (403) from a missing token (401)."""

    def __init__(self, detail: str, *, authenticated: bool = False) -> None:
        super().__init__(detail)
        self.authenticated = authenticated
