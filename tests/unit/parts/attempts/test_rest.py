"""The document of the attempts of a message."""

from delayserver.parts.attempts.attempts import AttemptsView, AttemptView
from delayserver.parts.attempts.rest import attempts_document
from delayserver.records.attempts import DeliveryAttempt
from delayserver.wire.messages import AttemptDocument, AttemptsDocument


def test_what_is_not_known_of_an_attempt_is_null() -> None:
    failed = DeliveryAttempt(1, 7, 1_000, 250, 503, "busy", "HTTP 503")
    arrived = DeliveryAttempt(2, 7, 2_000)
    view = AttemptsView([AttemptView("hook", failed), AttemptView("", arrived)], 3)
    assert attempts_document(view) == AttemptsDocument(
        [
            AttemptDocument(
                subscription="hook",
                attempt=1,
                at="1970-01-01T00:00:01.000Z",
                duration="250ms",
                outcome="failed",
                status=503,
                answer="busy",
                error="HTTP 503",
            ),
            AttemptDocument(
                subscription="",
                attempt=2,
                at="1970-01-01T00:00:02.000Z",
                duration=None,
                outcome="delivered",
                status=None,
                answer=None,
                error=None,
            ),
        ],
        3,
    )
