"""A target with its drafter and their tokenizer."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from bass_jax.config import ModelConfig
from bass_jax.drafters import Drafter, ModelDrafter, NgramDrafter
from bass_jax.models import Model, preset, random_model
from bass_jax.typing import Array, Key


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
    drafter: str | Drafter | None = None,
    dtype: str | None = None,
    quantize: str | None = None,
    cache_dtype: str | None = None,
    quantize_draft: str | None = None,
    mesh: Mesh | None = None,
    rules: dict[str, str] | None = None,
    draft_rules: dict[str, str] | None = None,
):
    """Loads a target, its drafter and their tokenizer.

    Args:
        path: of a pair (a directory whose ``manifest.json`` names target and draft), or of anything
            `bass_jax.checkpoint.load_model` takes, which then is a target without a draft.
        drafter: ``"model"`` (the pair's own draft), ``"ngram"``, a path of another draft, or a `Drafter`.
            Default the pair's draft where it has one, else ``"ngram"``.
        dtype: of parameters and activations; default as stored.
        quantize: of the target: ``"int8"`` or ``"int8_activations"``, as in `ModelConfig`; default as stored.
        cache_dtype: of the target's cache: ``"int8"``, or None for `dtype`.
        quantize_draft: as `quantize`, of the draft.
        mesh: devices to spread both models over; see `bass_jax.tensor_parallel_mesh`.
        rules: of the target: logical axis → mesh axis; see `bass_jax.models.sharding`.
        draft_rules: of the draft; default `rules`. With ``{}`` every device has the whole draft.

    Returns:
        ``(pair, tokenizer)``.

    Raises:
        ValueError: naming what is missing or does not match, and the command that mends it.
    """
    from bass_jax import checkpoint

    of_target: dict[str, Any] = {
        "dtype": dtype, "quantize": quantize, "cache_dtype": cache_dtype, "mesh": mesh, "rules": rules
    }  # fmt: skip
    if _is_pair(Path(path)):
        target, draft, tokenizer = checkpoint.load_target_and_draft(
            path, quantize_draft=quantize_draft, draft_rules=draft_rules, **of_target
        )
    else:
        target, draft = checkpoint.load_model(path, **of_target), None
        tokenizer = checkpoint.load_tokenizer(path)
    if drafter is None:
        drafter = "ngram" if draft is None else "model"
    if drafter == "model":
        if draft is None:
            raise ValueError(f"drafter='model': {path} has no draft; expected 'ngram' or the path of a draft")
        drafter = ModelDrafter(draft, target.config.vocab_size)
    elif drafter == "ngram":
        drafter = NgramDrafter()
    elif isinstance(drafter, str | Path):
        other = checkpoint.load_draft(
            drafter, target, tokenizer, quantize=quantize_draft, mesh=mesh,
            rules=rules if draft_rules is None else draft_rules,
        )  # fmt: skip
        drafter = ModelDrafter(other, target.config.vocab_size)
    return Pair(target, drafter, tokenizer), tokenizer


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
    keys = jax.random.split(jax.random.key(0) if key is None else key)

    def make(model, key, rules, **changes):
        config = preset(model, dtype=dtype) if isinstance(model, str) else model
        changes = {name: value for name, value in changes.items() if value is not None}
        return random_model(dataclasses.replace(config, **changes), key, mesh=mesh, rules=rules)

    made = make(target, keys[0], rules, quantize=quantize, cache_dtype=cache_dtype)
    if draft is None:
        return Pair(made, NgramDrafter())
    small = make(draft, keys[1], rules if draft_rules is None else draft_rules, quantize=quantize_draft)
    return Pair(made, ModelDrafter(small, made.config.vocab_size))


def _is_pair(path: Path) -> bool:
    """Whether `path` is a directory whose manifest names a target; a checkpoint's manifest does not."""
    from bass_jax.checkpoint.manifest import NAME, read_json

    return (path / NAME).is_file() and "target" in read_json(path / NAME)
