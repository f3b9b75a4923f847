"""The table of due times, against a dictionary."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from delayserver.timers.due_table import NEVER_MS, DueTable

NAMES = st.sampled_from([f"n{number}" for number in range(12)])
STEPS = st.one_of(
    st.tuples(st.just("put"), NAMES, st.integers(0, 30) | st.just(NEVER_MS)),
    st.tuples(st.just("remove"), NAMES, st.just(0)),
    st.tuples(st.just("due"), st.just(""), st.integers(0, 30)),
)


@given(st.lists(STEPS, max_size=40), st.integers(1, 12), st.integers(0, 1030))
def test_it_is_a_dictionary_that_knows_who_is_due(steps, most, others):
    # Others before them, so that they stand in the first block, in the next one, or in both.
    table = DueTable()
    far = [f"far{number}" for number in range(others)]
    table.load(far, np.full(others, 1000, np.int64))
    model = dict.fromkeys(far, 1000)
    for what, name, value in steps:
        if what == "put":
            table.put(name, value)
            model[name] = value
        elif what == "remove":
            table.remove(name)
            model.pop(name, None)
        else:
            rows = table.due(value, most)
            found = [(model[table.name(row)], table.name(row)) for row in rows]
            due = sorted(one for one in model.values() if one <= value)
            assert [due_ms for due_ms, _ in found] == due[:most]
            assert len({name for _, name in found}) == len(found)
            if found:
                table.set(rows[0], 31)
                model[found[0][1]] = 31
        assert len(table) == len(model)
        assert table.next_ms() == min(model.values(), default=NEVER_MS)
        assert (name in table) == (name in model)


@given(st.integers(1, 40), st.integers(1, 15), st.integers(0, 50))
def test_each_row_has_its_turn_however_early_others_are_due(count, most, first):
    """No row moves on: all are due again and again."""
    table = DueTable()
    for number in range(count):
        table.put(f"n{number}", number)
    seen, from_row = [], first
    for _ in range(-(-count // most)):
        rows = table.due(100, most, from_row)
        assert len(rows) == min(most, count)
        seen += rows
        from_row = rows[-1] + 1
    assert set(seen) == set(range(count))
