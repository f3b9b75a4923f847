"""Several subscriptions of one message, over real HTTP: kills in between, bad ones among them."""

import socket
import threading

import pytest

from tests.integration.api_support import unique
from tests.waiting import wait_until


def names(messages):
    return sorted(one["body"] for one in messages)


def test_each_settles_on_its_own_while_they_come_and_go_and_the_server_is_killed(lasting_api):
    api, prefix = lasting_api, unique("fan")
    exact = api.subscribe(unique("exact"), f"{prefix}.a")
    every = api.subscribe(unique("every"), f"{prefix}.*")
    for body in ("one", "two"):
        api.publish(f"{prefix}.a", body=body)
    api.publish(f"{prefix}.b", body="three")
    api.publish("nobody." + prefix, body="four")

    # One has taken its messages; the other holds some of them when the server dies.
    assert names(api.pull_all(exact, 2)) == ["one", "two"]
    assert len(api.pull_held(every, 3)) == 3
    api.restart(kill=True)
    assert api.pull(exact, wait=0) == []
    api.ack(every, *[one for one in api.pull(every) if one["body"] == "one"])
    api.restart(kill=True)

    # A younger one gets nothing of what others were there for, also after a restart …
    younger = api.subscribe(unique("younger"), f"{prefix}.*")
    assert api.pull(younger, wait=0) == []
    api.restart(kill=True)
    assert api.pull(younger, wait=0) == []
    # … until they are deleted. What another had is not told twice.
    api.ask("DELETE", every, 204)
    assert names(api.pull_all(younger, 1)) == ["three"]
    api.restart(kill=True)
    assert api.pull(younger, wait=0) == []

    # What nobody matched is listed, and waits for the first that does.
    path = f"/v1/subjects/nobody.{prefix}/messages"
    assert names(api.ask("GET", path)["messages"]) == ["four"]
    late = api.subscribe(unique("late"), f"nobody.{prefix}")
    later = api.subscribe(unique("later"), "nobody.*")
    api.restart(kill=True)
    assert names(api.pull_all(late, 1)) == ["four"]
    assert api.pull(later, wait=0) == []
    assert api.ask("GET", path)["messages"] == []


class BadReceiver:
    """Accepts connections, reads the request, and does something wrong with each."""

    def __init__(self, misbehave):
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}/"
        self._misbehave = misbehave
        self._open = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def _accept(self):
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            self._open.append(connection)
            thread = threading.Thread(target=self._serve, args=(connection,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _serve(self, connection):
        try:
            connection.recv(65536)
            self._misbehave(connection)
        except OSError:
            pass

    def close(self):
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        for connection in self._open:
            connection.close()
        for thread in self._threads:
            thread.join(5)


def never_answers(connection):
    while connection.recv(65536):
        pass


def answers_garbage(connection):
    connection.sendall(b"\x00\xff" * 100 + b"\r\n\r\n")
    connection.close()


def streams_without_end(connection):
    connection.sendall(b"HTTP/1.1 500 X\r\ntransfer-encoding: chunked\r\n\r\n")
    while True:
        connection.sendall(b"400\r\n" + b"x" * 1024 + b"\r\n")


def sends_headers_without_end(connection):
    connection.sendall(b"HTTP/1.1 200 X\r\n")
    while True:
        connection.sendall(b"x-more: " + b"x" * 1000 + b"\r\n")


def closes(connection):
    connection.close()


@pytest.fixture
def bad_receivers():
    made = [
        BadReceiver(how)
        for how in (
            never_answers,
            answers_garbage,
            streams_without_end,
            sends_headers_without_end,
            closes,
        )
    ]
    yield made
    for one in made:
        one.close()


def test_bad_subscribers_cost_only_themselves(api, receiver, bad_receivers):
    subject, count = unique("fan"), 40
    retry = {"max_attempts": 1}
    bad = [
        api.subscribe(unique("bad"), subject, url=one.url, timeout="1s", retry=retry)
        for one in bad_receivers
    ]
    url = receiver.hook()
    good = api.subscribe(unique("good"), subject, url=url, retry=retry)
    pulls = api.subscribe(unique("pull"), subject)
    messages = [api.publish(subject, body=n) for n in range(count)]
    received = [receiver.next(url) for _ in range(count)]
    assert {one.headers["webhook-id"] for one in received} == {one["id"] for one in messages}
    assert len(api.pull_all(pulls, count)) == count
    for path in bad:

        def all_dead(path=path):
            letters = api.ask("GET", f"{path}/dead-letters?limit=1000")["dead_letters"]
            return len(letters) == count and letters

        assert all(one["reason"] for one in wait_until(all_dead))
    assert api.ask("GET", f"{good}/dead-letters")["dead_letters"] == []
    for path in bad:
        assert api.ask("GET", path)["in_flight"] == 0
    assert "Traceback" not in api.log
