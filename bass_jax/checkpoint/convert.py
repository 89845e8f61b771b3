"""Turns any checkpoint into one of ours, a tensor at a time, going on where a killed run stopped.

Beside the destination, a hidden directory keeps every finished tensor with its hash, and which source it was made
from. It is deleted when the checkpoint is in its place, or when the source turns out to be bad.
"""

import dataclasses
import fcntl
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from bass_jax.checkpoint import manifest as manifest_file
from bass_jax.checkpoint.assemble import Progress, plan
from bass_jax.checkpoint.load import load_model, load_tokenizer, open_source, read_model_config, resolve
from bass_jax.checkpoint.manifest import Manifest, described
from bass_jax.checkpoint.save import check_replaceable, save_model, write_checkpoint
from bass_jax.checkpoint.tokenizer import Tokenizer, has_tokenizer_files
from bass_jax.models import abstract_params
from bass_jax.runtime.files import sha256
from bass_jax.runtime.trees import flatten, unflatten

_WEIGHTS = (".safetensors", ".bin", ".gguf", ".json")
_BLOB = re.compile(r"[0-9a-f]{64}")


def convert(
    source: str | PathLike[str],
    destination: str | PathLike[str],
    *,
    dtype: str | None = None,
    quantize: str | None = None,
    license: str | None = None,
    source_name: str | None = None,
    replace: bool = True,
    progress: Progress | None = None,
) -> None:
    """Turns any checkpoint that `load_model` takes into one of ours, with its tokenizer if it has one.

    A run that was killed goes on when it is repeated: what it had finished is kept if the source's files and its own
    still have the hashes that they had. (A checkpoint of ours as the source is converted at one go.) What was written
    is read back before it takes its place: every tensor must have the hash of what was made of the source.

    Args:
        source: see `load_model`.
        destination: directory to write.
        dtype: to store; default the source's.
        quantize: ``"int8"`` stores matrices as INT8; see `load_model`.
        license: of the weights, for the manifest.
        source_name: of the source, for the manifest; default `source` itself.
        replace: False leaves a checkpoint that another process has put there meanwhile.
        progress: told after every tensor.

    Raises:
        ValueError: as `load_model` and `save_model`; nothing is left at `destination` or beside it then.
    """
    path, directory = resolve(source), Path(destination)
    check_replaceable(directory)
    manifest = Manifest(source=source_name or str(source), license=license)
    with _exclusive(directory.with_name(f".{directory.name}.converting")) as work:
        if not replace and directory.exists():
            return
        if path.is_dir() and (path / manifest_file.NAME).exists():
            _convert_ours(path, directory, dtype, quantize, manifest)
        else:
            _convert_theirs(path, directory, dtype, quantize, manifest, work, progress)


def _convert_ours(path: Path, directory: Path, dtype: str | None, quantize: str | None, manifest: Manifest) -> None:
    model = load_model(path, dtype=dtype, quantize=quantize)
    tokenizer = load_tokenizer(path) if has_tokenizer_files(path) else None
    save_model(directory, model, tokenizer=tokenizer, source=manifest.source, license=manifest.license, verify=True)


def _convert_theirs(
    path: Path,
    directory: Path,
    dtype: str | None,
    quantize: str | None,
    manifest: Manifest,
    work: Path,
    progress: Progress | None,
) -> None:
    hashes = _source_hashes(path)
    source = open_source(path)  # Once: reading a GGUF file's metadata takes seconds.
    config = read_model_config(source)
    config = dataclasses.replace(config, dtype=dtype or config.dtype, quantize=quantize)
    builders, tokenizer = plan(source, config), _tokenizer_of(path, source)
    chunks = _Pieces(work, {"source": hashes, "config": repr(config)})
    for done, (name, build) in enumerate(builders.items()):
        if name not in chunks:
            chunks.write(name, build())
        if progress is not None:
            progress(done + 1, len(builders))
    manifest = dataclasses.replace(
        manifest,
        source_sha256=hashes[path.name] if path.is_file() else None,
        tokenizer_fingerprint=None if tokenizer is None else tokenizer.fingerprint,
    )
    kinds = {name: boxed.value.dtype for name, boxed in flatten(abstract_params(config)).items()}
    tree = {"params": unflatten({name: chunks.read(name, kinds[name]) for name in builders})}
    hashes = {f"params/{name}": chunks.hash(name, kinds[name]) for name in builders}
    write_checkpoint(directory, tree, config, manifest, tokenizer, partial=work / "checkpoint", hashes=hashes)


def _tokenizer_of(path: Path, source: Any) -> Tokenizer | None:
    if has_tokenizer_files(path if path.is_dir() else path.parent):
        return load_tokenizer(path)
    if path.is_dir() or source.field("tokenizer.ggml.model") is None:
        return None
    from bass_jax.checkpoint.gguf_tokenizer import read_gguf_tokenizer

    return read_gguf_tokenizer(source)


def _source_hashes(path: Path) -> dict[str, str]:
    """Hashes the source's files.

    Raises:
        ValueError: naming a file of the Hub's cache that is not what its name there says.
    """
    files = [path] if path.is_file() else sorted(file for file in path.iterdir() if file.suffix in _WEIGHTS)
    hashes = {file.name: sha256(file) for file in files if file.is_file()}
    for file in files:
        blob = file.resolve().name  # The Hub's cache links to files that are named by their hash.
        if file.is_symlink() and _BLOB.fullmatch(blob) and hashes.get(file.name) != blob:
            raise ValueError(f"{file}: damaged: its sha256 is {hashes.get(file.name)}, the Hub says {blob}")
    return hashes


class _Pieces:
    """Finished tensors in a directory, one file each, and a journal of their hashes."""

    def __init__(self, directory: Path, origin: dict[str, Any]):
        """Takes over what an earlier run finished from the same `origin`; drops everything else."""
        self._directory, self._journal = directory, directory / "journal.jsonl"
        lines = _read_journal(self._journal)
        kept = [entry for entry in lines[1:] if lines[0] == origin and self._is_whole(entry)]
        self._entries = {entry["name"]: entry for entry in kept}
        files = {entry["file"] for entry in kept}
        for file in directory.glob("tensor-*"):
            if file.name not in files:
                file.unlink()
        # Anew: a killed run may have left a part of a line.
        self._journal.write_text("".join(json.dumps(line) + "\n" for line in (origin, *kept)))

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def write(self, name: str, array: np.ndarray) -> None:
        """Stores an array, and enters it into the journal when all of it is there."""
        file = self._directory / f"tensor-{name.replace('/', '-')}"
        content = array.reshape(-1).view(np.uint8).data
        file.write_bytes(content)
        digest = hashlib.sha256(content).hexdigest()
        entry = {"name": name, "file": file.name, "shape": array.shape, "sha256": digest}
        with self._journal.open("a") as journal:
            journal.write(json.dumps(entry) + "\n")
        self._entries[name] = entry

    def hash(self, name: str, dtype: np.dtype) -> str:
        """The `hash_array` of an array as it was made."""
        return described(dtype, self._entries[name]["shape"], self._entries[name]["sha256"])

    def read(self, name: str, dtype: np.typing.DTypeLike) -> np.ndarray:
        """Maps an array."""
        entry = self._entries[name]
        return np.asarray(np.memmap(self._directory / entry["file"], dtype, "r", shape=tuple(entry["shape"])))

    def _is_whole(self, entry: dict[str, Any]) -> bool:
        file = self._directory / entry["file"]
        return file.is_file() and sha256(file) == entry["sha256"]


def _read_journal(path: Path) -> list[dict[str, Any]]:
    """Every whole line; a killed run may have left a part of one."""
    entries = []
    for line in path.read_text().splitlines() if path.is_file() else []:
        try:
            entries.append(json.loads(line))
        except ValueError:
            break
    return entries


@contextmanager
def _exclusive(work: Path) -> Iterator[Path]:
    """Holds a directory that one process at a time has; keeps it only if that process is stopped.

    Whatever is wrong with a source will be wrong again, so an error deletes what was made of it.
    """
    while True:
        work.mkdir(parents=True, exist_ok=True)
        lock = os.open(work, os.O_RDONLY)
        fcntl.flock(lock, fcntl.LOCK_EX)
        if work.exists() and os.path.samestat(os.fstat(lock), work.stat()):
            break
        os.close(lock)  # The one before has deleted it.
    try:
        yield work
        shutil.rmtree(work)
    except Exception:
        shutil.rmtree(work, ignore_errors=True)
        raise
    finally:
        os.close(lock)
