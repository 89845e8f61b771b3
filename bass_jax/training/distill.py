"""A distillation in three stages: write the corpus, train the draft and export it, evaluate it."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bass_jax.checkpoint import (
    Tokenizer,
    load_early_exit,
    load_model,
    load_speculator,
    save_early_exit,
    save_model,
    save_speculator,
)
from bass_jax.checkpoint.load import resolve
from bass_jax.drafters import EarlyExitModel
from bass_jax.drafters.eagle.eagle3 import Eagle3Model
from bass_jax.models import Model
from bass_jax.models.model_config import ModelConfig
from bass_jax.runtime.files import write_atomically
from bass_jax.runtime.progress import ProgressBars
from bass_jax.training.agreement import Agreement
from bass_jax.training.corpus import Corpus
from bass_jax.training.data import CorpusRows, corpus_rows, extra_corpora
from bass_jax.training.distill_config import DistillConfig
from bass_jax.training.draft_vocabulary import choose_output_ids, proposed_ids
from bass_jax.training.evaluate import evaluate, write_held_out
from bass_jax.training.init_draft import (
    Draft,
    add_hidden_input,
    add_layers,
    change_output_ids,
    draft_config,
    init_draft,
    init_eagle3,
    init_early_exit,
)
from bass_jax.training.prompts import PromptSource, prompt_source
from bass_jax.training.train_log import TrainProgress
from bass_jax.training.trainer import train
from bass_jax.training.write_corpus import WriteProgress, load_target, write_corpus
from bass_jax.typing import Int

STAGES = ("corpus", "train", "evaluate")
_OUTPUT_IDS = "output_ids.npy"


class Distilled(NamedTuple):
    """The result of a distillation."""

    draft: Draft  # with the target's embedding, float32
    agreements: dict[str, Agreement]  # with greedy answers, by held-out domain
    acceptances: dict[str, dict[float, float]]  # of sampled answers, by held-out domain and temperature
    directory: Path  # the draft's checkpoint; a head's is in the `speculators` format


def distill(config: DistillConfig, *, stages: Sequence[str] = STAGES, show_progress: bool = False) -> Distilled:
    """Writes the corpus, trains and exports the draft, and evaluates it. A second call continues an interrupted one.

    Args:
        config: of the distillation; see `load_distill_config`.
        stages: which to run. Without "train", the draft of the last training checkpoint is exported.
        show_progress: draw progress bars.

    Returns:
        The draft, which is also written to ``output_dir/draft``.

    Raises:
        ValueError: if data are missing, or the training fails.
    """
    if unknown := set(stages) - set(STAGES):
        raise ValueError(f"stages: {sorted(unknown)[0]!r}: expected {', '.join(STAGES)}")
    source = checked_source(config)
    if "corpus" in stages:
        generate_corpus(config, source, show_progress=show_progress)
    target, tokenizer = load_target(config, "float32")
    rows = corpus_rows(config, source, tokenizer)
    draft = new_draft(config, source, rows, target, tokenizer)
    with ProgressBars(is_shown=show_progress) as bars:

        def show(line: TrainProgress) -> None:
            note = f"loss {line.loss:.3f}, agreement {line.agreement:.3f}, {line.tokens_per_second:,.0f} tokens/s"
            bars.update("train", line.step, config.training.num_steps, note)

        draft = train(config, rows, draft, target, progress=show, load_only="train" not in stages)
    directory = Path(config.output_dir) / "draft"
    if isinstance(draft, Eagle3Model):
        save_speculator(directory, draft, target, target_name=config.target, draft_len=config.draft_len)
    elif isinstance(draft, EarlyExitModel):
        save_early_exit(directory, draft, tokenizer=tokenizer, source="bass-jax distill", license="Apache-2.0")
    else:
        export(draft, directory, tokenizer, is_packed=config.is_packed)
    agreements, acceptances = {}, {}
    if "evaluate" in stages and source.held_out():
        held_out = write_held_out(config, source, target, tokenizer)
        # The stored parameters are rounded, so they are read back.
        if isinstance(draft, Eagle3Model):
            stored = load_speculator(directory, target)
            assert isinstance(stored, Eagle3Model)
        elif isinstance(draft, EarlyExitModel):
            stored = load_early_exit(directory, target, tokenizer)
        else:
            stored = load_model(directory, dtype="float32", embedding=draft.params["embedding"])
        agreements, acceptances = evaluate(stored, target, held_out, config.draft_len, config.held_out_temperatures)
        report = {
            name: agreement._asdict() | {"acceptance": acceptances.get(name, {})}
            for name, agreement in agreements.items()
        }
        write_atomically(Path(config.output_dir) / "agreement.json", json.dumps(report, indent=1))
    return Distilled(draft, agreements, acceptances, directory)


def checked_source(config: DistillConfig) -> PromptSource:
    """Makes the prompt source and checks that the other inputs exist, before anything is loaded or generated.

    Raises:
        ValueError: naming what is missing.
    """
    source = prompt_source(config)
    extra_corpora(config)
    if config.draft.start is not None:
        try:
            resolve(config.draft.start)
        except ValueError as error:
            raise ValueError(f"draft.start: {error}") from None
    return source


def generate_corpus(
    config: DistillConfig, source: PromptSource | None = None, *, show_progress: bool = False
) -> Corpus:
    """Runs only the corpus stage, with a target in the rollout's dtype, which is freed when this returns.

    Raises:
        ValueError: as `distill`.
    """
    source = checked_source(config) if source is None else source
    target, tokenizer = load_target(config, config.rollout.dtype)
    with ProgressBars(is_shown=show_progress) as bars:

        def show(line: WriteProgress) -> None:
            bars.update("corpus", line.num_tokens, line.num_wanted, f"{line.tokens_per_second:,.0f} tokens/s")

        return write_corpus(config, source, target, tokenizer, progress=show)


def new_draft(
    config: DistillConfig, source: PromptSource, rows: CorpusRows, target: Model, tokenizer: Tokenizer
) -> Draft:
    """Makes the draft that a training begins with: `draft.start`, or a new one.

    The output vocabulary is chosen once per `output_dir` and stored, so that the corpus may grow.

    Raises:
        ValueError: if the corpus is empty, or `draft.start` has another size.
    """
    shape, target_config = config.draft, target.config
    if shape.kind == "early_exit":
        return init_early_exit(shape, target, jax.random.key(config.seed))
    special = set(tokenizer.special_ids) | set(tokenizer.stop_ids) | set(tokenizer.byte_ids)

    def choose(always: set[int]) -> Int[np.ndarray, "O"]:
        return _output_ids(config, source, rows, tokenizer, target_config.vocab_size, always)

    if shape.start is None:
        has_all = shape.output_vocab_size is None
        output_ids = np.arange(target_config.vocab_size, dtype=np.int32) if has_all else choose(special)
        init = init_eagle3 if shape.is_head else init_draft
        return init(shape, target, output_ids, jax.random.key(config.seed))
    if shape.is_head:
        head = load_speculator(shape.start, target)
        wanted = jax.eval_shape(lambda: init_eagle3(shape, target, proposed_ids(head), jax.random.key(0)))
        if not isinstance(head, Eagle3Model) or (head.config, head.head) != (wanted.config, wanted.head):
            raise ValueError(
                f"draft.start: {shape.start}: expected {wanted.config} and {wanted.head}, found {head.config} and "
                f"{head.head}"
            )
        return head
    draft = load_model(shape.start, dtype="float32", embedding=jnp.asarray(target.params["embedding"], jnp.float32))
    if draft.config.num_layers < shape.num_layers:
        draft = add_layers(draft, shape.num_layers)
    if shape.reads_hidden and draft.config.hidden_width is None:
        draft = add_hidden_input(draft, target_config)
    have, wanted = draft.config.output_vocab_size, shape.output_vocab_size
    if have is not None and wanted is not None and have < wanted:
        draft = change_output_ids(draft, choose(set(proposed_ids(draft).tolist())))
    expected = draft_config(shape, target_config)
    for (name, wanted), found in zip(_sizes(expected).items(), _sizes(draft.config).values(), strict=True):
        if wanted != found:
            raise ValueError(f"draft.start: {shape.start}: {name}={found}: the configuration asks for {wanted}")
    if draft.config != expected:
        raise ValueError(f"draft.start: {shape.start}: made for another target: expected {expected}")
    return draft


def _sizes(config: ModelConfig) -> dict[str, int | None]:
    """Returns the sizes that a `DraftConfig` sets."""
    attention, mlp = config.attentions[0], config.layers[0].mlp
    return {
        "width": config.width,
        "num_layers": config.num_layers,
        "num_heads": attention.num_heads,
        "num_kv_heads": attention.num_kv_heads,
        "head_dim": attention.head_dim,
        "mlp_width": mlp.width,
        "output_vocab_size": config.output_vocab_size,
        "hidden_width": config.hidden_width,
    }


def _output_ids(
    config: DistillConfig,
    source: PromptSource,
    rows: CorpusRows,
    tokenizer: Tokenizer,
    vocab_size: int,
    always: set[int],
) -> Int[np.ndarray, "O"]:
    """Chooses the output vocabulary, or reads the one that was chosen before."""
    path, size = Path(config.output_dir) / _OUTPUT_IDS, config.draft.output_vocab_size
    assert size is not None
    if path.exists():
        output_ids = np.load(path)
        if len(output_ids) != size:
            raise ValueError(f"{path}: {len(output_ids)} tokens; draft.output_vocab_size is {size}")
        return output_ids
    responses = (row.response for row in rows.trained(rows.shards()))
    prompts = (tokenizer.encode(prompt.text) for prompt in source.prompts())
    output_ids = choose_output_ids(responses, prompts, vocab_size=vocab_size, size=size, always=always)
    path.parent.mkdir(parents=True, exist_ok=True)
    np.save(path, output_ids)
    return output_ids


def export(draft: Model, directory: Path, tokenizer: Tokenizer, *, is_packed: bool = False) -> None:
    """Writes a draft in bfloat16, or with matrices in INT8 if `is_packed`, without its target's embedding."""
    params = {name: leaf for name, leaf in draft.params.items() if name != "embedding"}
    stored = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.bfloat16), params)
    stored["embedding"] = draft.params["embedding"]
    save_model(
        directory,
        Model(stored, dataclasses.replace(draft.config, dtype="bfloat16"), draft.output_ids),
        tokenizer=tokenizer,
        source="bass-jax distill",
        license="Apache-2.0",
        shares_embedding=True,
        is_packed=is_packed,
    )
