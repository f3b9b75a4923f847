"""A directory of a machine, as the files of a root of its own."""

import contextlib
from collections.abc import Sequence

from storage.files import FILE_MODE, File, Files


class Below:
    """See `storage.files.Files`."""

    def __init__(self, files: Files, directory: str) -> None:
        """The directory is made."""
        files.make_directory(directory)
        self._files = files
        self._directory = directory
        self.root = f"{files.root}/{directory}"

    def _at(self, path: str) -> str:
        return f"{self._directory}/{path}" if path else self._directory

    def open(self, path: str, *, create: bool = False, mode: int = FILE_MODE) -> File:
        file = self._files.open(self._at(path), create=create, mode=mode)
        file.path = path  # By which checks know what they have seen.
        return file

    def exists(self, path: str) -> bool:
        return self._files.exists(self._at(path))

    def list(self, directory: str) -> list[str]:
        return self._files.list(self._at(directory))

    def rename(self, source: str, target: str) -> None:
        self._files.rename(self._at(source), self._at(target))

    def link(self, source: str, target: str) -> None:
        self._files.link(self._at(source), self._at(target))

    def unlink(self, path: str) -> None:
        self._files.unlink(self._at(path))

    def make_directory(self, path: str) -> None:
        self._files.make_directory(self._at(path))

    def remove_directory(self, path: str) -> None:
        self._files.remove_directory(self._at(path))

    def sync_directory(self, path: str) -> None:
        self._files.sync_directory(self._at(path))

    def sync_all(self, files: Sequence[File]) -> None:
        self._files.sync_all(files)

    def map_to_read(self, path: str) -> memoryview:
        return self._files.map_to_read(self._at(path))

    def scratch(self, length: int) -> memoryview:
        return self._files.scratch(length)

    def free_bytes(self) -> int:
        return self._files.free_bytes()

    def lock(self, path: str) -> contextlib.AbstractContextManager[None]:
        return self._files.lock(self._at(path))
