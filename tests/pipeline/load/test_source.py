"""What is known of a table before Spark starts."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from delayserver.cli import make_app
from delayserver.errors import PipelineError
from delayserver.pipeline.load.source import look
from delayserver.pipeline.publish.mapping import MessageColumns

COLUMNS = MessageColumns("due", subject="s", key="key")


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "table.parquet"
    pq.write_table(pa.table({"due": [1], "key": ["a"]}), path)
    return path


def test_a_table_that_will_do(table: Path) -> None:
    look(str(table), None, COLUMNS, ("key",))
    look(str(table.parent), "parquet", COLUMNS, ())


@pytest.mark.parametrize(
    ("columns", "others"),
    [(MessageColumns("due_at", subject="s", key="key"), ()), (COLUMNS, ("shop",))],
)
def test_a_column_that_is_not_there(
    table: Path, columns: MessageColumns, others: tuple[str, ...]
) -> None:
    with pytest.raises(PipelineError, match=r"has no column .*; it has due, key"):
        look(str(table), None, columns, others)


def test_a_table_that_is_not_there_or_none(tmp_path: Path) -> None:
    with pytest.raises(PipelineError, match="there is no"):
        look(str(tmp_path / "no.csv"), None, COLUMNS, ())
    with pytest.raises(PipelineError, match="give --format"):
        look(str(tmp_path / "no.xyz"), None, COLUMNS, ())
    text = tmp_path / "text.parquet"
    text.write_text("no Parquet")
    with pytest.raises(PipelineError, match="cannot read"):
        look(str(text), None, COLUMNS, ())


def test_what_others_see_is_theirs_to_judge() -> None:
    look("s3://bucket/table.parquet", None, COLUMNS, ())
    look("/no/such/*.parquet", None, COLUMNS, ())
    look(None, "jdbc", COLUMNS, ())


def test_a_server_that_is_not_there_is_told_before_spark_starts(
    table: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("delayserver.cli.pipeline_load.PATIENCE_S", 0.0)
    monkeypatch.setattr("delayserver.pipeline.session.open_session", None)
    arguments = ("--input", str(table), "--subject", "s", "--due-column", "due")
    where = ("--server", "http://127.0.0.1:1", "--data-dir", str(table.parent))
    result = CliRunner().invoke(make_app(), ["pipeline", "load", *arguments, *where])
    assert result.exit_code == 2
    assert "no server can be reached" in result.stderr
