"""What a server makes of staged files; no Spark is needed for that."""

from pathlib import Path

import pyarrow as pa
import pytest

from delayserver.pipeline.load import staging
from delayserver.pipeline.load.adoption import Adoption
from delayserver.pipeline.load.staging import BODY, DUE, Stager, StagingTarget
from storage.directory import open_identity
from storage.files import OsFiles
from storage.staging import Manifest, Part, write_manifest
from tests.integration.api_support import ApiServer, now_ms
from tests.pipeline.load.test_staging import plan

SUBJECT = "order.unpaid"


@pytest.mark.timeout(60)
def test_it_is_filed_without_waiting_for_the_next_checkpoint(tmp_path: Path) -> None:
    """An import is adopted when a checkpoint covers it, and the next one may be a while away."""
    server = ApiServer(tmp_path, checkpoint_ms=600_000)
    server.start()
    try:
        # A subject that is new brings a checkpoint by itself.
        known = {"subject": SUBJECT, "delay": "1h"}
        server.ask("POST", "/v1/messages?ack=filed", 201, json=known)
        root = server.data_dir
        files = OsFiles(str(root))
        files.make_directory("imports")
        identity = open_identity(files, random_bytes=None)
        with Adoption(str(server.base_url), "imp") as adoption:
            begun = adoption.begin([SUBJECT])
            assert begun.directory == identity.fingerprint
            target = StagingTarget(str(root), identity.stamp, identity.id_secret, begun.subjects)
            wanted = plan(
                root,
                targets=(target,),
                now_ms=begun.now_ms,
                subject=SUBJECT,
                has_key=False,
                has_headers=False,
            )
            batch = pa.record_batch({DUE: pa.array([now_ms() + 5000]), BODY: pa.array(["1"])})
            outcome = [row for one in Stager(wanted).stage([batch]) for row in one.to_pylist()]
            parts = tuple(
                Part(row["part"], row["bytes"], row["row"], row["checksum"])
                for row in outcome
                if row["kind"] == staging.PART
            )
            write_manifest(files, Manifest("imp", identity.stamp, begun.now_ms, parts))
            assert adoption.adopt().accepted == 1
            assert adoption.follow(lambda done, count: None).state == "adopted"
        assert not list((root / "imports").glob("imp.*"))
    finally:
        server.shut_down()
