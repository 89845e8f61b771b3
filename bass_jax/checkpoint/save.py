"""Writes our own checkpoints: weights, ``config.json``, tokenizer and manifest."""

import fcntl
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from os import PathLike
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict

from bass_jax.checkpoint.assemble import Progress
from bass_jax.checkpoint.config_json import read_config_json, without_run_settings, write_config_json
from bass_jax.checkpoint.manifest import WEIGHTS, Manifest, has_manifest
from bass_jax.checkpoint.safetensors import SafetensorsFile, write_safetensors
from bass_jax.checkpoint.tokenizer import Tokenizer, read_tokenizer
from bass_jax.models import Model, quantize_model
from bass_jax.models.families import FAMILIES
from bass_jax.models.model_config import ModelConfig


def save_model(
    directory: str | PathLike[str],
    model: Model,
    *,
    tokenizer: Tokenizer | None = None,
    source: str | None = None,
    license: str | None = None,
    source_sha256: str | None = None,
    shares_embedding: bool = False,
    is_packed: bool = False,
) -> None:
    """Writes a checkpoint to a temporary directory next to `directory`, verifies it and renames it.

    Args:
        directory: replaced if it is a checkpoint.
        model: stored in its own dtype.
        tokenizer: stored with the model. If `shares_embedding`, only its fingerprint is stored.
        source: where the weights came from.
        license: of the weights.
        source_sha256: hash of the file that the weights came from.
        shares_embedding: whether to leave out the array ``embedding``, because it is the target's.
        is_packed: whether to store matrices in INT8 and convert them on loading. The file has half the size of one in
            bfloat16. The loaded model has the dtype of `model`.

    Raises:
        ValueError: if `directory` exists and is not a checkpoint, if the written files differ when they are read
            back, or if `is_packed` and the model has INT8 weights.
    """
    arrays: dict[str, Any] = flatten_dict(quantize_model(model).params if is_packed else model.params, sep="/")
    if shares_embedding:
        del arrays["embedding"]
        arrays.pop("embedding_scale", None)
    if model.output_ids is not None:
        arrays["output_ids"] = model.output_ids
    manifest = Manifest(
        source=source,
        license=license,
        source_sha256=source_sha256,
        shares_embedding=shares_embedding,
        is_packed=is_packed,
        tokenizer_fingerprint=None if tokenizer is None else tokenizer.fingerprint,
    )
    kept = None if shares_embedding else tokenizer
    # A copy, because an array keeps the NumPy array that it was converted into.
    builders = {name: lambda leaf=leaf: np.asarray(jnp.copy(leaf)) for name, leaf in arrays.items()}
    write_checkpoint(Path(directory), arrays, builders, model.config, manifest, kept)


def write_checkpoint(
    directory: Path,
    shapes: Mapping[str, Any],
    builders: Mapping[str, Callable[[], np.ndarray]],
    config: ModelConfig,
    manifest: Manifest,
    tokenizer: Tokenizer | None,
    *,
    replace: bool = True,
    progress: Progress | None = None,
) -> None:
    """Writes a checkpoint one tensor at a time and verifies it before it is moved to `directory`; see `save_model`.

    Args:
        directory: where the checkpoint is moved to.
        shapes: shape and dtype of every tensor, by its path.
        builders: a function per tensor that returns it.
        config: of the model.
        manifest: without the hashes of the files.
        tokenizer: stored if it is not None.
        replace: see `replaced`.
        progress: called after every tensor.

    Raises:
        ValueError: naming the tensor or file, if it differs when it is read back.
    """
    hashes: dict[str, str] = {}

    def build(name: str) -> np.ndarray:
        array = builders[name]()
        hashes[name] = _hash(array)
        if progress is not None:
            progress(len(hashes), len(shapes))
        return array

    with replaced(directory, replace) as partial:
        write_safetensors(partial / WEIGHTS, shapes, build)
        write_config_json(partial, config)
        if tokenizer is not None:
            tokenizer.save(partial)
        manifest.write(partial)
        _verify(partial, hashes, config, tokenizer)


def _hash(array: np.ndarray) -> str:
    """Returns an array's dtype, shape and the SHA-256 of its bytes in row-major order."""
    content = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
    return f"{array.dtype.name} {array.shape} {hashlib.sha256(content).hexdigest()}"


def _verify(partial: Path, hashes: Mapping[str, str], config: ModelConfig, tokenizer: Tokenizer | None) -> None:
    """Compares the written files with what was to be written."""
    file = SafetensorsFile(partial / WEIGHTS)
    for name in sorted(hashes.keys() | file.kinds.keys()):
        if name not in hashes or name not in file.kinds or _hash(file.read(name)) != hashes[name]:
            raise ValueError(f"{partial}: tensor {name!r} differs when it is read back")
    if read_config_json(partial) != without_run_settings(config):
        raise ValueError(f"{partial}: the configuration differs when it is read back")
    if tokenizer is not None and read_tokenizer(partial) != tokenizer:
        raise ValueError(f"{partial}: the tokenizer differs when it is read back")


def save_hugging_face(directory: str | PathLike[str], model: Model, *, tokenizer: Tokenizer | None = None) -> None:
    """Writes a checkpoint in the Hugging Face format: ``config.json``, ``model.safetensors`` and the tokenizer.

    Args:
        directory: must not exist, or be empty.
        model: in its own dtype; bit-equal when read back.
        tokenizer: stored with the model.

    Raises:
        ValueError: if the format cannot express the model: a projected embedding, a trimmed head or INT8 weights.
    """
    from safetensors.numpy import save_file

    config = model.config
    if config.quantize is not None:
        raise ValueError(f"{directory}: quantize={config.quantize!r}: expected a model without INT8 weights")
    is_projected = config.embedding_width is not None and not config.has_output_projection
    if is_projected or config.output_vocab_size is not None:
        raise ValueError(f"{directory}: Hugging Face has no projected embeddings and no trimmed heads")
    family = FAMILIES[config.family]
    params, tensors = flatten_dict(model.params, sep="/"), {}
    for path, rule in family.rules(config).items():
        parts = rule.split(np.asarray(params[path]))
        tensors |= {name: np.ascontiguousarray(part) for name, part in zip(rule.sources, parts, strict=True)}
    with replaced(Path(directory)) as partial:
        text = json.dumps(family.write_config(config) | {"dtype": config.dtype}, indent=2)
        (partial / "config.json").write_text(text + "\n")
        save_file(tensors, partial / "model.safetensors", metadata={"format": "pt"})
        if tokenizer is not None:
            tokenizer.save(partial)


def check_replaceable(directory: Path) -> None:
    """Checks that `directory` may be overwritten.

    Raises:
        ValueError: if `directory` exists, is not empty and has no manifest.
    """
    if not directory.exists() or (directory.is_dir() and not any(directory.iterdir())):
        return
    if not has_manifest(directory):
        raise ValueError(f"{directory}: exists and is not a checkpoint; not overwritten")


@contextmanager
def replaced(directory: Path, replace: bool = True) -> Iterator[Path]:
    """Yields an empty temporary directory and renames it to `directory` if the block succeeds.

    Args:
        directory: an existing checkpoint there is replaced.
        replace: False keeps a checkpoint that another process has written there in the meantime.
    """
    if directory.parent.is_dir():
        _clean_up(directory)
    check_replaceable(directory)
    directory.parent.mkdir(parents=True, exist_ok=True)
    partial = directory.with_name(f".{directory.name}.partial-{os.getpid()}")
    old = directory.with_name(f".{directory.name}.old-{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    with ExitStack() as locks:
        partial.mkdir()
        while not _hold(partial, locks):
            partial.mkdir(exist_ok=True)  # Another process has deleted it.
        try:
            yield partial
            if replace and directory.exists():
                _hold(directory, locks)
                directory.rename(old)
            try:
                partial.rename(directory)
            except OSError:
                if replace or not directory.exists():
                    raise
        finally:
            if old.exists() and not directory.exists():
                old.rename(directory)
            shutil.rmtree(partial, ignore_errors=True)
            shutil.rmtree(old, ignore_errors=True)


def _hold(directory: Path, locks: ExitStack) -> bool:
    """Locks a directory, also if it is renamed later, until `locks` is closed; returns whether it still exists."""
    try:
        locks.callback(os.close, lock := os.open(directory, os.O_RDONLY))
        with suppress(OSError):  # On a file system without locks, nothing is deleted later.
            fcntl.flock(lock, fcntl.LOCK_SH)
        return os.path.samestat(os.fstat(lock), directory.stat())
    except FileNotFoundError:
        return False


def _clean_up(directory: Path) -> None:
    """Deletes temporary directories of killed processes, and renames checkpoints that they had moved back."""
    left = re.compile(rf"\.{re.escape(directory.name)}\.(partial|old)-\d+")
    for path in list(directory.parent.iterdir()):
        if not (match := left.fullmatch(path.name)):
            continue
        # An OSError means that it is locked, deleted or a file, or that the file system has no locks.
        with suppress(OSError), ExitStack() as locks:
            locks.callback(os.close, lock := os.open(path, os.O_RDONLY | os.O_DIRECTORY))
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if match[1] == "old" and not directory.exists():
                path.rename(directory)
            else:
                shutil.rmtree(path, ignore_errors=True)
