"""The index of subjects: it finds what a comparison with every pattern finds, in less steps."""

from typing import ClassVar

from hypothesis import given
from hypothesis import strategies as st

from delayserver.records.subject_index import SubjectIndex
from delayserver.records.subjects import matches

NAMES = st.lists(st.sampled_from(["a", "b", "order", ""]), min_size=1, max_size=4).map(
    lambda parts: "x" + ".".join(parts)
)
PATTERNS = st.one_of(st.just("*"), NAMES, NAMES.map(lambda name: f"{name}.*"))


@given(
    st.lists(st.tuples(st.integers(1, 9), st.none() | PATTERNS), max_size=20),
    st.lists(NAMES, min_size=1, max_size=5),
)
def test_it_finds_what_matches_however_it_was_changed(
    changes: list[tuple[int, str | None]], subjects: list[str]
) -> None:
    index: SubjectIndex[tuple[int, str]] = SubjectIndex()
    known: dict[int, str] = {}
    for number, pattern in changes:
        before = known.pop(number, None)
        if before is not None and before != pattern:
            index.remove(before, number)
        if pattern is not None:
            known[number] = pattern
            index.put(pattern, number, (number, pattern))
        for subject in subjects:
            expected = [one for one in sorted(known.items()) if matches(one[1], subject)]
            assert list(index.candidates(subject)) == expected


class CountedText(str):
    """Text that counts how often it is compared or hashed."""

    __slots__ = ()
    looks: ClassVar[int] = 0

    def __hash__(self) -> int:
        CountedText.looks += 1
        return super().__hash__()

    def __eq__(self, other: object) -> bool:
        CountedText.looks += 1
        return super().__eq__(other)


def test_a_look_up_does_not_grow_with_the_number_of_patterns() -> None:
    """Neither does a change: no other pattern is looked at."""
    steps = []
    for count in (10, 1000):
        index: SubjectIndex[int] = SubjectIndex()
        for number in range(count):
            index.put(CountedText(f"s{number}.*"), number, number)
        CountedText.looks = 0
        assert index.candidates("s7.x") == (7,)
        index.remove(CountedText("s7.*"), 7)
        index.put(CountedText("s7.x"), 7, 7)
        assert index.candidates("s7.x") == (7,)
        steps.append(CountedText.looks)
    assert steps[1] <= 2 * steps[0] < 60
