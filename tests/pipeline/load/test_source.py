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
from storage.directory import open_identity
from storage.files import OsFiles
from tests.integration.api_support import ApiServer, make_token

COLUMNS = MessageColumns("due", subject="s", key="key")


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "table.parquet"
    pq.write_table(pa.table({"due": [1], "key": ["a"]}), path)
    return path


def test_a_table_that_will_do(table: Path) -> None:
    look(str(table), None, {}, COLUMNS, ("key",))
    look(str(table.parent), "parquet", {}, COLUMNS, ())


@pytest.mark.parametrize(
    ("columns", "others"),
    [(MessageColumns("due_at", subject="s", key="key"), ()), (COLUMNS, ("shop",))],
)
def test_a_column_that_is_not_there(
    table: Path, columns: MessageColumns, others: tuple[str, ...]
) -> None:
    with pytest.raises(PipelineError, match=r"has no column .*; it has due, key"):
        look(str(table), None, {}, columns, others)


def test_a_column_that_cannot_be_what_it_is_to_be(tmp_path: Path) -> None:
    path = tmp_path / "table.parquet"
    pq.write_table(pa.table({"due": [1.5], "key": ["a"]}), path)
    with pytest.raises(PipelineError, match="column due is double; a due time is"):
        look(str(path), None, {}, COLUMNS, ())


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("due,key\n1,a\n", {}),
        ('\ufeff"due";key\n1;a\n', {"SEP": ";"}),
        ("due||key\n", {"sep": "||"}),
    ],
)
def test_a_header(tmp_path: Path, text: str, options: dict[str, str]) -> None:
    path = tmp_path / "table.csv"
    path.write_text(text)
    look(str(path), None, options, COLUMNS, ())
    with pytest.raises(PipelineError, match="no column 'shop'; it has due, key"):
        look(str(path), None, options, COLUMNS, ("shop",))


def test_a_file_without_a_header(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_text("1,a\n")
    options = {"header": "false"}
    look(str(path), None, options, MessageColumns("_c0", subject="s", key="_c1"), ())
    with pytest.raises(PipelineError, match="no column 'due'; it has _c0, _c1"):
        look(str(path), None, options, COLUMNS, ())


def test_rows_of_json(tmp_path: Path) -> None:
    path = tmp_path / "table.jsonl"
    path.write_text('{"due": 1}\n{broken\n{"key": "a"}\n')
    look(str(path), None, {}, COLUMNS, ())
    with pytest.raises(PipelineError, match="no column 'shop'; it has due, key"):
        look(str(path), None, {}, COLUMNS, ("shop",))
    # There is more than what is looked at: a key may come later, a due time is in each row.
    path.write_text('{"due": 1}\n' * 1_001)
    look(str(path), None, {}, COLUMNS, ())
    with pytest.raises(PipelineError, match="no column 'due_at'; it has due"):
        look(str(path), None, {}, MessageColumns("due_at", subject="s"), ())


def test_a_table_that_is_not_there_or_none(tmp_path: Path) -> None:
    with pytest.raises(PipelineError, match="there is no"):
        look(str(tmp_path / "no.csv"), None, {}, COLUMNS, ())
    with pytest.raises(PipelineError, match="give --format"):
        look(str(tmp_path / "no.xyz"), None, {}, COLUMNS, ())
    text = tmp_path / "text.parquet"
    text.write_text("no Parquet")
    with pytest.raises(PipelineError, match="cannot read"):
        look(str(text), None, {}, COLUMNS, ())


def test_what_others_see_is_theirs_to_judge() -> None:
    look("s3://bucket/table.parquet", None, {}, COLUMNS, ())
    look("/no/such/*.parquet", None, {}, COLUMNS, ())
    look(None, "jdbc", {}, COLUMNS, ())


def test_a_server_that_is_not_there_is_told_before_spark_starts(
    table: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("delayserver.cli.pipeline_load.PATIENCE_S", 0.0)
    monkeypatch.setattr("delayserver.pipeline.session.open_session", None)
    assert "is not a data directory" in said(table, "http://127.0.0.1:1")
    open_identity(OsFiles(str(table.parent)), random_bytes=bytes)
    assert "no server can be reached" in said(table, "http://127.0.0.1:1")


def test_another_server_and_a_token_that_will_not_do(
    table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("delayserver.pipeline.session.open_session", None)
    (tmp_path / "server").mkdir()
    server = ApiServer(tmp_path / "server")
    token = make_token(server.data_dir, "spark", "publish:*")
    admin = make_token(server.data_dir, "loader", "admin")
    server.start()
    try:
        open_identity(OsFiles(str(table.parent)), random_bytes=bytes)
        url = str(server.base_url)
        assert "Not allowed" in said(table, url, "--token", token)
        told = said(table, url, "--token", admin)
        assert "has another data directory" in told
    finally:
        server.shut_down()


def said(table: Path, url: str, *more: str) -> str:
    """What the command says before Spark starts, in one line."""
    arguments = ("--input", str(table), "--subject", "s", "--due-column", "due")
    where = ("--server", url, "--data-dir", str(table.parent))
    result = CliRunner().invoke(make_app(), ["pipeline", "load", *arguments, *where, *more])
    assert result.exit_code == 2
    text = " ".join(result.stderr.split())
    assert text.count("error") == 1
    return text
