"""The manifest of a checkpoint: where it came from, and the hash of every file in it."""

import dataclasses
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bass_jax.runtime.files import read_json, sha256

FORMAT = "bass_jax checkpoint"
VERSION = 2
NAME = "manifest.json"
WEIGHTS = "model.safetensors"


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What a checkpoint directory says of itself.

    Attributes:
        source: where the weights came from: a package and file, a path, a Hub id, a training command.
        license: of the weights.
        source_sha256: hash of the source file, when it was one file.
        shares_embedding: the array ``embedding`` is not stored: it is the target's.
        is_packed: matrices are stored in INT8, as `ModelConfig.quantize` would have them, and widened as they are read.
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
        """Hashes what `directory` holds and writes the manifest into it."""
        files = [path for path in directory.rglob("*") if path.is_file() and path.name != NAME]
        hashes = {path.relative_to(directory).as_posix(): sha256(path) for path in sorted(files)}
        content = {"format": FORMAT, "version": VERSION} | dataclasses.asdict(dataclasses.replace(self, files=hashes))
        (directory / NAME).write_text(json.dumps(content, indent=2) + "\n")

    def verify(self, directory: Path) -> None:
        """Hashes every file.

        Raises:
            ValueError: naming a file that is missing or not what was written, or the weights if they are not listed.
        """
        if WEIGHTS not in self.files:
            raise ValueError(f"{directory / WEIGHTS}: not in {NAME}")
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda item: _verify_file(directory / item[0], item[1]), self.files.items()))


def read_manifest(directory: Path) -> Manifest:
    """Reads and checks a checkpoint's manifest, not its files.

    Raises:
        ValueError: naming the file and the key, if it is not a manifest of this version.
    """
    path = directory / NAME
    content = read_json(path)
    if content.pop("format", None) != FORMAT:
        raise ValueError(f"{path}: not a manifest of a bass_jax checkpoint")
    if (version := content.pop("version", None)) != VERSION:
        raise ValueError(f"{path}: version={version!r}: this release reads version {VERSION}")
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
