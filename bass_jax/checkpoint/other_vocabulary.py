"""Loads a draft model whose tokenizer is not the target's."""

import warnings
from os import PathLike

import numpy as np
from jax.sharding import Mesh

from bass_jax.checkpoint.load import has_tokenizer, load_model, load_tokenizer, resolve
from bass_jax.checkpoint.tokenizer import Tokenizer
from bass_jax.drafters.other_vocabulary import OtherVocabularyDrafter, VocabularyMatch, other_vocabulary_drafter
from bass_jax.models import Model

MAX_OWN_TOKENS = 8
"""Of a token of the target that is more tokens of the draft model, the draft model reads only the last ones."""


def match_vocabularies(target: Tokenizer, draft: Tokenizer, vocab_size: int) -> VocabularyMatch:
    """Finds the tokens that two tokenizers share, and writes the others in tokens of the draft's.

    Two tokens are shared if their bytes are equal, so a byte-level tokenizer and SentencePiece can share tokens.
    Special tokens are shared if their names are equal. A special token that the draft lacks is read as the text of its
    name, and a token without text as the draft's token 0.

    The tokens that the draft's tokenizer puts before a text, such as BOS, are read in place of the target's. If the
    target's tokenizer puts none there, they are read before every text.

    Args:
        target: the target's tokenizer.
        draft: the draft's.
        vocab_size: V of the target, which may be padded beyond its tokenizer.

    Raises:
        ValueError: if the tokens of one of them have no text; see `Tokenizer.token_texts`.
    """
    # Of equal tokens the last one counts: SentencePiece lists its tokens of one byte before those of its text.
    own_by_text, by_text = ({text: id for id, text in sorted(one.token_texts.items())} for one in (draft, target))
    pieces: list[list[int]] = [[0]] * vocab_size
    for id, text in target.token_texts.items():
        if text in own_by_text:
            pieces[id] = [own_by_text[text]]
        elif id < vocab_size:
            part = draft.encode_part(text.encode() if isinstance(text, str) else text)
            pieces[id] = part[-MAX_OWN_TOKENS:] or [0]
    if target.start_ids and draft.start_ids and target.token_texts[target.start_ids[0]] not in own_by_text:
        pieces[target.start_ids[0]] = list(draft.start_ids)
    num_own = np.array([len(piece) for piece in pieces], np.int32)
    own_tokens = np.zeros((vocab_size, num_own.max()), np.int32)
    for id, piece in enumerate(pieces):
        own_tokens[id, : len(piece)] = piece
    shared = sorted((id, own_by_text[text]) for text, id in by_text.items() if text in own_by_text)
    output_ids, own_ids = np.array(shared, np.int32).reshape(-1, 2).T
    start_tokens = np.array(() if target.start_ids else draft.start_ids, np.int32)
    return VocabularyMatch(own_tokens, num_own, output_ids, own_ids, start_tokens)


def load_other_vocabulary(
    path: str | PathLike[str],
    target: Model,
    tokenizer: Tokenizer,
    *,
    quantize: str | None = None,
    mesh: Mesh | None = None,
    rules: dict[str, str] | None = None,
) -> OtherVocabularyDrafter:
    """Loads a draft model with another tokenizer, in the target's dtype, and warns how many tokens they share.

    Args:
        path: see `load_model`.
        target: the target.
        tokenizer: the target's.
        quantize: see `load_model`.
        mesh: see `load_model`.
        rules: see `load_model`.

    Raises:
        ValueError: as in `load_model`; if the draft has no tokenizer, reads hidden states of the target, or shares no
            token with it.
    """
    path = resolve(path)
    if not has_tokenizer(path):
        raise ValueError(f"{path}: the draft's tokenizer is not the target's, and its files are missing")
    own = load_tokenizer(path)
    draft = load_model(path, dtype=target.config.dtype, quantize=quantize, mesh=mesh, rules=rules)
    if draft.config.hidden_width is not None:
        raise ValueError(
            f"{path}: hidden_width={draft.config.hidden_width}: expected a draft with the target's tokenizer"
        )
    for role, size, one in (("target", target.vocab_size, tokenizer), ("draft", draft.vocab_size, own)):
        if size < one.vocab_size:
            raise ValueError(f"{path}: the {role}'s vocabulary has {size} tokens, its tokenizer {one.vocab_size}")
    try:
        match = match_vocabularies(tokenizer, own, target.vocab_size)
        drafter = other_vocabulary_drafter(draft, match)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    warnings.warn(f"{path}: the draft has another tokenizer: {match}", stacklevel=2)
    return drafter
