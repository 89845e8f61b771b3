"""Output constrained to a grammar: which tokens may follow is computed on the host by the library `llguidance`.

A step asks the host through a callback, with the committed tokens and the drafts of the step. The target's distribution
at every position is therefore masked and renormalized by what the grammar allows after the tokens before it, as in
regular decoding. Drafters that process logits see the same masks.
"""

import functools
import itertools
import json
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bass_jax.runtime.files import one_line
from bass_jax.typing import Array, Bool, Int

MAX_GRAMMARS = 4096
"""Grammars that are kept although nothing but the state of a batch refers to them."""

MAX_MATCHERS = 1024
"""Parser states that are kept, one per grammar and row of a batch. One that was dropped is computed again."""


class Grammar:
    """A language that an output must belong to.

    Exactly one of `json_schema`, `regex` and `lark` is given. The output ends when the grammar allows nothing more, and
    may end with a stop token of the tokenizer where the grammar allows the end. A grammar never sees the prompt.

    Equal grammars share their number and the states of their parsers.

    Attributes:
        text: the grammar in the form of `llguidance`.
        index: its number in this process; see `bass_jax.sampling.params.ProcessorArrays`.

    Source: the grammars and the parser are those of `llguidance` (https://github.com/guidance-ai/llguidance).
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        json_schema: Mapping[str, Any] | bool | None = None,
        regex: str | None = None,
        lark: str | None = None,
        after: str | None = None,
    ):
        """Compiles a grammar.

        Args:
            tokenizer: of the target, a `bass_jax.checkpoint.tokenizer.Tokenizer`.
            json_schema: JSON that the schema allows; ``{"type": "object"}`` allows any object.
            regex: text that the whole regular expression matches, in Rust's syntax.
            lark: a grammar in the Lark syntax of `llguidance`.
            after: the grammar holds for what follows the first occurrence of this text; before it the output is free.
                Not with `lark`, which can express it.

        Raises:
            ValueError: if not exactly one kind is given, the grammar is wrong, or `llguidance` is not installed.
        """
        kinds = {"json_schema": json_schema, "regex": regex, "lark": lark}
        given = [name for name, value in kinds.items() if value is not None]
        if len(given) != 1:
            raise ValueError(f"Grammar: expected exactly one of {', '.join(kinds)}, got {', '.join(given) or 'none'}")
        if after is not None and (lark is not None or not after):
            raise ValueError(f"after={after!r}: expected a text that is not empty, with json_schema or regex")
        matcher = _llguidance().LLMatcher
        if lark is not None:
            self.text = matcher.grammar_from_lark(lark)
        elif after is not None:
            body = f"%json {json.dumps(json_schema)}" if regex is None else f"/{regex.replace('/', '\\/')}/"
            self.text = matcher.grammar_from_lark(
                f"start: before body\nbefore[suffix={json.dumps(after)}]: /(.|\\n)*/\nbody: {body}\n"
            )
        elif regex is not None:
            self.text = matcher.grammar_from_regex(regex)
        else:
            self.text = matcher.grammar_from_json_schema(json.dumps(json_schema))
        if error := matcher.validate_grammar(self.text, _tokens_of(tokenizer)):
            raise ValueError(f"{given[0]}: not a grammar that llguidance accepts: {one_line(error)}")
        self._source = _source(self.text, tokenizer)
        self.index = self._source.index

    def new_matcher(self) -> Any:
        """Returns an ``llguidance.LLMatcher`` in its first state."""
        return self._source.new_matcher()

    def __reduce__(self) -> tuple:
        return _without_parser, (self.text, self.index)

    def __copy__(self) -> "Grammar":
        return self  # A grammar never changes, and `__reduce__` leaves the parser out.

    def __deepcopy__(self, memo: Any) -> "Grammar":
        return self

    def compile(self, tokenizer: Any) -> None:
        """Compiles a grammar that comes, without its parser, from another process, whose number it keeps."""
        self._source = _source(self.text, tokenizer, self.index)

    def __repr__(self) -> str:
        return f"Grammar({self.text[:60]!r}…)" if len(self.text) > 60 else f"Grammar({self.text!r})"


def _without_parser(text: str, index: int) -> Grammar:
    grammar = object.__new__(Grammar)
    grammar.text, grammar.index = text, index
    return grammar


class _Source:
    """What equal grammars share."""

    def __init__(self, text: str, tokenizer: Any, index: int | None):
        tokens = _tokens_of(tokenizer)
        self.num_words = -(-tokens.vocab_size // 32)
        self._first = _llguidance().LLMatcher(tokens, text, log_level=0)
        with _LOCK:
            self.index = next(_NUMBERS) if index is None else index
            _SOURCES[self.index] = self

    def new_matcher(self) -> Any:
        # Copies share the compiled grammar: one takes 0.1 ms and a few KiB instead of several ms and 60 KiB.
        with _LOCK:
            return self._first.deep_copy()


_LOCK = threading.RLock()
_NUMBERS = itertools.count()
_SOURCES: weakref.WeakValueDictionary[int, _Source] = weakref.WeakValueDictionary()
_MATCHERS: dict[tuple[int, int], "_RowMatcher"] = {}  # the one that was used last is the last


@functools.lru_cache(maxsize=MAX_GRAMMARS)
def _source(text: str, tokenizer: Any, index: int | None = None) -> _Source:
    return _Source(text, tokenizer, index)


def check_grammars(grammar: Any, num_rows: int) -> list[Grammar | None]:
    """Returns one grammar or None per row.

    Raises:
        ValueError: if `grammar` is not a grammar, None, or a sequence with one of them per row.
    """
    rows = [grammar] * num_rows if grammar is None or isinstance(grammar, Grammar) else grammar
    if not isinstance(rows, Sequence) or not all(row is None or isinstance(row, Grammar) for row in rows):
        raise ValueError(f"grammar={grammar!r}: expected a Grammar, or one or None per row")
    if len(rows) != num_rows:
        raise ValueError(f"grammar has {len(rows)} values: expected one for all or {num_rows}, one per row")
    return list(rows)


def allowed_tokens(
    grammars: Int[Array, "B"],
    tokens: Int[Array, "B C"],
    prompt_lengths: Int[Array, "B"],
    lengths: Int[Array, "B"],
    num_positions: int,
    vocab_size: int,
) -> Bool[Array, "B T V"]:
    """Returns which tokens the grammar of each row allows at positions ``lengths[b]`` to ``lengths[b] + T - 1``.

    All tokens are allowed in rows without a grammar, and after a draft that its grammar does not allow: such a draft is
    rejected, and what follows it is not used.

    Args:
        grammars: `Grammar.index`, -1 for none. If no row has one, the host is not asked.
        tokens: the committed tokens, then the drafts.
        prompt_lengths: the output of a row begins here.
        lengths: number of committed tokens.
        num_positions: T; ``T - 1`` drafts are read.
        vocab_size: V.
    """
    num_words = -(-vocab_size // 32)
    shape = (*tokens.shape[:-1], num_positions, num_words)
    masks = functools.partial(_masks, num_positions=num_positions, num_words=num_words)
    words = _ask_host(masks, (grammars, tokens, prompt_lengths, lengths), shape, -1)
    bits = (words[..., None] >> jnp.arange(32)) & 1
    return bits.reshape(*shape[:-1], num_words * 32)[..., :vocab_size] != 0


def _ask_host(function: Callable, rows: tuple[Array, ...], shape: tuple[int, ...], without: int) -> Array:
    """Calls `function` of the rows on the host, for an int32 array; if no row has a grammar, returns `without`.

    On a mesh over several processes every device asks its own process, and all get the same answer.
    """

    def ask(*rows: Array) -> Array:
        return jax.pure_callback(function, jax.ShapeDtypeStruct(shape, jnp.int32), *rows, vmap_method="sequential")

    if jax.process_count() > 1 and jax.sharding.get_abstract_mesh().size > 1:
        whole = jax.sharding.PartitionSpec()
        ask = jax.shard_map(ask, in_specs=whole, out_specs=whole, check_vma=False)
    return jax.lax.cond((rows[0] >= 0).any(), ask, lambda *_: jnp.full(shape, without, jnp.int32), *rows)


def _masks(grammars, tokens, prompt_lengths, lengths, *, num_positions: int, num_words: int) -> np.ndarray:
    """Returns the masks as bits, ``[B, T, num_words]`` int32; on the host."""
    # The arguments are arrays of jax, which would compile a function for every length of a slice.
    grammars, tokens, prompt_lengths, lengths = map(np.asarray, (grammars, tokens, prompt_lengths, lengths))
    found = np.full((len(grammars), num_positions, num_words), -1, np.int32)
    with _LOCK:
        for row in np.flatnonzero(grammars >= 0).tolist():
            start, end = int(prompt_lengths[row]), int(lengths[row])
            output = tokens[row, start : end + num_positions - 1].tolist()
            _row_matcher(int(grammars[row]), row).fill(found[row], output, end - start)
    return found


def forced_tokens(
    grammars: Int[Array, "B"],
    tokens: Int[Array, "B C"],
    prompt_lengths: Int[Array, "B"],
    lengths: Int[Array, "B"],
    num: int,
) -> tuple[Int[Array, "B G"], Int[Array, "B"]]:
    """Returns the next tokens of each row if its grammar allows one text only, and their number.

    The text can have other tokenizations that the grammar allows too, so the target may choose other tokens.

    Args:
        grammars: `Grammar.index`, -1 for none. If no row has one, the host is not asked.
        tokens: the committed tokens.
        prompt_lengths: the output of a row begins here.
        lengths: number of committed tokens.
        num: G, the most tokens.
    """
    rows, shape = (grammars, tokens, prompt_lengths, lengths), (*tokens.shape[:-1], num + 1)
    both = _ask_host(functools.partial(_forced, num=num), rows, shape, 0)
    return both[..., :num], both[..., num]


def _forced(grammars, tokens, prompt_lengths, lengths, *, num: int) -> np.ndarray:
    """Returns the forced tokens and their number, ``[B, G + 1]`` int32; on the host."""
    grammars, tokens, prompt_lengths, lengths = map(np.asarray, (grammars, tokens, prompt_lengths, lengths))
    found = np.zeros((len(grammars), num + 1), np.int32)
    with _LOCK:
        for row in np.flatnonzero(grammars >= 0).tolist():
            output = tokens[row, prompt_lengths[row] : lengths[row]].tolist()
            forced = _row_matcher(int(grammars[row]), row).forced(output)[:num]
            found[row, : len(forced)], found[row, num] = forced, len(forced)
    return found


def _row_matcher(index: int, row: int) -> "_RowMatcher":
    matcher = _MATCHERS.pop((index, row), None) or _RowMatcher(_SOURCES[index])
    _MATCHERS[index, row] = matcher
    if len(_MATCHERS) > MAX_MATCHERS:
        del _MATCHERS[next(iter(_MATCHERS))]
    return matcher


class _RowMatcher:
    """The parser of one row, with the tokens that it has read. Another output of the row makes it go back."""

    def __init__(self, source: _Source):
        self._source, self._matcher = source, source.new_matcher()
        self._read: list[int] = []

    def fill(self, masks: np.ndarray, output: list[int], num_committed: int) -> None:
        """Writes the masks of the positions from `num_committed` on, as long as the grammar allows the tokens."""
        self._go_back(output[:num_committed])
        own = np.zeros(self._source.num_words, np.int32)
        num = min(len(own), masks.shape[1])
        for position, mask in enumerate(masks):
            if not self._go_on(output[: num_committed + position]):
                return
            self._matcher.unsafe_compute_mask_ptr(own.ctypes.data, own.nbytes)
            mask[:] = 0
            mask[:num] = own[:num]

    def forced(self, output: list[int]) -> list[int]:
        """Returns the tokens of the text that must follow `output`; none after a token that is not allowed."""
        self._go_back(output)
        return self._matcher.compute_ff_tokens() if self._go_on(output) else []

    def _go_back(self, output: list[int]) -> None:
        """Returns to the longest beginning of `output` that was read."""
        num_equal = 0
        while num_equal < min(len(self._read), len(output)) and self._read[num_equal] == output[num_equal]:
            num_equal += 1
        if num_equal < len(self._read) and not self._matcher.rollback(len(self._read) - num_equal):
            self._matcher, num_equal = self._source.new_matcher(), 0
        self._read = self._read[:num_equal]

    def _go_on(self, output: list[int]) -> bool:
        """Reads the rest of `output`; returns whether the grammar allows it."""
        for token in output[len(self._read) :]:
            if self._matcher.try_consume_tokens([token]) != 1:
                return False
            self._read.append(token)
        return True


def _llguidance() -> Any:
    try:
        import llguidance  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise ValueError("grammars need llguidance: pip install 'bass-jax[grammar]'") from None
    return llguidance


@functools.lru_cache(maxsize=16)
def _tokens_of(tokenizer: Any) -> Any:
    return tokenizer.to_llguidance()
