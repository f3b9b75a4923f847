"""What is kept, against a model that is a list."""

import random

import pytest

from storage.kept import ENTRY_BYTES, BoundedCache


@pytest.mark.parametrize("max_count", [None, 1, 4])
def test_what_was_used_last_is_kept(max_count: int | None) -> None:
    rng = random.Random(0)
    max_bytes = 6 * ENTRY_BYTES
    kept: BoundedCache[int, str] = BoundedCache(max_bytes, max_count)
    model: list[tuple[int, str, int]] = []
    sizes = set()
    for step in range(3000):
        key = rng.randrange(12)
        have = next((entry for entry in model if entry[0] == key), None)
        match rng.randrange(3):
            case 0:
                assert kept.get(key) == (have and have[1])
                if have:
                    model.remove(have)
                    model.append(have)
            case 1:
                if have:
                    model.remove(have)
                value_bytes = rng.choice((0, 0, 0, 0, 0, 10, ENTRY_BYTES, 2 * max_bytes))
                kept.put(key, str(step), value_bytes)
                model.append((key, str(step), value_bytes + ENTRY_BYTES))
                while len(model) > 1 and (
                    sum(entry[2] for entry in model) > max_bytes
                    or (max_count and len(model) > max_count)
                ):
                    del model[0]
            case _:
                if rng.random() < 0.2:
                    kept.pop(key)
                    model = [entry for entry in model if entry[0] != key]
        assert list(kept) == [entry[0] for entry in model]
        assert len(kept) == len(model)
        assert kept.total_bytes == sum(entry[2] for entry in model)
        sizes.add((len(model), kept.total_bytes > max_bytes))
    assert (1, True) in sizes
    assert (max_count or 6, False) in sizes
