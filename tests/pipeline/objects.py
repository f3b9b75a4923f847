"""An object store that speaks S3, as a program of its own on loopback."""

from pathlib import Path

import httpx

from tests.sinks.programs import Program

SCRIPT = Path(__file__).parents[2] / "scripts" / "s3"
BUCKET = "delays"


class ObjectStore(Program):
    """It has one bucket."""

    def command(self) -> list[str]:
        return [str(SCRIPT), str(self.port)]

    def make_bucket(self) -> None:
        httpx.put(f"http://127.0.0.1:{self.port}/{BUCKET}").raise_for_status()

    def url(self, path: str, bucket: str = BUCKET) -> str:
        return (
            f"s3://any:any@{bucket}/{path}?scheme=http"
            f"&endpoint_override=127.0.0.1:{self.port}&region=us-east-1"
        )
