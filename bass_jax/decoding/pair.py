"""A target with its drafter and their tokenizer."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from bass_jax.drafters import Drafter, NgramDrafter, RetrievalDrafter, network_drafter
from bass_jax.drafters.ensemble import ensemble_drafter
from bass_jax.models import Model, preset, random_model
from bass_jax.models.model_config import ModelConfig
from bass_jax.runtime.checks import check_choice, check_kind
from bass_jax.sampling.keys import check_key
from bass_jax.typing import Array, Key

_NAMED = ("model", "hidden", "ngram", "store", "combined", "combined_hidden")
"""Drafters that `load_pair` knows by name; what else it is asked for is a path."""

_OF_HIDDEN_DRAFT = ("hidden", "combined_hidden")
"""Those of the pair's draft that reads the target's hidden states."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Pair:
    """What `bass_jax.speculate_step` decodes with; passes through `jax.jit` as an argument.

    Attributes:
        target: the model whose distribution is kept.
        drafter: any `bass_jax.drafters.Drafter`.
        tokenizer: of both; hashed by its content, so that equal tokenizers share executables. None when the
            caller handles tokens alone.
    """

    target: Model
    drafter: Drafter
    tokenizer: Any = dataclasses.field(default=None, metadata={"static": True})

    def with_drafter(self, drafter: Drafter) -> "Pair":
        """Returns the same target with another drafter."""
        return dataclasses.replace(self, drafter=drafter)


def load_pair(
    path: str | Path,
    *,
    drafter: str | Path | Drafter | None = None,
    dtype: str | None = None,
    quantize: str | None = None,
    cache_dtype: str | None = None,
    quantize_draft: str | None = None,
    mesh: Mesh | None = None,
    rules: dict[str, str] | None = None,
    draft_rules: dict[str, str] | None = None,
    ahead: Callable[["Pair"], object] | None = None,
):
    """Loads a target, its drafter and their tokenizer.

    Args:
        path: of a pair (a directory whose ``manifest.json`` names target and draft), or of anything
            `bass_jax.checkpoint.load_model` takes, which then is a target without a draft.
        drafter: ``"model"`` (the pair's own draft), ``"hidden"`` (the pair's draft that reads the target's hidden
            states), ``"ngram"`` (prompt lookup), ``"store"`` (the pair's retrieval datastore), ``"combined"`` (lookup
            with the store and the draft that the pair has, see `bass_jax.drafters.ensemble_drafter`),
            ``"combined_hidden"`` (the same with the hidden-state draft), a path of another draft or ``.safetensors``
            store, or a `Drafter`. Default the pair's draft where it has one, else ``"ngram"``.
        dtype: of parameters and activations; default as stored.
        quantize: of the target: ``"int8"`` or ``"int8_activations"``, as in `ModelConfig`; default as stored.
        cache_dtype: of the target's cache: ``"int8"``, or None for `dtype`.
        quantize_draft: as `quantize`, of the draft.
        mesh: devices to spread both models over; see `bass_jax.tensor_parallel_mesh`.
        rules: of the target: logical axis → mesh axis; see `bass_jax.models.sharding`.
        draft_rules: of the draft; default `rules`. With ``{}`` every device has the whole draft.
        ahead: called with the pair while its weights are read, arrays being `jax.ShapeDtypeStruct`: what
            `bass_jax.compile_ahead` compiles then is ready when the weights are. Not called with a mesh, a path as
            `drafter`, or checkpoints of another format than ours.

    Returns:
        ``(pair, tokenizer)``.

    Raises:
        ValueError: naming what is missing or does not match, and the command that mends it.
    """
    from bass_jax import checkpoint

    check_kind("path", path, str | Path)
    check_kind("drafter", drafter, str | Path | Drafter | None, "the name or path of a drafter, a Drafter, or None")
    _check_types(dtype, quantize, cache_dtype, quantize_draft)
    check_kind("mesh", mesh, Mesh | None)
    of_target: dict[str, Any] = {
        "dtype": dtype, "quantize": quantize, "cache_dtype": cache_dtype, "mesh": mesh, "rules": rules
    }  # fmt: skip
    of_draft: dict[str, Any] = {
        "quantize": quantize_draft, "mesh": mesh, "rules": rules if draft_rules is None else draft_rules
    }  # fmt: skip
    store = None

    def made_of(target: Model, draft: Model | None, tokenizer: Any) -> Pair:
        wanted = drafter if drafter is not None else "ngram" if draft is None else "model"
        if isinstance(wanted, str | Path):
            wanted = _find_drafter(str(wanted), path, target, draft, store, tokenizer, of_draft)
        return Pair(target, wanted, tokenizer)

    if not _is_pair(Path(path)):
        pair = made_of(checkpoint.load_model(path, **of_target), None, checkpoint.load_tokenizer(path))
        return pair, pair.tokenizer
    store = checkpoint.datastore_of(path)
    has_path = isinstance(drafter, str | Path) and str(drafter) not in _NAMED
    loaded = checkpoint.load_target_and_draft(
        path, role="hidden_draft" if drafter in _OF_HIDDEN_DRAFT else "draft", quantize_draft=quantize_draft,
        draft_rules=draft_rules, ahead=None if ahead is None or has_path else lambda *shapes: ahead(made_of(*shapes)),
        **of_target,
    )  # fmt: skip
    pair = made_of(*loaded)
    return pair, pair.tokenizer


def load_datastore(path: str | Path, target: Model, tokenizer: Any = None) -> RetrievalDrafter:
    """Loads a retrieval datastore for a target; see `bass_jax.checkpoint.read_datastore` for errors."""
    from bass_jax.checkpoint import read_datastore

    arrays, about = read_datastore(path, vocab_size=target.config.vocab_size, tokenizer=tokenizer)
    device_arrays = {name: jnp.asarray(array) for name, array in arrays.items()}
    return RetrievalDrafter(**device_arrays, max_ngram=about["max_ngram"], min_ngram=about["min_ngram"])


def _find_drafter(
    name: str,
    path: str | Path,
    target: Model,
    draft: Model | None,
    store: Path | None,
    tokenizer,
    of_draft: dict[str, Any],
) -> Drafter:
    """Returns the drafter that `load_pair` was asked for by name or path."""
    vocab_size = target.config.vocab_size
    network = None if draft is None else network_drafter(draft, vocab_size)
    if name == "ngram":
        return NgramDrafter()
    if network is None and name in ("model", *_OF_HIDDEN_DRAFT):
        kind = "hidden-state draft" if name in _OF_HIDDEN_DRAFT else "draft"
        raise ValueError(f"drafter={name!r}: {path} has no {kind}; expected 'ngram' or the path of a draft")
    if network is not None and name in ("model", "hidden"):
        return network
    if name == "store":
        if store is None:
            raise ValueError(f"drafter='store': {path} has no retrieval datastore; bass-jax build-datastore writes one")
        return load_datastore(store, target, tokenizer)
    if name in ("combined", "combined_hidden"):
        return ensemble_drafter(network, None if store is None else load_datastore(store, target, tokenizer))
    if name.endswith(".safetensors"):
        return load_datastore(name, target, tokenizer)
    from bass_jax import checkpoint

    return network_drafter(checkpoint.load_draft(name, target, tokenizer, **of_draft), vocab_size)


def random_pair(
    target: str | ModelConfig,
    draft: str | ModelConfig | None = None,
    *,
    key: Key[Array, ""] | None = None,
    dtype: str = "bfloat16",
    quantize: str | None = None,
    cache_dtype: str | None = None,
    quantize_draft: str | None = None,
    mesh: Mesh | None = None,
    rules: dict[str, str] | None = None,
    draft_rules: dict[str, str] | None = None,
) -> Pair:
    """Makes a pair of random weights on the device, for studies of speed and memory without a checkpoint.

    Args:
        target: a name of `bass_jax.models.PRESETS`, or a configuration, which keeps its own dtype.
        draft: likewise; None for a target with the drafter ``"ngram"``.
        key: a random key; default ``jax.random.key(0)``.
        dtype: of both models, where they are named.
        quantize: see `load_pair`.
        cache_dtype: see `load_pair`.
        quantize_draft: see `load_pair`.
        mesh: see `load_pair`.
        rules: see `load_pair`.
        draft_rules: see `load_pair`.

    Raises:
        ValueError: if there is no preset of that name.
    """
    for name, value in (("target", target), ("draft", draft)):
        kind = str | ModelConfig if name == "target" else str | ModelConfig | None
        check_kind(name, value, kind, "the name of a preset or a ModelConfig")
    _check_types(dtype, quantize, cache_dtype, quantize_draft)
    keys = jax.random.split(jax.random.key(0) if key is None else check_key(key))

    def make(model, key, rules, **changes):
        config = preset(model, dtype=dtype) if isinstance(model, str) else model
        changes = {name: value for name, value in changes.items() if value is not None}
        return random_model(dataclasses.replace(config, **changes), key, mesh=mesh, rules=rules)

    made = make(target, keys[0], rules, quantize=quantize, cache_dtype=cache_dtype)
    if draft is None:
        return Pair(made, NgramDrafter())
    small = make(draft, keys[1], rules if draft_rules is None else draft_rules, quantize=quantize_draft)
    return Pair(made, network_drafter(small, made.config.vocab_size))


def _check_types(dtype: Any, quantize: Any, cache_dtype: Any, quantize_draft: Any) -> None:
    check_choice("dtype", dtype, (None, "float32", "bfloat16"))
    for name, value in (("quantize", quantize), ("quantize_draft", quantize_draft)):
        check_choice(name, value, (None, "int8", "int8_activations"))
    check_choice("cache_dtype", cache_dtype, (None, "int8"))


def _is_pair(path: Path) -> bool:
    """Whether `path` is a directory whose manifest names a target; a checkpoint's manifest does not."""
    from bass_jax.checkpoint.manifest import NAME
    from bass_jax.runtime.files import read_json

    return (path / NAME).is_file() and "target" in read_json(path / NAME)
