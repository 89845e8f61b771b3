"""Counts a target's outputs into a retrieval datastore."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bass_jax.checkpoint import load_tokenizer
from bass_jax.checkpoint.datastore_file import write_datastore
from bass_jax.drafters.retrieval import suffix_hashes
from bass_jax.training.agreement import Agreement, agreement_of
from bass_jax.training.corpus import Corpus
from bass_jax.training.data import corpus_rows
from bass_jax.training.distill_config import DistillConfig
from bass_jax.training.held_out import HELD_OUT, held_out_groups
from bass_jax.training.rollout import Rollout
from bass_jax.training.write_corpus import target_path
from bass_jax.typing import Float, Int, UInt

_SAME = 32
"""A longer context that foresees the same token, no more than this many 255ths surer or less sure, is left out."""


class DatastoreArrays(NamedTuple):
    """What a `bass_jax.drafters.RetrievalDrafter` holds, in NumPy."""

    keys: UInt[np.ndarray, "E"]
    tokens: Int[np.ndarray, "E"] | UInt[np.ndarray, "E"]
    confidence: UInt[np.ndarray, "E"]


class _Contexts(NamedTuple):
    """Distinct contexts of one length, ascending by hash: what they foresee, with what is left out of the store."""

    hashes: np.ndarray  # [c] uint32
    tokens: np.ndarray  # [c] int32
    confidence: np.ndarray  # [c] uint8
    num_seen: np.ndarray  # [c] int64, of the token


class BuiltDatastore(NamedTuple):
    """What building a store leaves.

    Attributes:
        num_entries: contexts in the file.
        num_tokens: response tokens that were counted.
        agreements: by held-out domain, of the store by itself; empty where no held-out answers were written.
    """

    num_entries: int
    num_tokens: int
    agreements: dict[str, Agreement]


def distill_datastore(
    config: DistillConfig, path: Path, *, max_ngram: int = 4, min_ngram: int = 1, max_entries: int = 1_600_000
) -> BuiltDatastore:
    """Builds a store from a distillation's corpus, writes it, and measures it on the held-out answers.

    Args:
        config: whose corpus is written; prompts that overlap the held-out ones are left out, as in training.
        path: of the file.
        max_ngram: see `build_datastore`.
        min_ngram: see `build_datastore`.
        max_entries: see `build_datastore`.

    Raises:
        ValueError: as `build_datastore`; if there is no corpus, or it overlaps the held-out prompts.
    """
    target_file = target_path(config.target)
    tokenizer = load_tokenizer(target_file)
    rows = corpus_rows(config, tokenizer)
    trained = rows.trained(rows.shards())
    lengths = {"max_ngram": max_ngram, "min_ngram": min_ngram}
    arrays = build_datastore(trained, max_entries=max_entries, **lengths)
    num_tokens = sum(len(row.response) for row in trained)
    about = {"target": config.target, "num_rollouts": len(trained), "num_tokens": num_tokens}
    write_datastore(
        path, arrays._asdict(), **lengths, vocab_size=tokenizer.vocab_size, tokenizer=tokenizer, about=about
    )
    agreements = {}
    if (directory := config.corpus_root / HELD_OUT).is_dir():
        for (name, _), answers in held_out_groups(Corpus(directory), is_sampled=False):
            found = [_foreseen(arrays, row, lengths) for row in answers]
            agreements[name] = agreement_of(found, config.draft_len)
    return BuiltDatastore(len(arrays.keys), num_tokens, agreements)


def _foreseen(arrays: DatastoreArrays, row: Rollout, lengths: dict[str, int]) -> np.ndarray:
    """Where the store alone would have drafted the answer's token."""
    drafts, _ = foresee(arrays, np.concatenate([row.prompt, row.response]), len(row.prompt), **lengths)
    return drafts == row.response


def build_datastore(
    rollouts: Iterable[Rollout], *, max_ngram: int = 4, min_ngram: int = 1, max_entries: int = 1_600_000
) -> DatastoreArrays:
    """Keeps, for every context of `min_ngram` to `max_ngram` tokens, what the target held most probable most often.

    Counted are the target's most probable tokens, which for sampled answers are not always those that it wrote. A
    longer context that says what the shorter one says is left out: looking it up backs off to the same draft.

    Args:
        rollouts: of the target.
        max_ngram: longest context.
        min_ngram: shortest context.
        max_entries: those seen least often are left out above this many; an entry takes 7 bytes.

    Raises:
        ValueError: if there is nothing to count, or the lengths of contexts are out of order.
    """
    if not 1 <= min_ngram <= max_ngram:
        raise ValueError(f"min_ngram={min_ngram}: expected 1 to max_ngram={max_ngram}")
    if max_entries < 1:
        raise ValueError(f"max_entries={max_entries}: expected a positive number")
    windows, num_known, tokens = _observations(list(rollouts), max_ngram)
    hashes = np.asarray(suffix_hashes(windows))
    shorter, kept = None, []
    for length in range(min_ngram, max_ngram + 1):
        column = length - 1
        is_whole = num_known >= length
        found, first = _count(hashes[is_whole, column], tokens[is_whole])
        if shorter is None:
            is_kept = np.ones(len(found.hashes), bool)
        else:
            # Every context ends in a shorter one, which was seen whenever it was.
            place = np.searchsorted(shorter.hashes, hashes[is_whole, column - 1][first])
            change = np.abs(found.confidence.astype(int) - shorter.confidence[place])
            is_kept = (found.tokens != shorter.tokens[place]) | (change > _SAME)
            found = found._replace(confidence=np.where(is_kept, found.confidence, shorter.confidence[place]))
        shorter = found
        kept.append(_Contexts(*(field[is_kept] for field in found)))
    keys, tokens, confidence, num_seen = (np.concatenate(parts) for parts in zip(*kept, strict=True))
    chosen = np.argsort(-num_seen, kind="stable")[:max_entries]
    # Of two contexts with one hash the shorter stays, which came first.
    keys, unique = np.unique(keys[np.sort(chosen)], return_index=True)
    chosen = np.sort(chosen)[unique]
    tokens = tokens[chosen]
    return DatastoreArrays(
        keys, tokens.astype(np.uint16 if tokens.max() < 1 << 16 else np.int32), confidence[chosen].astype(np.uint8)
    )


def foresee(
    arrays: DatastoreArrays, sequence: Int[np.ndarray, "n"], start: int, max_ngram: int, min_ngram: int
) -> tuple[Int[np.ndarray, "m"], Float[np.ndarray, "m"]]:
    """Returns what the store drafts at every position from `start` on, given the sequence before it.

    Args:
        arrays: of the store.
        sequence: ``[n]`` tokens.
        start: first position; at least 1.
        max_ngram: longest context.
        min_ngram: shortest context.

    Returns:
        Tokens, -1 where no context is known, and how sure each is, 0 to 1.
    """
    positions = np.arange(start, len(sequence))
    hashes = suffix_hashes(_windows(sequence, positions, max_ngram))
    tokens, confidence = np.full(len(positions), -1), np.zeros(len(positions))
    for length in range(min_ngram, max_ngram + 1):
        place = np.minimum(np.searchsorted(arrays.keys, hashes[:, length - 1]), len(arrays.keys) - 1)
        is_hit = (arrays.keys[place] == hashes[:, length - 1]) & (positions >= length)
        tokens = np.where(is_hit, arrays.tokens[place], tokens)
        confidence = np.where(is_hit, arrays.confidence[place] / 255, confidence)
    return tokens, confidence


def _observations(rollouts: Sequence[Rollout], size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of every response position: the tokens before it ``[m, size]``, how many there are, the most probable token."""
    if not rollouts:
        raise ValueError("rollouts: there is nothing to count")
    windows, num_known = [], []
    for rollout in rollouts:
        sequence = np.concatenate([rollout.prompt, rollout.response])
        positions = np.arange(len(rollout.prompt), len(sequence))
        windows.append(_windows(sequence, positions, size))
        num_known.append(positions)
    return (
        np.concatenate(windows),
        np.concatenate(num_known),
        np.concatenate([row.distribution_ids[:, 0] for row in rollouts]),
    )


def _windows(sequence: np.ndarray, positions: np.ndarray, size: int) -> np.ndarray:
    """The `size` tokens before every position; what lies before the start is 0."""
    padded = np.concatenate([np.zeros(size, sequence.dtype), sequence])
    return np.lib.stride_tricks.sliding_window_view(padded, size)[positions]


def _count(hashes: np.ndarray, tokens: np.ndarray) -> tuple[_Contexts, np.ndarray]:
    """The most probable token of every distinct hash; also a place in `hashes` where each occurs."""
    pairs, first, num_seen = np.unique(
        hashes.astype(np.uint64) << np.uint64(32) | tokens.astype(np.uint64), return_index=True, return_counts=True
    )
    # The most frequent of a hash comes first; among equals the lower token.
    order = np.lexsort((-num_seen, pairs >> np.uint64(32)))
    distinct, best = np.unique(pairs[order] >> np.uint64(32), return_index=True)
    total = np.add.reduceat(num_seen[order], best)
    once, twice = (num_seen == 1).sum(), (num_seen == 2).sum()
    discount = once / max(once + 2 * twice, 1)
    chosen = order[best]
    confidence = np.round(255 * np.maximum(num_seen[chosen] - discount, 0) / total)
    most_probable = (pairs[chosen] & np.uint64(0xFFFFFFFF)).astype(np.int32)
    return (
        _Contexts(distinct.astype(np.uint32), most_probable, confidence.astype(np.uint8), num_seen[chosen]),
        first[chosen],
    )
