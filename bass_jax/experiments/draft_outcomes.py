"""The outcomes of drafts, token by token: the text in colors, and acceptance as arrays."""

import html
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from bass_jax.decoding.state import StepInfo

_STYLES = {"draft": "background: #cfe8cf; color: #111", "target": "background: #f6d5a8; color: #111"}


class Span(NamedTuple):
    """A part of a row's text."""

    text: str
    source: Literal["draft", "target"]  # an accepted draft, or a token that the target added after them


class DraftOutcomes(NamedTuple):
    """The drafts that were evaluated. Drafts after a rejection in the same step are not among them."""

    position: np.ndarray  # [n] int, in its step, from 0
    is_accepted: np.ndarray  # [n] bool
    target_probs: np.ndarray  # [n] float, of the draft under the target's distribution
    draft_probs: np.ndarray  # [n] float, under the distribution it was sampled from; 1 for a deterministic drafter
    confidence: np.ndarray | None  # [n] float, of the drafter's most probable token there; None if unknown


def accepted_spans(infos: Sequence[StepInfo], row: int, tokenizer: Any) -> list[Span]:
    """Splits a row's text by the source of each token; a character of several tokens belongs to the last of them."""
    decoder, spans = tokenizer.incremental_decoder(), []
    for info in infos:
        if not info.is_active[row]:
            continue
        tokens = np.asarray(info.tokens)[row, : int(info.num_emitted[row])]
        for index, token in enumerate(tokens.tolist()):
            source = "draft" if index < int(info.num_accepted[row]) else "target"
            spans.append(Span(decoder.push([token]), source))
    rest = decoder.flush()
    if rest and spans:
        spans[-1] = spans[-1]._replace(text=spans[-1].text + rest)
    return [span for span in spans if span.text]


def spans_to_html(spans: Sequence[Span]) -> str:
    """Returns spans as a paragraph: accepted drafts on green, the target's own tokens on orange."""
    marks = "".join(f'<span style="{_STYLES[span.source]}">{html.escape(span.text)}</span>' for span in spans)
    return f'<pre style="white-space: pre-wrap; line-height: 1.6">{marks}</pre>'


def draft_outcomes(infos: Sequence[StepInfo]) -> DraftOutcomes:
    """Collects the evaluated drafts of a run with ``SpecConfig(record_drafts=True)``.

    Raises:
        ValueError: if there are no steps, or drafts were not recorded.
    """
    columns: dict[str, list[np.ndarray]] = {name: [] for name in DraftOutcomes._fields}
    for info in infos:
        if info.draft_record is None:
            raise ValueError("infos: expected a run with SpecConfig(record_drafts=True)")
        slots = np.arange(np.asarray(info.draft_record.target_logprobs).shape[1])
        accepted, drafted = (np.asarray(getattr(info, name))[:, None] for name in ("num_accepted", "num_drafted"))
        is_evaluated = (slots < drafted) & (slots <= accepted) & np.asarray(info.is_active)[:, None]
        columns["position"].append(np.broadcast_to(slots, is_evaluated.shape)[is_evaluated])
        columns["is_accepted"].append((slots < accepted)[is_evaluated])
        columns["target_probs"].append(np.exp(np.asarray(info.draft_record.target_logprobs))[is_evaluated])
        columns["draft_probs"].append(np.exp(np.asarray(info.draft_record.draft_logprobs))[is_evaluated])
        if info.draft_record.confidence is not None:
            columns["confidence"].append(np.asarray(info.draft_record.confidence)[is_evaluated])
    joined: Any = {name: np.concatenate(parts) if parts else None for name, parts in columns.items()}
    if joined["position"] is None:
        raise ValueError("infos is empty: expected at least one step")
    return DraftOutcomes(**joined)
