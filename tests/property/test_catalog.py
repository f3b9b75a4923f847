"""The catalog against a dict per table, LMDB and in memory."""

import tempfile
from contextlib import ExitStack

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from storage.catalog import Catalog, LmdbCatalog, Table
from tests.world.storage.catalog import MemoryCatalog

MAX_BYTES = 1 << 20
TABLES = (Table.KEYS, Table.CHANGES)

# Few and short keys, so that they meet; all bytes, so that their order counts.
keys = st.binary(min_size=1, max_size=3) | st.sampled_from([b"a", b"ab", b"b", b"\x00", b"\xff"])
values = st.none() | st.binary(max_size=20)
writes = st.dictionaries(
    st.sampled_from(TABLES), st.lists(st.tuples(keys, values), max_size=8), max_size=2
)


class CatalogAgainstDict(RuleBasedStateMachine):
    """What the catalog does in any order of calls, a dict does, too."""

    @initialize(kind=st.sampled_from([LmdbCatalog, MemoryCatalog]))
    def start(self, kind: type[LmdbCatalog] | type[MemoryCatalog]) -> None:
        self.cleanup = ExitStack()
        self.catalog: Catalog
        if issubclass(kind, LmdbCatalog):
            self.path = self.cleanup.enter_context(tempfile.TemporaryDirectory())
            self.catalog = LmdbCatalog(self.path, max_bytes=MAX_BYTES)
        else:
            self.catalog = MemoryCatalog()
        self.model: dict[Table, dict[bytes, bytes]] = {table: {} for table in TABLES}

    @rule(changes=writes)
    def commit(self, changes: dict[Table, list[tuple[bytes, bytes | None]]]) -> None:
        self.catalog.commit(changes)
        for table, pairs in changes.items():
            for key, value in pairs:
                if value is None:
                    self.model[table].pop(key, None)
                else:
                    self.model[table][key] = value

    @rule(table=st.sampled_from(TABLES), key=keys)
    def get(self, table: Table, key: bytes) -> None:
        assert self.catalog.get(table, key) == self.model[table].get(key)

    @rule(
        table=st.sampled_from(TABLES),
        start=st.just(b"") | keys,
        prefix=st.just(b"") | keys,
    )
    def scan(self, table: Table, start: bytes, prefix: bytes) -> None:
        assert list(self.catalog.scan(table, start, prefix=prefix)) == sorted(
            (key, value)
            for key, value in self.model[table].items()
            if key >= start and key.startswith(prefix)
        )

    @rule(
        table=st.sampled_from(TABLES), several=st.lists(keys, max_size=6), length=st.integers(1, 3)
    )
    def look_for_many(self, table: Table, several: list[bytes], length: int) -> None:
        view, model = self.catalog.view(), self.model[table]
        expected = {key: model[key] for key in several if key in model}
        assert view.get_many(table, several) == expected
        prefixes = sorted(key[:length] for key in several if len(key) >= length)
        assert view.prefixes(table, prefixes) == {
            prefix for prefix in prefixes if any(key.startswith(prefix) for key in model)
        }
        view.refresh()

    @rule()
    def open_again(self) -> None:
        if isinstance(self.catalog, MemoryCatalog):
            self.catalog = self.catalog.kill()
        else:
            self.catalog.close()
            self.catalog = LmdbCatalog(self.path, max_bytes=MAX_BYTES)

    @invariant()
    def the_same_in_both(self) -> None:
        if hasattr(self, "model"):
            for table in TABLES:
                assert dict(self.catalog.scan(table)) == self.model[table]

    def teardown(self) -> None:
        if hasattr(self, "catalog"):
            self.catalog.close()
            self.cleanup.close()


CatalogAgainstDict.TestCase.settings = settings(
    max_examples=40, stateful_step_count=20, deadline=None
)
TestCatalogAgainstDict = CatalogAgainstDict.TestCase
