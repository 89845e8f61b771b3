"""The manifest of a checkpoint: where its weights came from, and the hash of every file."""

import contextlib
import dataclasses
import json
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bass_jax.runtime.files import read_json, sha256

FORMAT = "bass_jax checkpoint"
VERSION = 3
NAME = "manifest.json"
WEIGHTS = "model.safetensors"


@dataclasses.dataclass(frozen=True)
class Manifest:
    """The content of a checkpoint's ``manifest.json``.

    Attributes:
        source: where the weights came from: a package and file, a path, a Hub id or a training command.
        license: license of the weights.
        source_sha256: hash of the source, if it was one file.
        shares_embedding: whether the array ``embedding`` is not stored, because it is the target's.
        is_packed: whether matrices are stored in INT8, although the configuration has no quantization. They are
            converted to the model's dtype while they are read.
        tokenizer_fingerprint: of the tokenizer that the model was trained with.
        files: hash of every other file, by its path inside the directory.
    """

    source: str | None = None
    license: str | None = None
    source_sha256: str | None = None
    shares_embedding: bool = False
    is_packed: bool = False
    tokenizer_fingerprint: str | None = None
    files: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def write(self, directory: Path) -> None:
        """Hashes the files in `directory` and writes the manifest to it."""
        files = [path for path in directory.rglob("*") if path.is_file() and path.name != NAME]
        hashes = {path.relative_to(directory).as_posix(): sha256(path) for path in sorted(files)}
        content = {"format": FORMAT, "version": VERSION} | dataclasses.asdict(dataclasses.replace(self, files=hashes))
        (directory / NAME).write_text(json.dumps(content, indent=2) + "\n")

    @contextlib.contextmanager
    def verifying(self, directory: Path) -> Iterator[None]:
        """Compares the hashes of all files in threads, while the ``with`` block reads the files.

        Raises:
            ValueError: naming a file that is missing or has another hash, or the weights if they are not listed. It
                replaces an error of the block.
        """
        if WEIGHTS not in self.files:
            raise ValueError(f"{directory / WEIGHTS}: not in {NAME}")
        with ThreadPoolExecutor(4) as pool:
            checks = [pool.submit(_verify_file, directory / name, digest) for name, digest in self.files.items()]
            try:
                yield
            finally:
                for check in checks:
                    check.result()


def has_manifest(path: Path) -> bool:
    """Returns whether `path` is a directory with a manifest: one of our checkpoints, or a pair."""
    return (path / NAME).is_file()


def read_manifest(directory: Path) -> Manifest:
    """Reads and checks the manifest of a checkpoint, but not the files that it lists.

    Raises:
        ValueError: naming the file and the key, if it is no manifest of this version.
    """
    path = directory / NAME
    content = read_json(path)
    if content.pop("format", None) != FORMAT:
        raise ValueError(f"{path}: not a manifest of a bass_jax checkpoint")
    if (version := content.pop("version", None)) != VERSION:
        raise ValueError(f"{path}: version={version!r}: this release reads version {VERSION}; convert the model again")
    known = {field.name for field in dataclasses.fields(Manifest)}
    if unknown := sorted(set(content) - known):
        raise ValueError(f"{path}: unknown key {unknown[0]!r}")
    for name in ("source", "license", "source_sha256", "tokenizer_fingerprint"):
        if not isinstance(content.get(name), str | None):
            raise ValueError(f"{path}: {name}={content[name]!r}: expected a string")
    for name in ("shares_embedding", "is_packed"):
        if not isinstance(flag := content.get(name, False), bool):
            raise ValueError(f"{path}: {name}={flag!r}: expected true or false")
    files = content.get("files")
    if not isinstance(files, dict) or not all(isinstance(digest, str) for digest in files.values()):
        raise ValueError(f"{path}: files: expected a hash per file")
    return Manifest(**content)


def _verify_file(path: Path, expected: str) -> None:
    try:
        found = sha256(path)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    if found != expected:
        raise ValueError(f"{path}: damaged: its sha256 is {found}, the manifest says {expected}")
