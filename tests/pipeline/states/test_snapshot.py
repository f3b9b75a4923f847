"""What is known of a directory before its hours are read: does the message log reach far enough?"""

import shutil
from pathlib import Path

import pytest

from delayserver.pipeline.states.snapshot import open_directory, take_snapshot
from tests.pipeline.store import Store
from tests.world.resealing import read_frames, write_frames


def make_store(root: Path) -> Store:
    store = Store(root)
    store.subscribe("mail", "*")
    for number in range(3):
        store.publish("order", [1000 + number])
    store.checkpoint()
    store.stop()
    return store


def reasons(store: Store) -> list[str]:
    directory = open_directory(store.root)
    with directory.catalog() as catalog:
        snapshot = take_snapshot(directory.files, catalog, stamp=directory.stamp)
    return [found.reason for found in snapshot.damage]


def test_the_message_log_reaches_to_the_checkpoint(tmp_path: Path) -> None:
    assert reasons(make_store(tmp_path / "data")) == []


def test_a_message_log_that_is_gone_is_named(tmp_path: Path) -> None:
    store = make_store(tmp_path / "data")
    shutil.rmtree(Path(store.root) / "messages")
    (reason,) = reasons(store)
    assert reason.startswith("the message log is missing")


@pytest.mark.damaged("the end of the message log is gone")
def test_a_message_log_that_ends_before_the_checkpoint_is_named(tmp_path: Path) -> None:
    store = make_store(tmp_path / "data")
    newest = max((Path(store.root) / "messages").glob("*.messages"))
    frames = read_frames(newest)
    write_frames(newest, frames[:-1])
    (reason,) = reasons(store)
    assert reason.startswith("the message log ends with seq")


def test_a_new_directory_has_no_message_log_yet(tmp_path: Path) -> None:
    store = Store(tmp_path / "data")
    store.stop()
    assert reasons(store) == []
