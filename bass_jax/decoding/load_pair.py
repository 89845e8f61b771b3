"""Loads a target with its drafter, or makes a pair with random weights."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from bass_jax.decoding.pair import Pair
from bass_jax.drafters import (
    Drafter,
    NgramDrafter,
    RetrievalDrafter,
    find_drafter,
    network_drafter,
    registered_drafters,
)
from bass_jax.drafters.ensemble import ensemble_drafter
from bass_jax.drafters.protocols import check_drafter_object
from bass_jax.drafters.registry import is_drafter_name
from bass_jax.models import Model, preset, random_model
from bass_jax.models.model_config import ModelConfig
from bass_jax.runtime.bundled import find_bundled
from bass_jax.runtime.checks import check_choice, check_kind
from bass_jax.runtime.imports import import_attribute, import_part
from bass_jax.runtime.names import expected_one_of
from bass_jax.sampling.keys import check_key
from bass_jax.typing import Array, Key

PAIR_DRAFTERS = ("draft_model", "eagle", "mtp", "retrieval", "ensemble", "ensemble_eagle")
"""The names of drafters that `load_pair` makes from the files of a pair; `register_drafter` adds others."""


@dataclasses.dataclass(frozen=True)
class ModelOptions:
    """The dtypes, quantization and sharding of a pair.

    Attributes:
        dtype: of parameters and activations, ``"float32"`` or ``"bfloat16"``; None keeps the stored one.
        quantize: of the target: ``"int8"`` or ``"int8_activations"``, as in `ModelConfig`; None keeps the stored one.
        cache_dtype: of the target's cache: ``"int8"``, or None for `dtype`.
        quantize_draft: like `quantize`, for the draft model.
        mesh: devices to shard both models over; see `bass_jax.models.mesh.tensor_parallel_mesh`.
        rules: of the target: logical axis → mesh axis; see `bass_jax.models.sharding`.
        draft_rules: of the draft model; default `rules`. ``{}`` replicates it on every device.
    """

    dtype: str | None = None
    quantize: str | None = None
    cache_dtype: str | None = None
    quantize_draft: str | None = None
    mesh: Mesh | None = None
    rules: dict[str, str] | None = None
    draft_rules: dict[str, str] | None = None

    def __post_init__(self):
        check_choice("dtype", self.dtype, (None, "float32", "bfloat16"))
        for name in ("quantize", "quantize_draft"):
            check_choice(name, getattr(self, name), (None, "int8", "int8_activations"))
        check_choice("cache_dtype", self.cache_dtype, (None, "int8"))
        check_kind("mesh", self.mesh, Mesh | None)

    @property
    def of_draft(self) -> dict[str, Any]:
        """The arguments of `bass_jax.checkpoint.load_draft`."""
        rules = self.rules if self.draft_rules is None else self.draft_rules
        return {"quantize": self.quantize_draft, "mesh": self.mesh, "rules": rules}


def load_pair(
    path: str | Path,
    *,
    drafter: str | Path | Drafter | None = None,
    options: ModelOptions | None = None,
    **changes: Any,
) -> Pair:
    """Loads a target, its drafter and their tokenizer.

    Args:
        path: a pair directory, whose ``manifest.json`` names target and draft, or a checkpoint of a target; see
            `bass_jax.checkpoint.load_model`. The pair ``"checkpoints/quickstart"`` comes with the package. Or
            ``"module:name"`` of a `Pair`, or of a function or class that makes one, with arguments or without.
        drafter: a `Drafter`, a registered name or ``"module:name"``, either with arguments or without (see
            `bass_jax.drafters.find_drafter`), a path, or a name. Names: ``"draft_model"`` (the pair's draft model),
            ``"eagle"`` (the pair's draft that reads the target's hidden states), ``"mtp"`` (the layer for multi-token
            prediction in the target's Hugging Face directory), ``"ngram"`` (prompt lookup), ``"suffix"`` (suffix
            decoding), ``"forced_tokens"`` (of a grammar), ``"early_exit(num_layers=4)"`` (the target's first layers),
            ``"retrieval"`` (the pair's datastore), ``"ensemble"`` (prompt lookup, datastore and draft model) and
            ``"ensemble_eagle"`` (the same with the EAGLE draft). Paths: a draft model, also one with another tokenizer
            (see `bass_jax.drafters.OtherVocabularyDrafter`), a draft head of the `speculators` format, an adapter for
            an early exit, or a ``.safetensors`` datastore. Default: the pair's draft model, or ``"ngram"``.
        options: default ``ModelOptions()``.
        changes: fields of `ModelOptions`, such as ``dtype="float32"``, that replace those of `options`.

    Raises:
        ValueError: if something is missing or does not match the target.
    """
    from bass_jax import checkpoint

    check_kind("path", path, str | Path)
    options = dataclasses.replace(options or ModelOptions(), **changes)
    path = find_bundled(path)
    if isinstance(drafter, str):
        _check_name(drafter)
    elif drafter is not None and not isinstance(drafter, Path):
        check_drafter_object("drafter", drafter)
    if ":" in str(path) and not Path(path).exists():
        pair = import_part(str(path), "path", Pair)
        check_kind(f"path={path!r}", pair, Pair)
        return pair if drafter is None else pair.with_drafter(_drafter_of(drafter, path, pair, None, None, options))
    target_options = {name: getattr(options, name) for name in ("dtype", "quantize", "cache_dtype", "mesh", "rules")}
    draft, datastore = None, None
    if checkpoint.is_pair(path):
        datastore = checkpoint.datastore_of(path)
        target, draft, tokenizer = checkpoint.load_target_and_draft(
            path,
            role="eagle" if drafter in ("eagle", "ensemble_eagle") else "draft",
            quantize_draft=options.quantize_draft,
            draft_rules=options.draft_rules,
            **target_options,
        )
    else:
        target, tokenizer = checkpoint.load_model(path, **target_options), checkpoint.load_tokenizer(path)
    if drafter is None:
        drafter = "ngram" if draft is None else "draft_model"
    pair = Pair(target, NgramDrafter(), tokenizer)
    return pair.with_drafter(_drafter_of(drafter, path, pair, draft, datastore, options))


def _check_name(name: str) -> None:
    """Checks that `name` can be the name or path of a drafter, before models are loaded.

    Raises:
        ValueError: if it is neither.
    """
    if not (name in PAIR_DRAFTERS or is_drafter_name(name) or _is_path(name)):
        names = (*PAIR_DRAFTERS, *registered_drafters())
        raise ValueError(f"drafter={name!r}: {expected_one_of(name, names, "a path or 'module:name'")}")
    if is_drafter_name(name) and ":" in name:
        import_attribute(name.partition("(")[0], "drafter")


def _is_path(name: str) -> bool:
    return Path(name).exists() or "/" in name or name.endswith(".safetensors")


def _drafter_of(
    drafter: str | Path | Drafter,
    path: str | Path,
    pair: Pair,
    draft: Model | None,
    datastore: Path | None,
    options: ModelOptions,
) -> Drafter:
    """Returns the drafter that the argument of `load_pair` is or names, for a pair with the models of `path`."""
    target: Any = pair.target
    if not isinstance(drafter, str | Path):
        return drafter
    if drafter == "mtp":
        from bass_jax.checkpoint import load_native_mtp

        return network_drafter(load_native_mtp(path, target, mesh=options.mesh), target.vocab_size)
    if drafter in PAIR_DRAFTERS:
        return _of_pair(str(drafter), path, target, draft, datastore, pair.tokenizer)
    if isinstance(drafter, str) and is_drafter_name(drafter):
        return find_drafter(drafter, target, pair.tokenizer)
    return _load_drafter(str(drafter), target, pair.tokenizer, options)


def _of_pair(
    name: str, path: str | Path, target: Model, draft: Model | None, datastore: Path | None, tokenizer: Any
) -> Drafter:
    """Returns the drafter of a name in `PAIR_DRAFTERS`."""
    if draft is None and name in ("draft_model", "eagle", "ensemble_eagle"):
        kind = "draft" if name == "draft_model" else "EAGLE draft"
        raise ValueError(f"drafter={name!r}: {path} has no {kind}; expected 'ngram' or the path of a draft")
    network = None if draft is None else network_drafter(draft, target.vocab_size)
    if name in ("draft_model", "eagle"):
        assert network is not None
        return network
    if datastore is None and name == "retrieval":
        raise ValueError(f"drafter={name!r}: {path} has no retrieval datastore; bass-jax build-datastore writes one")
    retrieval = None if datastore is None else load_datastore(datastore, target, tokenizer)
    if name == "retrieval":
        assert retrieval is not None
        return retrieval
    return ensemble_drafter(network, retrieval)


def _load_drafter(path: str, target: Model, tokenizer: Any, options: ModelOptions) -> Drafter:
    from bass_jax import checkpoint

    if path.endswith(".safetensors"):
        return load_datastore(path, target, tokenizer)
    is_adapter, is_head = checkpoint.is_early_exit(path), checkpoint.is_speculator(path)
    if (is_adapter or is_head) and options.quantize_draft is not None:
        kind = "adapter" if is_adapter else "draft head"
        raise ValueError(f"quantize_draft={options.quantize_draft!r}: expected None for the {kind} {path}")
    if is_adapter:
        adapter = checkpoint.load_early_exit(path, target, tokenizer, mesh=options.mesh)
        return network_drafter(adapter, target.vocab_size)
    if is_head:
        head = checkpoint.load_speculator(path, target, vocab_size=tokenizer.vocab_size, mesh=options.mesh)
        return network_drafter(head, target.vocab_size)
    if tokenizer is None:
        raise ValueError(f"drafter={path!r}: expected a pair with a tokenizer, which the draft's is compared with")
    try:
        draft = checkpoint.load_draft(path, target, tokenizer, **options.of_draft)
    except checkpoint.OtherTokenizerError:
        return checkpoint.load_other_vocabulary(path, target, tokenizer, **options.of_draft)
    return network_drafter(draft, target.vocab_size)


def load_datastore(path: str | Path, target: Model, tokenizer: Any = None) -> RetrievalDrafter:
    """Loads a retrieval datastore for a target; see `bass_jax.checkpoint.read_datastore` for errors."""
    from bass_jax.checkpoint import read_datastore

    arrays, about = read_datastore(path, vocab_size=target.vocab_size, tokenizer=tokenizer)
    device_arrays = {name: jnp.asarray(array) for name, array in arrays.items()}
    return RetrievalDrafter(**device_arrays, max_ngram=about["max_ngram"], min_ngram=about["min_ngram"])


def random_pair(
    target: str | ModelConfig,
    draft: str | ModelConfig | None = None,
    *,
    key: Key[Array, ""] | None = None,
    options: ModelOptions | None = None,
    **changes: Any,
) -> Pair:
    """Makes a pair with random weights on the device, to study speed and memory without a checkpoint.

    Args:
        target: a name in `bass_jax.models.PRESETS`, or a configuration.
        draft: the same for the draft model; or a registered drafter or ``"module:name"``, as in `load_pair`. None uses
            the drafter ``"ngram"``.
        key: default ``jax.random.key(0)``.
        options: default ``ModelOptions(dtype="bfloat16")``. The dtype applies to models given by name.
        changes: fields of `ModelOptions` that replace those of `options`.

    Raises:
        ValueError: if there is no preset of that name.
    """
    for name, value in (("target", target), ("draft", draft)):
        kind = str | ModelConfig if name == "target" else str | ModelConfig | None
        check_kind(name, value, kind, "the name of a preset or a ModelConfig")
    options = dataclasses.replace(options or ModelOptions(), **changes)
    keys = jax.random.split(jax.random.key(0) if key is None else check_key(key))

    def make(model, key, rules, **changes):
        config = preset(model, dtype=options.dtype or "bfloat16") if isinstance(model, str) else model
        changes = {name: value for name, value in changes.items() if value is not None}
        return random_model(dataclasses.replace(config, **changes), key, mesh=options.mesh, rules=rules)

    made = make(target, keys[0], options.rules, quantize=options.quantize, cache_dtype=options.cache_dtype)
    if draft is None:
        return Pair(made, NgramDrafter())
    if isinstance(draft, str) and is_drafter_name(draft):
        return Pair(made, find_drafter(draft, made))
    small = make(draft, keys[1], options.of_draft["rules"], quantize=options.quantize_draft)
    return Pair(made, network_drafter(small, made.config.vocab_size))
