"""A distillation from prompts to a draft on disk: corpus, training, export, evaluation."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bass_jax.checkpoint import Tokenizer, load_model, save_model
from bass_jax.models import Model
from bass_jax.training.agreement import Agreement
from bass_jax.training.corpus import write_whole
from bass_jax.training.data import CorpusRows, corpus_rows
from bass_jax.training.distill_config import DistillConfig, load_config
from bass_jax.training.draft_vocabulary import choose_output_ids, proposed_ids
from bass_jax.training.held_out import evaluate, evaluate_sampled, write_held_out
from bass_jax.training.init_draft import draft_config, init_draft, with_hidden, with_layers, with_output_ids
from bass_jax.training.progress import DistillProgress
from bass_jax.training.prompts import build_prompts
from bass_jax.training.questions import questions_directory
from bass_jax.training.trainer import train
from bass_jax.training.write_corpus import load_target, write_corpus
from bass_jax.typing import Int

_OUTPUT_IDS = "output_ids.npy"


class Distilled(NamedTuple):
    """What a distillation leaves.

    Attributes:
        draft: with the target's embedding, float32.
        agreements: by held-out domain.
        acceptances: of sampled answers, by held-out domain and temperature.
        directory: the draft's checkpoint.
    """

    draft: Model
    agreements: dict[str, Agreement]
    acceptances: dict[str, dict[float, float]]
    directory: Path


def run_distill(
    config_path: str | Path,
    overrides: Mapping[str, Any] | None = None,
    *,
    stages: tuple[str, ...] = ("corpus", "train", "evaluate"),
    show_progress: bool = True,
) -> Distilled:
    """Runs a configuration file; a second run goes on where the first was interrupted.

    Args:
        config_path: YAML; see `DistillConfig`.
        overrides: dotted path to value.
        stages: which to run: the corpus may be written elsewhere (see `run_corpus`), or still be growing.
        show_progress: draw a progress bar.

    Returns:
        The draft, also written to ``output_dir/draft``.

    Raises:
        ValueError: one line that names what is wrong with the configuration, the data or the training.
    """
    config = load_config(config_path, overrides)
    if unknown := set(stages) - {"corpus", "train", "evaluate"}:
        raise ValueError(f"stages: {sorted(unknown)[0]!r}: expected corpus, train or evaluate")
    with DistillProgress(config, is_shown=show_progress) as progress:
        return distill(config, stages=stages, progress=progress)


def run_corpus(
    config_path: str | Path, overrides: Mapping[str, Any] | None = None, *, show_progress: bool = True
) -> Path:
    """Writes the corpus of a configuration file and nothing else; returns its directory.

    Raises:
        ValueError: as `run_distill`.
    """
    config = load_config(config_path, overrides)
    with DistillProgress(config, is_shown=show_progress) as progress:
        return _written_corpus(config, progress)


def distill(
    config: DistillConfig,
    *,
    stages: tuple[str, ...] = ("corpus", "train", "evaluate"),
    progress: DistillProgress | None = None,
) -> Distilled:
    """Writes the corpus, trains on it, exports the draft and measures it; see `run_distill`."""
    if "corpus" in stages:
        _written_corpus(config, progress)
    target, tokenizer = load_target(config, "float32")
    rows = corpus_rows(config, tokenizer)
    draft = new_draft(config, rows, target, tokenizer)
    # Without the stage, the last snapshot is what is exported.
    draft = train(
        config, rows, draft, target=target, progress=progress and progress.trained, is_over="train" not in stages
    )
    directory = Path(config.output_dir) / "draft"
    export(draft, directory, tokenizer, is_packed=config.is_packed)
    agreements, acceptances = {}, {}
    if "evaluate" in stages and config.prompts.held_out:
        held_out = write_held_out(config, target, tokenizer)
        # What was written, which is rounded.
        written = load_model(directory, dtype="float32", embedding=draft.params["embedding"])
        agreements = evaluate(written, held_out, config.draft_len)
        acceptances = evaluate_sampled(written, target, held_out, config.held_out_temperatures)
        report = {
            name: agreement._asdict() | {"acceptance": acceptances.get(name, {})}
            for name, agreement in agreements.items()
        }
        write_whole(Path(config.output_dir) / "agreement.json", json.dumps(report, indent=1).encode())
    return Distilled(draft, agreements, acceptances, directory)


def _written_corpus(config: DistillConfig, progress: DistillProgress | None) -> Path:
    """The target in the rollout's dtype is dropped with the frame."""
    model, tokenizer = load_target(config, config.rollout.dtype)
    return write_corpus(config, model, tokenizer, progress=progress and progress.wrote).directory


def new_draft(config: DistillConfig, rows: CorpusRows, target: Model, tokenizer: Tokenizer) -> Model:
    """Makes the draft that a configuration's training begins with.

    The output vocabulary is counted once per ``output_dir`` and kept, so that a corpus may grow.

    Raises:
        ValueError: if the corpus is empty or holds held-out prompts, or `draft.start` has another shape.
    """
    if config.draft.start is not None:
        return _started(config, rows, target, tokenizer)
    if config.draft.output_vocab_size is None:
        output_ids = np.arange(target.config.vocab_size, dtype=np.int32)
    else:
        output_ids = _chosen_ids(config, rows, tokenizer, target.config.vocab_size, _always(tokenizer))
    return init_draft(config.draft, target, output_ids, jax.random.key(config.seed))


def _chosen_ids(
    config: DistillConfig, rows: CorpusRows, tokenizer: Tokenizer, vocab_size: int, always: set[int]
) -> Int[np.ndarray, "O"]:
    """Counts the output vocabulary, or reads what was counted before."""
    path = Path(config.output_dir) / _OUTPUT_IDS
    size = config.draft.output_vocab_size
    assert size is not None
    if path.exists():
        output_ids = np.load(path)
        if len(output_ids) != size:
            raise ValueError(f"{path}: {len(output_ids)} tokens; draft.output_vocab_size is {size}")
        return output_ids
    prompts = build_prompts(config.prompts, config.seed, questions_directory(config)).prompts
    output_ids = choose_output_ids(
        (row.response for row in rows.trained(rows.shards())), (tokenizer.encode(prompt.text) for prompt in prompts),
        vocab_size=vocab_size, size=size, always=always,
    )  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    np.save(path, output_ids)
    return output_ids


def _started(config: DistillConfig, rows: CorpusRows, target: Model, tokenizer: Tokenizer) -> Model:
    """Loads the draft that a training goes on from, and gives it what it lacks: layers, hidden states, tokens."""
    path = str(config.draft.start)
    draft = load_model(path, dtype="float32", embedding=jnp.asarray(target.params["embedding"], jnp.float32))
    if draft.config.num_layers < config.draft.num_layers:
        draft = with_layers(draft, config.draft.num_layers)
    if config.draft.reads_hidden and draft.config.hidden_width is None:
        draft = with_hidden(draft, target.config)
    have, wanted = draft.config.output_vocab_size, config.draft.output_vocab_size
    if have is not None and wanted is not None and have < wanted:
        always = set(proposed_ids(draft).tolist())
        draft = with_output_ids(draft, _chosen_ids(config, rows, tokenizer, target.config.vocab_size, always))
    expected = draft_config(config.draft, target.config)
    for field in dataclasses.fields(expected):
        wanted, found = getattr(expected, field.name), getattr(draft.config, field.name)
        if wanted != found:
            raise ValueError(f"draft.start: {path}: {field.name}={found}: the configuration asks for {wanted}")
    return draft


def export(draft: Model, directory: Path, tokenizer: Tokenizer, *, is_packed: bool = False) -> None:
    """Writes a draft in bfloat16, its matrices in INT8 if it is packed, without the embedding that is its target's."""
    params = {name: leaf for name, leaf in draft.params.items() if name != "embedding"}
    stored = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.bfloat16), params)
    stored["embedding"] = draft.params["embedding"]
    config = dataclasses.replace(draft.config, dtype="bfloat16")
    save_model(
        directory, Model(stored, config, draft.output_ids), tokenizer=tokenizer, source="bass-jax distill",
        license="Apache-2.0", shares_embedding=True, is_packed=is_packed,
    )  # fmt: skip


def _always(tokenizer: Tokenizer) -> set[int]:
    """Tokens that a draft must be able to propose: specials, stops and single bytes."""
    return set(tokenizer.special_ids) | set(tokenizer.stop_ids) | set(tokenizer.byte_ids)
