"""The options of `bass_jax.generate` and `bass_jax.stream`."""

import dataclasses
from collections.abc import Sequence

from bass_jax.config import MAX_SAMPLES
from bass_jax.policies import Policy
from bass_jax.runtime.checks import check_flag, check_integer, check_kind, check_sequence
from bass_jax.sampling import SamplingParams
from bass_jax.typing import Array, Key


@dataclasses.dataclass(frozen=True)
class DecodeOptions:
    """How a set of prompts is decoded.

    Attributes:
        sampling: for all rows or per row; default greedy.
        raw: continue prompts that are texts as they are. By default such a prompt is the user's message in the chat
            template of the tokenizer, if it has one, as on the command line. It has no effect on token ids.
        max_new_tokens: for all rows or per row.
        num_samples: rows per prompt.
        key: row i samples with ``fold_in(key, i)``; default ``jax.random.key(0)``.
        seeds: a seed per row, instead of `key`. A row's random numbers then do not depend on its index.
        stop_tokens: a row ends with the first of these tokens; default the tokenizer's.
        stop_strings: a row ends with the token that completes one of these; needs a tokenizer.
        step: ``"speculate"``; ``"decode"`` for regular decoding, the baseline; ``"synchronized"``, see
            `bass_jax.decoding.baselines.synchronized_step`; or ``"exhaustive"``, see
            `bass_jax.decoding.baselines.exhaustive_step`.
        policy: chooses the draft length of every step, instead of ``spec.draft_len``: a `bass_jax.policies.Policy`, its
            name, or ``"module:name"``; ``"auto"`` if neither is given. It does not change greedy tokens or the
            distribution.
        warm_up: compile the steps of all draft lengths before the first step; False compiles them on first use. A
            policy that measures times, such as ``"auto"``, compiles a length when it first chooses it.
        max_batch: the largest number of rows that run at once. Other rows take the slots of finished rows.
        fixed_batch: run all rows as one batch until the last one has finished. BASS's latencies, traces and the
            synchronized baseline are defined on such batches.
        shrink_to: smaller batch sizes that the batch can shrink to when no row is waiting. They are compiled first.
    """

    sampling: SamplingParams | None = None
    raw: bool = False
    max_new_tokens: int | Sequence[int] = 128
    num_samples: int = 1
    key: Key[Array, ""] | None = None
    seeds: Sequence[int] | None = None
    stop_tokens: Sequence[int] | None = None
    stop_strings: Sequence[str] = ()
    step: str = "speculate"
    policy: str | Policy | None = None
    warm_up: bool = True
    max_batch: int = 64
    fixed_batch: bool = False
    shrink_to: Sequence[int] = ()

    def __post_init__(self):
        check_kind("sampling", self.sampling, SamplingParams | None)
        check_integer("num_samples", self.num_samples, 1, MAX_SAMPLES)
        check_flag("raw", self.raw)
        check_flag("warm_up", self.warm_up)
        check_integer("max_batch", self.max_batch, 1)
        check_flag("fixed_batch", self.fixed_batch)
        check_sequence("shrink_to", self.shrink_to, "a sequence of batch sizes")
        for size in self.shrink_to:
            check_integer("shrink_to", size, 1)
