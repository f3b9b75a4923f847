"""The bulk load into several shards: real processes, and calls that go where they belong."""

import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from pyspark.sql import DataFrame, SparkSession

from delayserver.errors import PipelineError
from delayserver.pipeline.audits.audit import audit_here
from delayserver.pipeline.calls import CallRefusedError
from delayserver.pipeline.load.adoption import Adopted, Adoption
from delayserver.pipeline.load.load import LoadJob, run
from delayserver.pipeline.progress import Job
from delayserver.pipeline.publish.mapping import MessageColumns
from delayserver.records.sharding import shard_of
from storage.directory import open_identity
from storage.files import OsFiles
from storage.shards import fix_shard_count, shard_directory
from storage.staging import OnConflict, manifest_path
from tests.integration.api_support import now_ms, unique
from tests.pipeline.cluster import Cluster

SHARDS = 3
DAY_MS = 86_400_000


def make_directory(path: Path) -> Path:
    path.mkdir()
    return path


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    root = tmp_path_factory.mktemp("load")
    fix_shard_count(OsFiles(str(make_directory(root / "data"))), SHARDS)
    for shard in range(SHARDS):
        files = OsFiles(str(make_directory(root / "data" / shard_directory(shard))))
        open_identity(files, random_bytes=random.Random(shard).randbytes, shard=shard)
    cluster = Cluster(root)
    for shard, server in enumerate(cluster.shards):
        # Numbers of subjects differ.
        for number in range(shard):
            server.publish(f"before.{number}", body=1, delay="30d")
    yield cluster
    cluster.close()


@pytest.fixture
def job(spark: SparkSession) -> Job:
    return Job(spark)


@pytest.fixture
def load(cluster: Cluster, tmp_path: Path) -> LoadJob:
    return LoadJob(
        unique("import"),
        cluster.data_dir,
        cluster.url,
        MessageColumns("due", subject=unique("load.subject"), key="key", body="body"),
        rejects=tmp_path / "rejected.jsonl",
        ids=tmp_path / "ids.parquet",
        wait_s=0,
    )


def table(spark: SparkSession, keys: list[str | None]) -> DataFrame:
    due_ms = now_ms() + DAY_MS
    rows = [(due_ms + n, key, f"{n}") for n, key in enumerate(keys)]
    return spark.createDataFrame(rows, "due bigint, key string, body string")


def owner(load: LoadJob, key: str) -> int:
    return shard_of(load.columns.subject or "", key, SHARDS)


def ids(load: LoadJob) -> list[dict[str, Any]]:
    assert load.ids is not None
    rows: list[dict[str, Any]] = pq.read_table(load.ids).to_pylist()
    return rows


def left(load: LoadJob) -> list[Path]:
    """What is left of the staging, above the shards and in them."""
    note = f"{load.id}.load"
    found = load.data_dir.rglob(f"imports/{load.id}.*")
    return sorted(path for path in found if path.name != note)


def refusing(shards: set[int]) -> Callable[[Adoption], Adopted]:
    """Adoptions that do not reach these shards."""
    adopt = Adoption.adopt

    def some(self: Adoption) -> Adopted:
        if any(self._query == f"?shard={shard}" for shard in shards):
            raise PipelineError("planted")
        return adopt(self)

    return some


def test_each_row_goes_to_its_shard(cluster: Cluster, job: Job, load: LoadJob) -> None:
    keys = [f"k{n}" for n in range(60)]
    rows_of_table = table(job.spark, [*keys, *([None] * 60)])
    loaded = run(job, rows_of_table, load)
    assert (loaded.state, loaded.read, loaded.staged) == ("adopted", 120, 120)
    assert (loaded.accepted, loaded.duplicates) == (120, 0)
    rows = ids(load)
    found = {row["key"]: row["id"] for row in rows if row["key"]}
    assert {key: int(found[key][:4], 16) for key in keys} == {key: owner(load, key) for key in keys}
    for key in keys[::7]:
        message = cluster.shards[owner(load, key)].look_up(found[key])
        assert (message["key"], message["body"]) == (key, int(key[1:]))
        by_key = f"/v1/subjects/{load.columns.subject}/keys/{key}"
        assert cluster.shards[owner(load, key)].ask("GET", by_key)["id"] == found[key]
    spread = Counter(int(row["id"][:4], 16) for row in rows if row["key"] is None)
    assert all(abs(count - 20) <= 4 for count in spread.values()) and len(spread) == SHARDS
    for row in rows[::11]:
        cluster.shards[int(row["id"][:4], 16)].look_up(row["id"])
    assert left(load) == []
    again = run(job, rows_of_table, replace(load, ids=None))
    assert (again.was_adopted, again.accepted, again.staged) == (True, 120, 120)
    assert left(load) == []


@pytest.mark.parametrize("away", [{0, 1, 2}, {1}, {2}])
def test_a_run_that_follows_adopts_what_is_missing(
    cluster: Cluster, job: Job, load: LoadJob, away: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = table(job.spark, [f"k{n}" for n in range(40)] + [None] * 20)
    with monkeypatch.context() as patch:
        patch.setattr(Adoption, "adopt", refusing(away))
        with pytest.raises(PipelineError, match=f"--id {load.id}"):
            run(job, rows, load)
    assert left(load)
    if len(away) < SHARDS:
        with pytest.raises(PipelineError, match="it had 60 rows, and has 1"):
            run(job, table(job.spark, ["other"]), load)
    loaded = run(job, rows, load)
    assert (loaded.accepted, loaded.duplicates, loaded.state) == (60, 0, "adopted")
    assert len({row["id"] for row in ids(load)}) == 60
    for row in ids(load):
        message = cluster.shards[int(row["id"][:4], 16)].look_up(row["id"])
        assert message["key" if row["key"] else "subject"] == (row["key"] or load.columns.subject)
    assert left(load) == []


def test_what_was_not_staged_as_a_whole_is_staged_again(
    cluster: Cluster, job: Job, load: LoadJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Adoption, "adopt", refusing({0, 1, 2}))
        with pytest.raises(PipelineError):
            run(job, table(job.spark, [f"k{n}" for n in range(40)]), load)
    (load.data_dir / "imports" / f"{load.id}.load").write_bytes(b"{")
    assert run(job, table(job.spark, ["a", "b", "c"]), load).accepted == 3
    assert left(load) == []


@pytest.mark.parametrize("written", range(1, SHARDS))
def test_a_load_that_ended_between_two_manifests_is_staged_again(
    cluster: Cluster, job: Job, load: LoadJob, monkeypatch: pytest.MonkeyPatch, written: int
) -> None:
    rows = table(job.spark, [f"k{n}" for n in range(40)])
    with monkeypatch.context() as patch:
        patch.setattr(Adoption, "adopt", refusing({0, 1, 2}))
        with pytest.raises(PipelineError):
            run(job, rows, load)
    for shard in range(written, SHARDS):
        (load.data_dir / shard_directory(shard) / manifest_path(load.id)).unlink()
    loaded = run(job, rows, load)
    assert (loaded.accepted, loaded.duplicates, loaded.state) == (40, 0, "adopted")
    assert left(load) == []


def test_a_conflict_refuses_all_rows_of_its_shard(
    cluster: Cluster, job: Job, load: LoadJob
) -> None:
    keys = [f"k{n}" for n in range(30)]
    taken = next(key for key in keys if owner(load, key) == 1)
    server = cluster.shards[0]
    first = server.publish(load.columns.subject or "", key=taken, body="x", delay="2d")["id"]
    rows = table(job.spark, list(keys))
    with pytest.raises(CallRefusedError, match=r"shard 1: .*other content") as caught:
        run(job, rows, load)
    assert caught.value.status == 409
    others = [key for key in keys if owner(load, key) == 1 and key != taken]
    server.ask("GET", f"/v1/subjects/{load.columns.subject}/keys/{others[0]}", 404)
    loaded = run(job, rows, replace(load, on_conflict=OnConflict.KEEP))
    assert (loaded.accepted, loaded.duplicates, loaded.conflicts) == (29, 1, 1)
    assert {row["key"]: row["id"] for row in ids(load)}[taken] == first
    assert left(load) == []


def test_a_conflict_in_the_first_loads_nothing(cluster: Cluster, job: Job, load: LoadJob) -> None:
    keys = [f"k{n}" for n in range(30)]
    taken = next(key for key in keys if owner(load, key) == 0)
    cluster.shards[0].publish(load.columns.subject or "", key=taken, body="x", delay="2d")
    with pytest.raises(CallRefusedError, match="other content"):
        run(job, table(job.spark, list(keys)), load)
    assert left(load) == []
    for shard, server in enumerate(cluster.shards):
        server.ask("GET", f"/v1/imports/{load.id}?shard={shard}", 404)


def test_a_dry_run_and_one_shard_alone(cluster: Cluster, job: Job, load: LoadJob) -> None:
    rows = table(job.spark, [f"k{n}" for n in range(10)])
    loaded = run(job, rows, replace(load, dry_run=True))
    assert (loaded.state, loaded.staged) == ("checked", 10)
    assert left(load) == []
    alone = replace(load, data_dir=load.data_dir / "shard-0001")
    with pytest.raises(PipelineError, match="one shard of several"):
        run(job, rows, alone)


def test_the_audit_beside_them_is_clean(cluster: Cluster, job: Job, load: LoadJob) -> None:
    run(job, table(job.spark, [f"k{n}" for n in range(25)]), load)
    found = audit_here(str(cluster.data_dir))
    assert found.is_clean, (found.violations, found.damage)
    by_subject = {line["name"]: line["pending"] for line in found.of("subject")}
    assert by_subject[load.columns.subject] == 25
