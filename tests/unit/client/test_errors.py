"""The errors of the client library: one tree, all of which can be sent between processes."""

import copy
import pickle

import pytest

import delayserver.client
from delayserver.client import (
    ClientError,
    PartlyPublishedError,
    Problem,
    Published,
    RefusedError,
    Retry,
)
from delayserver.client.errors import FieldError

PROBLEM = Problem("Refused", 409, "it was fired", "urn:x", (FieldError("/key", "taken"),), "dead")


def tree(root):
    """An error class, and all below it."""
    return [root, *(one for below in root.__subclasses__() for one in tree(below))]


def raised(kind):
    """An error as the library raises it."""
    if issubclass(kind, RefusedError):
        return kind(PROBLEM, 2.5)
    if kind is PartlyPublishedError:
        return kind({0: Published("a")}, {1: RefusedError(PROBLEM, 2.5)})
    return kind("30s") if kind is Retry else kind("it went wrong")


EXPORTED = [
    one
    for one in map(vars(delayserver.client).get, delayserver.client.__all__)
    if isinstance(one, type) and issubclass(one, Exception)
]


def test_every_error_can_be_imported():
    # Tests may have errors of their own.
    ours = {kind for kind in tree(ClientError) if kind.__module__.startswith("delayserver.")}
    assert ours <= set(EXPORTED)


@pytest.mark.parametrize("kind", EXPORTED)
@pytest.mark.parametrize("sent", [lambda one: pickle.loads(pickle.dumps(one)), copy.copy])
def test_an_error_arrives_as_it_was_raised(kind, sent):
    error = raised(kind)
    error.add_note("from a worker")
    arrived = sent(error)
    assert type(arrived) is kind
    assert str(arrived) == str(error)
    assert repr(vars(arrived)) == repr(vars(error))  # errors in errors are other objects
