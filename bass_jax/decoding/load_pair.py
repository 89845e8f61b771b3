"""Loads a target with its drafter, or makes a pair with random weights."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from bass_jax.decoding.pair import Pair
from bass_jax.drafters import Drafter, NgramDrafter, RetrievalDrafter, SuffixDrafter, network_drafter
from bass_jax.drafters.ensemble import ensemble_drafter
from bass_jax.models import Model, preset, random_model
from bass_jax.models.model_config import ModelConfig
from bass_jax.runtime.bundled import find_bundled
from bass_jax.runtime.checks import check_choice, check_kind
from bass_jax.runtime.imports import import_attribute
from bass_jax.runtime.names import expected_one_of
from bass_jax.sampling.keys import check_key
from bass_jax.typing import Array, Key

DRAFTERS = ("draft_model", "eagle", "ngram", "suffix", "retrieval", "ensemble", "ensemble_eagle")
"""The names of drafters in `load_pair`."""


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
            `bass_jax.checkpoint.load_model`. The pair ``"checkpoints/quickstart"`` comes with the package.
        drafter: a name, a path, ``"module:name"`` of a `Drafter`, or a `Drafter`. Names: ``"draft_model"`` (the pair's
            draft model), ``"eagle"`` (the pair's draft that reads the target's hidden states), ``"ngram"`` (prompt
            lookup), ``"suffix"`` (suffix decoding), ``"retrieval"`` (the pair's datastore), ``"ensemble"`` (prompt
            lookup, datastore and draft model) and ``"ensemble_eagle"`` (the same with the EAGLE draft). Paths: a draft
            model, a draft head of the `speculators` format, or a ``.safetensors`` datastore. Default: the pair's draft
            model; ``"ngram"`` if there is none.
        options: default ``ModelOptions()``.
        changes: fields of `ModelOptions`, such as ``dtype="float32"``, that replace those of `options`.

    Raises:
        ValueError: if something is missing or does not match the target.
    """
    from bass_jax import checkpoint

    check_kind("path", path, str | Path)
    check_kind("drafter", drafter, str | Path | Drafter | None, "the name or path of a drafter, a Drafter, or None")
    options = dataclasses.replace(options or ModelOptions(), **changes)
    path = find_bundled(path)
    if isinstance(drafter, str):
        drafter = _resolve(drafter)
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
    if isinstance(drafter, str) and drafter in DRAFTERS:
        drafter = _named(drafter, path, target, draft, datastore, tokenizer)
    elif isinstance(drafter, str | Path):
        drafter = _load_drafter(str(drafter), target, tokenizer, options)
    return Pair(target, drafter, tokenizer)


def _resolve(name: str) -> str | Drafter:
    """Returns the drafter of ``"module:name"``, or `name` if it is a known name or a path.

    Raises:
        ValueError: if it is none of these.
    """
    is_path = Path(name).exists() or "/" in name or name.endswith(".safetensors")
    if name in DRAFTERS or is_path:
        return name
    if ":" not in name:
        raise ValueError(f"drafter={name!r}: {expected_one_of(name, DRAFTERS, "a path or 'module:name'")}")
    found = import_attribute(name, "drafter")
    check_kind(f"drafter={name!r}", found, Drafter, "an object with init, propose and commit")
    return found


def _named(
    name: str, path: str | Path, target: Model, draft: Model | None, datastore: Path | None, tokenizer: Any
) -> Drafter:
    """Returns the drafter of a name in `DRAFTERS`."""
    if name in ("ngram", "suffix"):
        return NgramDrafter() if name == "ngram" else SuffixDrafter()
    if draft is None and name in ("draft_model", "eagle", "ensemble_eagle"):
        kind = "draft" if name == "draft_model" else "EAGLE draft"
        raise ValueError(f"drafter={name!r}: {path} has no {kind}; expected 'ngram' or the path of a draft")
    network = None if draft is None else network_drafter(draft, target.config.vocab_size)
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
    if checkpoint.is_speculator(path):
        if options.quantize_draft is not None:
            raise ValueError(f"quantize_draft={options.quantize_draft!r}: expected None for the draft head {path}")
        head = checkpoint.load_speculator(path, target, vocab_size=tokenizer.vocab_size, mesh=options.mesh)
        return network_drafter(head, target.config.vocab_size)
    draft = checkpoint.load_draft(path, target, tokenizer, **options.of_draft)
    return network_drafter(draft, target.config.vocab_size)


def load_datastore(path: str | Path, target: Model, tokenizer: Any = None) -> RetrievalDrafter:
    """Loads a retrieval datastore for a target; see `bass_jax.checkpoint.read_datastore` for errors."""
    from bass_jax.checkpoint import read_datastore

    arrays, about = read_datastore(path, vocab_size=target.config.vocab_size, tokenizer=tokenizer)
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
        draft: the same for the draft model; None uses the drafter ``"ngram"``.
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
    small = make(draft, keys[1], options.of_draft["rules"], quantize=options.quantize_draft)
    return Pair(made, network_drafter(small, made.config.vocab_size))
