"""The joint law of a decoder's first tokens: enumerated from the target, and drawn from the compiled loop."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import scipy.stats

import bass_jax as bass
from bass_jax.sampling.keys import row_keys

VOCAB = 5
NUM_TOKENS = 4
NUM_SAMPLES = 200_000
PROMPTS = ([4], [0, 3, 1], [2, 0, 1, 1, 3, 4])
SETTINGS = (
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 3},
    {"temperature": 0.7, "top_p": 0.8},
    {"temperature": 0.7, "min_p": 0.15},
)
OFF = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}


def warp(logits: np.ndarray, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) -> np.ndarray:
    """The law of `logits` ``[..., V]`` in float64, by sorting: temperature, top-k, top-p, min-p.

    Sets that tie at a threshold are kept whole.
    """
    logits = np.asarray(logits, np.float64)
    if temperature == 0:
        return np.eye(logits.shape[-1])[logits.argmax(axis=-1)]
    scaled = (logits - logits.max(axis=-1, keepdims=True)) / temperature
    if top_k:
        smallest = np.sort(scaled, axis=-1)[..., -min(top_k, scaled.shape[-1]), None]
        scaled = np.where(scaled >= smallest, scaled, -np.inf)
    probs = np.exp(scaled)
    probs /= probs.sum(axis=-1, keepdims=True)
    if top_p < 1:
        descending = -np.sort(-probs, axis=-1)
        is_reached = descending.cumsum(axis=-1) >= top_p - 1e-12
        smallest = np.take_along_axis(descending, is_reached.argmax(axis=-1)[..., None], axis=-1)
        probs = np.where(probs >= smallest, probs, 0)
    probs = np.where(probs >= min_p * probs.max(axis=-1, keepdims=True), probs, 0)
    return probs / probs.sum(axis=-1, keepdims=True)


def enumerate_law(target: bass.Model, prompt, setting: dict) -> np.ndarray:
    """The law of every continuation of `prompt`, ``[V ** 4]``: the target, teacher forced, one pass, no cache reuse."""
    prefixes = np.array(list(itertools.product(range(VOCAB), repeat=NUM_TOKENS - 1)), np.int32)
    tokens = np.concatenate([np.tile(np.asarray(prompt, np.int32), (len(prefixes), 1)), prefixes], axis=1)
    positions = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape)
    cache = target.init_cache(len(tokens), 64)
    logits = np.asarray(target.forward(jnp.asarray(tokens), jnp.asarray(positions), cache)[0])
    laws = warp(logits[:, len(prompt) - 1 :], **setting)  # [V**3, 4, V]
    joint = laws[:, -1]
    for i in range(NUM_TOKENS - 1):
        joint = joint * laws[np.arange(len(laws)), i, prefixes[:, i]][:, None]
    return joint.reshape(-1)


class Groups:
    """Rows that share a prompt and a sampling setting; every combination of the two."""

    def __init__(self, target: bass.Model, prompts=PROMPTS, settings=SETTINGS, num_rows: int = 4096):
        self.combinations = list(itertools.product(prompts, settings))
        num = num_rows // len(self.combinations)
        self.rows = [prompt for prompt, _ in self.combinations for _ in range(num)]
        self.of_row = np.repeat(np.arange(len(self.combinations)), num)
        values = [OFF | setting for _, setting in self.combinations]
        self.sampling = bass.Sampling(**{name: np.repeat([v[name] for v in values], num) for name in OFF})
        self.laws = np.stack([enumerate_law(target, *combination) for combination in self.combinations])


@functools.partial(jax.jit, static_argnames=("spec", "step"))
def _first_tokens(pair, state, draft_lens, spec, step):
    """Takes one step per entry of `draft_lens`; returns the first four tokens of each row as one number."""

    def advance(state, wanted):
        return step(pair, state._replace(draft_lens=wanted), spec)[0], None

    state, _ = jax.lax.scan(advance, state, draft_lens)
    columns = state.prompt_lengths[:, None] + jnp.arange(NUM_TOKENS)
    tokens = jnp.take_along_axis(state.tokens, columns, axis=1)
    return tokens @ (VOCAB ** jnp.arange(NUM_TOKENS - 1, -1, -1))


def draw_counts(pair, spec, groups: Groups, *, step=bass.speculate_step, num_samples=NUM_SAMPLES, seed=0) -> np.ndarray:
    """Counts continuations, ``[groups, V ** 4]``.

    Every other row wants a draft length of its own, drawn anew for every step, 0 included.
    """
    state = bass.prefill(pair, groups.rows, spec, sampling=groups.sampling, max_new_tokens=NUM_TOKENS + 6)
    num_rows, num_groups = len(groups.rows), len(groups.combinations)
    lengths = np.random.default_rng(seed).integers(0, spec.draft_len + 1, (NUM_TOKENS, len(state.lengths)))
    lengths[:, ::2] = spec.draft_len
    counts = np.zeros((num_groups, VOCAB**NUM_TOKENS), np.int64)
    for index in range(-(-num_samples // num_rows)):
        key = jax.random.fold_in(jax.random.key(seed), index)
        state = state._replace(keys=row_keys(key, jnp.arange(len(state.lengths), dtype=jnp.uint32)))
        codes = _first_tokens(pair, state, jnp.asarray(lengths, jnp.int32), spec, step)
        np.add.at(counts, (groups.of_row, np.asarray(codes)[:num_rows]), 1)
    return counts


def p_value(counts: np.ndarray, laws: np.ndarray) -> float:
    """Chi-square of all groups together; 0 if anything of probability 0 was drawn.

    Cells expected fewer than 5 times are pooled within their group, where the approximation needs it.
    """
    statistic, freedom = 0.0, 0
    for observed, law in zip(counts, laws, strict=True):
        if observed[law == 0].any():
            return 0.0
        expected = law * observed.sum()
        is_rare = (expected < 5) & (law > 0)
        observed = np.append(observed[expected >= 5], observed[is_rare].sum())
        expected = np.append(expected[expected >= 5], expected[is_rare].sum())
        if expected[-1] < 5:  # Too little even together: into the most probable cell.
            most = expected[:-1].argmax()
            observed[most] += observed[-1]
            expected[most] += expected[-1]
            observed, expected = observed[:-1], expected[:-1]
        statistic += ((observed - expected) ** 2 / expected).sum()
        freedom += len(expected) - 1
    return float(scipy.stats.chi2.sf(statistic, freedom))
