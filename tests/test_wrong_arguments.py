"""Every public function × every wrong kind of argument: an error that names the argument, or a right result.

What breaking it means: a typing mistake that decodes something else than was asked for, or a traceback from the middle
of jax.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from hypothesis import strategies as st

import bass_jax as bass
from bass_jax import models
from bass_jax.acceptance import find_rule
from bass_jax.decoding.policy_runner import no_step
from bass_jax.drafters import NgramDrafter
from bass_jax.models.mlp import ACTIVATIONS
from bass_jax.policies import find_policy
from tests import tiny
from tests.letters import Letters

NUM_CASES = 40
"""Per argument list; there are 22 of them."""

VALUES = st.one_of(
    st.sampled_from([
        None, True, False, "", "abc", "greedy", "token", b"abc", math.nan, math.inf, -math.inf, 0, -1, 1, 2, 4, 33, 1.0,
        2.0, 8.5, 10**12, 1j, [], [1], [1, 2], [[1, 2]], ["a"], [None], [1, "a"], [[1], [1, 2]], [1.5], [-1], [99], (),
        (1, 2), {}, {1: 2.0}, {"a": 1}, {1: "x"}, {1: math.nan}, {3}, object(), int, len, np.int32(3), np.float32(0.5),
        np.bool_(True), np.array(3), np.array([1, 2]), np.array([[1, 2]]), np.array(math.nan), np.zeros(0),
        np.array(["a"]), np.array([object()]), jnp.int32(2), jnp.arange(3), jax.random.key(1), jax.random.PRNGKey(1),
        jax.random.split(jax.random.key(1)), range(2), iter([1]), "nowhere:nothing", "math:pi", "fixed", [0, 1, 2],
    ]),
    st.integers(-3, 40),
    st.floats(-2, 3),
    st.lists(st.integers(-2, 12), max_size=4),
    st.text("abcdefghijk", max_size=3),
)  # fmt: skip


def is_integer(low=None, high=None, *, is_optional=False) -> Callable[[Any], bool]:
    def check(value):
        if value is None:
            return is_optional
        is_whole = isinstance(value, int | np.integer) or (
            isinstance(value, np.ndarray | jax.Array) and value.shape == () and jnp.issubdtype(value.dtype, jnp.integer)
        )
        if isinstance(value, bool) or not is_whole:
            return False
        return (low is None or value >= low) and (high is None or value <= high)

    return check


def is_number(low=-math.inf, high=math.inf, *, is_open=False) -> Callable[[Any], bool]:
    """One for all rows, or one for each of three."""

    def check(value):
        if isinstance(value, str | bytes | Mapping | bool) or not isinstance(
            value, int | float | np.generic | np.ndarray | jax.Array | Sequence
        ):
            return False
        try:
            numbers = np.asarray(value)
        except ValueError:
            return False
        if numbers.shape not in ((), (3,)) or numbers.dtype.kind not in "iuf":
            return False
        return bool((np.isfinite(numbers) & (numbers > low if is_open else numbers >= low) & (numbers <= high)).all())

    return check


def is_one_number(low: float) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, int | float | np.number) and is_number(low, is_open=True)(value)


def is_whole_number(low: int) -> Callable[[Any], bool]:
    return lambda value: is_number(low)(value) and bool((np.asarray(value) % 1 == 0).all())


def one_of(*choices: Any) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, str | bool | None) and value in choices


def is_a(*kinds: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, kinds)


def is_function(value: Any) -> bool:
    return value is None or callable(value)


def are_tokens(value: Any, vocab_size: int | None = tiny.VOCAB, least: int = 0) -> bool:
    if isinstance(value, str | bytes | Mapping | set) or not isinstance(value, Sequence | np.ndarray | jax.Array):
        return False
    items = list(value) if np.ndim(np.asarray(value, object)) else [None]
    is_in = is_integer(0, None if vocab_size is None else vocab_size - 1)
    return len(items) >= least and all(is_in(item) for item in items)


def are_token_sets(value: Any) -> bool:
    """Token ids for all rows, or some for each of three; no row may be left without a token."""
    if value is None or are_tokens(value):
        return True
    return isinstance(value, list | tuple) and len(value) == 3 and all(one is None or are_tokens(one) for one in value)


def are_prompts(value: Any) -> bool:
    if isinstance(value, str | bytes | Mapping | set) or not isinstance(value, Sequence | np.ndarray | jax.Array):
        return False
    if np.ndim(np.asarray(value, object)) == 0 or len(value) == 0:
        return False
    if all(isinstance(one, str) for one in value):
        return all(one and set(one) <= set("abcdefghijk") for one in value)
    return all(are_tokens(one, least=1) for one in value)


def is_bias(value: Any) -> bool:
    if value is None:
        return True
    if isinstance(value, Mapping):
        return are_tokens(list(value)) and all(
            isinstance(x, int | float) and not math.isnan(x) and x < math.inf for x in value.values()
        )
    return isinstance(value, list | tuple) and len(value) == 3 and all(map(is_bias, value))


def are_texts(value: Any) -> bool:
    if isinstance(value, str):
        return value != ""
    is_list = isinstance(value, Sequence | np.ndarray | set) and not isinstance(value, bytes | Mapping)
    return is_list and all(isinstance(one, str) and one != "" for one in value)


def is_key(value: Any) -> bool:
    is_typed = isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
    return value is None or (is_typed and value.shape == ())


def is_rule(value: Any) -> bool:
    return value in ("greedy", "token") if isinstance(value, str) else False


def is_policy(value: Any) -> bool:
    return value in (None, "fixed") if isinstance(value, str | None) else False


@dataclasses.dataclass(frozen=True)
class Entry:
    """A function with arguments that work, and for each that is varied what is valid."""

    name: str
    call: Callable[..., Any]
    valid: Mapping[str, Callable[[Any], bool]]


TARGET = tiny.model(1, num_layers=1)
PAIR = bass.Pair(TARGET, NgramDrafter(), Letters(tiny.VOCAB))
PROMPTS = [[1, 2, 3], [4], [5, 6]]
SPEC = bass.SpecConfig(2)
STATES = [bass.prefill(PAIR, PROMPTS, SPEC, max_new_tokens=4)]


def _prefill(**changes):
    defaults = {"pair": PAIR, "prompts": PROMPTS, "spec": SPEC, "max_new_tokens": 4}
    return bass.prefill(**(defaults | changes))


def _generate(**changes):
    """Few shapes: what is valid has the shapes of the defaults or is not run to its end."""
    defaults = {"pair": PAIR, "prompts": PROMPTS, "spec": SPEC, "max_new_tokens": 4}
    arguments = defaults | changes
    run = bass.generate(**arguments)
    limit = np.asarray(arguments["max_new_tokens"])
    assert all(len(row) <= limit.max() for row in run.tokens)
    return run


def _stream(**changes):
    defaults = {"pair": PAIR, "prompts": PROMPTS, "spec": SPEC, "max_new_tokens": 4}
    return list(bass.stream(**(defaults | changes)))


def _sampling(**changes):
    """Fields meet the number of rows and the vocabulary when they are laid out."""
    return bass.SamplingParams(**changes).sampling_arrays(3, tiny.VOCAB)


ENGINES: list[bass.Engine] = []


def _submit(**changes):
    if not ENGINES:
        config = bass.EngineConfig(num_slots=1, capacity=64, chunk=8, max_waiting=10**6)
        ENGINES.append(bass.Engine(PAIR, SPEC, config=config, is_processed=True, warm_up=False))
    handle = ENGINES[0].submit(**({"prompt": [1, 2], "max_new_tokens": 2} | changes))
    handle.cancel()


def _engine(**changes):
    config = bass.EngineConfig(num_slots=1, capacity=64, chunk=8)
    return bass.Engine(**({"pair": PAIR, "spec": SPEC, "config": config, "warm_up": False} | changes))


def _model_config(**changes):
    return dataclasses.replace(tiny.config(), **changes)


OPTIONAL_INTEGER = is_integer(1, is_optional=True)
RUN = {
    "pair": lambda value: False,
    "prompts": are_prompts,
    "spec": is_a(bass.SpecConfig, type(None)),
    "sampling": is_a(bass.SamplingParams, type(None)),
    "max_new_tokens": lambda value: is_whole_number(1)(value) and is_number(1, 40)(value) and _is_integral(value),
    "num_samples": is_integer(1, 4096),
    "key": is_key,
    "seeds": lambda value: value is None or (are_tokens(value, None) and len(value) == 3),
    "stop_tokens": lambda value: value is None or are_tokens(value, None),
}


def _is_integral(value: Any) -> bool:
    return np.asarray(value).dtype.kind in "iu"


LOOP = RUN | {
    "raw": is_a(bool, np.bool_),
    "stop_strings": are_texts,
    "step": one_of("decode", "synchronized", "speculate", "exhaustive"),
    "policy": is_policy,
    "warm_up": is_a(bool, np.bool_),
}

ENTRIES = [
    Entry(
        "SpecConfig",
        bass.SpecConfig,
        {
            "draft_len": is_integer(0, 32, is_optional=True),
            "acceptance": is_a(str),
            "acceptance_kernel": one_of("pallas", "xla"),
            "record_drafts": is_a(bool, np.bool_),
            "num_candidates": is_integer(1, 8),
            "logits_processors": lambda value: (
                isinstance(value, list | tuple) and all(isinstance(one, str) or callable(one) for one in value)
            ),
            "num_logprobs": is_integer(0, 100, is_optional=True),
        },
    ),
    Entry(
        "Sampling",
        _sampling,
        {
            "temperature": is_number(0),
            "top_k": is_whole_number(0),
            "top_p": is_number(0, 1, is_open=True),
            "min_p": is_number(0, 1),
            "repetition_penalty": is_number(0, is_open=True),
            "frequency_penalty": is_number(),
            "presence_penalty": is_number(),
            "logit_bias": is_bias,
            "allowed_tokens": lambda value: are_token_sets(value) and (value is None or len(value) > 0),
            "banned_tokens": are_token_sets,
            "min_new_tokens": is_whole_number(0),
        },
    ),
    Entry(
        "EngineConfig",
        bass.EngineConfig,
        {
            "num_slots": is_integer(1, 64),
            "capacity": is_integer(1),
            "token_budget": OPTIONAL_INTEGER,
            "max_waiting": is_integer(1),
            "chunk": is_integer(1),
            "chunks_per_step": is_integer(1),
            "batching": one_of("continuous", "static"),
            "buckets": is_a(type(None)),
            "page_size": lambda value: OPTIONAL_INTEGER(value) and (value is None or 1024 % value == 0),
        },
    ),
    Entry(
        "ModelConfig",
        _model_config,
        {
            "vocab_size": is_integer(1),
            "width": is_integer(1),
            "context": is_integer(1),
            "layers": lambda value: False,
            "dtype": one_of("float32", "bfloat16"),
            "quantize": one_of(None, "int8", "int8_activations"),
            "logit_softcap": lambda value: (
                value is None or (isinstance(value, int | float | np.number) and is_number(0, is_open=True)(value))
            ),
        },
    ),
    Entry(
        "AttentionConfig",
        lambda **changes: dataclasses.replace(models.AttentionConfig(2, 1, 8), **changes),
        {
            "num_heads": is_integer(1),
            "num_kv_heads": lambda value: is_integer(1)(value) and 2 % value == 0,
            "head_dim": lambda value: is_integer(1)(value) and value % 2 == 0,
        },
    ),
    Entry("RopeConfig", lambda rope_base: models.RopeConfig(rope_base), {"rope_base": is_one_number(1)}),
    Entry("DenseMLP", lambda **changes: models.DenseMLP(4, **changes), {"activation": one_of(*ACTIVATIONS)}),
    Entry(
        "LayerConfig",
        lambda **changes: dataclasses.replace(tiny.config().layers[0], **changes),
        {
            "mixer": is_a(models.AttentionConfig, models.GatedDeltaConfig),
            "mlp": is_a(models.DenseMLP),
            "norm": is_a(models.NormConfig),
            "block": one_of("pre_norm", "post_norm", "sandwich", "parallel"),
        },
    ),
    Entry("prefill", _prefill, RUN | {"spec": is_a(bass.SpecConfig)}),
    Entry("generate", _generate, LOOP | {"trace": is_a(type(None)), "on_step": is_function}),
    Entry("stream", _stream, LOOP),
    Entry(
        "Engine",
        _engine,
        {
            "pair": lambda value: False,
            "spec": is_a(bass.SpecConfig, type(None)),
            "policy": is_policy,
            "config": is_a(bass.EngineConfig, type(None)),
            "is_processed": is_a(bool, np.bool_),
            "num_stop_tokens": is_integer(0),
            "warm_up": lambda value: isinstance(value, bool | np.bool_) and not value,
            "on_step": is_function,
        },
    ),
    Entry(
        "Engine.submit",
        _submit,
        {
            "prompt": lambda value: are_prompts([value]),
            "raw": is_a(bool, np.bool_),
            "max_new_tokens": is_integer(1, 62),
            "sampling": is_a(bass.SamplingParams, type(None)),
            "seed": is_integer(0, 2**32 - 1),
            "stop_tokens": lambda value: value is None or (are_tokens(value, None) and len(value) <= 8),
            "stop_strings": are_texts,
            "priority": is_integer(),
            "on_event": is_function,
        },
    ),
    Entry("find_rule", lambda acceptance: find_rule(acceptance), {"acceptance": is_rule}),
    Entry("find_policy", find_policy, {"policy": lambda value: isinstance(value, str) and value == "fixed"}),
    Entry(
        "fixed",
        lambda draft_len: find_policy(bass.policies.fixed(draft_len)),
        {"draft_len": is_integer(0, 32)},
    ),
    Entry(
        "load_pair",
        lambda **changes: bass.load_pair(**({"path": "nowhere"} | changes)),
        # There is nothing to load, so nothing is valid but what is found out later.
        {name: lambda value: False for name in ("path", "drafter", "dtype", "quantize", "cache_dtype", "mesh")},
    ),
    Entry(
        "random_pair",
        lambda **changes: bass.decoding.random_pair(
            **({"target": tiny.config(num_layers=1), "dtype": "float32"} | changes)
        ),
        {
            "target": is_a(bass.models.ModelConfig),
            "draft": is_a(bass.models.ModelConfig, type(None)),
            "key": is_key,
            "dtype": one_of(None, "float32", "bfloat16"),
            "quantize": one_of(None, "int8", "int8_activations"),
            "cache_dtype": one_of(None, "int8"),
        },
    ),
    Entry(
        "quantize_model",
        lambda **changes: bass.models.quantize_model(**({"model": TARGET} | changes)),
        {
            "model": lambda value: False,
            "quantize": one_of("int8", "int8_activations"),
            "cache_dtype": one_of(None, "int8"),
        },
    ),
    Entry(
        "init_model", lambda config: bass.models.init_model(config, jax.random.key(0)), {"config": lambda value: False}
    ),
    Entry(
        "verify_lossless",
        lambda **changes: bass.verify_lossless(**({"drafter": NgramDrafter(), "num_samples": 0} | changes)),
        # Without samples nothing is run, and what is right is refused for that.
        {name: lambda value: False for name in ("drafter", "rule", "target", "settings", "prompts", "draft_len")},
    ),
    Entry(
        "output_tokens",
        lambda **changes: bass.output_tokens(**({"state": STATES[0], "row": 0} | changes)),
        {"state": lambda value: False, "row": is_integer(0, 3)},
    ),
    Entry("summarize", bass.summarize, {"infos": lambda value: False}),
    Entry(
        "per_token_latency",
        lambda **changes: bass.decoding.per_token_latency(**({"infos": INFOS, "step_seconds": [1.0]} | changes)),
        {
            "infos": lambda value: False,
            "step_seconds": lambda value: is_number(0)([0, 0, value[0]]) and len(value) == 1,
        },
    ),
]

INFOS = [no_step(2)]


@pytest.fixture(autouse=True)
def annotations_are_not_checked():
    """Users run without the checks of annotations, which elsewhere find wrong types before our own code does."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


def wrong_cases():
    return [pytest.param(entry, name, id=f"{entry.name}-{name}") for entry in ENTRIES for name in entry.valid]


@pytest.mark.parametrize(("entry", "argument"), wrong_cases())
def test_an_argument_is_right_or_refused_by_its_name(entry, argument):
    num_refused = num_right = 0

    @hypothesis.settings(
        max_examples=NUM_CASES,
        phases=(hypothesis.Phase.generate,),
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(value=VALUES)
    def check(value):
        nonlocal num_refused, num_right
        is_valid = validity(entry, argument, value)
        if is_valid and entry.name in ("generate", "stream", "prefill") and not is_quick(argument):
            return  # Another shape: compiled and run by the tests of that function.
        message = error_of(entry, argument, value)
        num_refused += message is not None
        num_right += message is None
        if is_valid:
            assert message is None, f"{value!r} was refused: {message}"
        else:
            assert message is not None, f"{value!r} was accepted"
            assert "\n" not in message, message
            if (entry.name, argument) not in UNNAMED:
                assert argument.rstrip("s") in message, f"{value!r}: {message}"

    check()
    assert num_refused + num_right > 0


UNNAMED = {("load_pair", name) for name in ("path", "drafter", "dtype", "quantize", "cache_dtype", "mesh")}
UNNAMED |= {("random_pair", name) for name in ("target", "draft")}
UNNAMED |= {("verify_lossless", name) for name in ("rule", "settings", "prompts", "draft_len", "drafter", "target")}
"""Where the message can be about something else: a right value, or a path, which stands in it without a name."""


def validity(entry: Entry, argument: str, value: Any) -> bool:
    try:
        return bool(entry.valid[argument](value))
    except Exception:
        return False


def error_of(entry: Entry, argument: str, value: Any) -> str | None:
    """The message of a `ValueError`; any other exception is a failure."""
    try:
        entry.call(**{argument: value})
    except ValueError as error:
        return str(error)
    return None


def is_quick(argument: str) -> bool:
    """Whether a run with any value of it needs no other executables than the default's."""
    return argument not in ("prompts", "num_samples", "step", "policy", "max_new_tokens", "stop_tokens")
