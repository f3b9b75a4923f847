"""The states of an entry, and the guarantees: their numbers are those of a column."""

import numpy as np

from delayserver.pipeline.states.entry_states import SETTLED_DTYPE, BrokenGuarantee, EntryState


def test_a_row_holds_every_state_and_all_broken_guarantees_at_once() -> None:
    rows = np.zeros(len(EntryState), SETTLED_DTYPE)
    rows["state"] = list(EntryState)
    for broken in BrokenGuarantee:
        assert not (rows["problems"] & np.uint16(broken)).any()
        rows["problems"] |= np.uint16(broken)
    assert [EntryState(state) for state in rows["state"].tolist()] == list(EntryState)
    assert {BrokenGuarantee(one) for one in rows["problems"].tolist()} == {~BrokenGuarantee(0)}


def test_the_state_of_a_whole_entry_is_that_of_the_receiver_that_still_lacks_it() -> None:
    ended = (EntryState.DROPPED, EntryState.DELIVERED, EntryState.CANCELLED, EntryState.DEAD)
    assert max(*ended, EntryState.PENDING) is EntryState.PENDING
    assert max(*ended, EntryState.MISSING) is EntryState.MISSING
