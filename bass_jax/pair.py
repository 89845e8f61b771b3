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


def load_pair(path: str | Path, *, drafter: str | Drafter | None = None, dtype: str | None = None):
    """Loads a target, its drafter and their tokenizer.

    Args:
        path: of a pair (a directory whose ``manifest.json`` names target and draft), or of anything
            `bass_jax.checkpoint.load_model` takes, which then is a target without a draft.
        drafter: ``"model"`` (the pair's own draft), ``"ngram"``, a path of another draft, or a `Drafter`.
            Default the pair's draft where it has one, else ``"ngram"``.
        dtype: of parameters and activations; default as stored.

    Returns:
        ``(pair, tokenizer)``.

    Raises:
        ValueError: naming what is missing or does not match, and the command that mends it.
    """
    from bass_jax import checkpoint

    if _is_pair(Path(path)):
        target, draft, tokenizer = checkpoint.load_target_and_draft(path, dtype=dtype)
    else:
        target, draft = checkpoint.load_model(path, dtype=dtype), None
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
        other = checkpoint.load_draft(drafter, target, tokenizer)
        drafter = ModelDrafter(other, target.config.vocab_size)
    return Pair(target, drafter, tokenizer), tokenizer


def random_pair(
    target: str | ModelConfig,
    draft: str | ModelConfig | None = None,
    *,
    key: Key[Array, ""] | None = None,
    dtype: str = "bfloat16",
    mesh: Mesh | None = None,
    rules: dict[str, str] | None = None,
) -> Pair:
    """Makes a pair of random weights on the device, for studies of speed and memory without a checkpoint.

    Args:
        target: a name of `bass_jax.models.PRESETS`, or a configuration, which keeps its own dtype.
        draft: likewise; None for a target with the drafter ``"ngram"``.
        key: a random key; default ``jax.random.key(0)``.
        dtype: of both models, where they are named.
        mesh: see `bass_jax.models.random_model`.
        rules: see `bass_jax.models.random_model`.

    Raises:
        ValueError: if there is no preset of that name.
    """
    configs = [preset(one, dtype=dtype) if isinstance(one, str) else one for one in (target, draft) if one is not None]
    keys = jax.random.split(jax.random.key(0) if key is None else key)
    models = [random_model(config, own, mesh=mesh, rules=rules) for config, own in zip(configs, keys, strict=False)]
    if draft is None:
        return Pair(models[0], NgramDrafter())
    return Pair(models[0], ModelDrafter(models[1], models[0].config.vocab_size))


def _is_pair(path: Path) -> bool:
    """Whether `path` is a directory whose manifest names a target; a checkpoint's manifest does not."""
    from bass_jax.checkpoint.manifest import NAME, read_json

    return (path / NAME).is_file() and "target" in read_json(path / NAME)
