"""One engine over two processes: both run the steps that process 0 decides on, and the tokens are those of one."""

import re
from pathlib import Path

import jax
import numpy as np
import pytest

import bass_jax as bass
from bass_jax.drafters import ModelDrafter, suffix_drafter
from bass_jax.models import place_model
from tests import tiny
from tests.two_processes import run_in_two_processes

VOCAB, NUM_REQUESTS = 12, 10
ROOT = Path(__file__).parents[2]
SHAPE = {"num_heads": 8, "num_kv_heads": 4, "head_dim": 4, "vocab_size": VOCAB}
CONFIG = {"num_slots": 4, "capacity": 64, "chunk": 4, "buckets": (1, 4)}


def make_engine(mesh=None, tokenizer=None, **changes) -> bass.Engine:
    target = tiny.model(0, **SHAPE if tokenizer is None else SHAPE | {"vocab_size": tokenizer.vocab_size})
    draft = tiny.perturbed(target, 0.02)
    if mesh is not None:
        target, draft = place_model(target, mesh), place_model(draft, mesh, {})
    config = bass.EngineConfig(**CONFIG, page_size=changes.pop("page_size", None))
    pair = bass.Pair(target, changes.pop("drafter", None) or ModelDrafter(draft, target.vocab_size), tokenizer)
    return bass.Engine(pair, config=config, warm_up=False, **changes)


def serve(engine: bass.Engine) -> list[list]:
    """Serves requests that come, and are cancelled, between steps; returns the end and the tokens of each."""
    random, handles = np.random.default_rng(5), []
    while len(handles) < NUM_REQUESTS or not engine.loop.is_idle:
        if len(handles) < NUM_REQUESTS and random.random() < 0.5:
            prompt = random.integers(0, VOCAB, int(random.integers(1, 12)))
            penalty = 1.0 if len(handles) % 2 else 1.3  # needs further arrays
            sampling = bass.SamplingParams(repetition_penalty=penalty)
            handles.append(engine.submit(prompt, max_new_tokens=int(random.integers(1, 30)), sampling=sampling))
        elif handles and random.random() < 0.3:
            handles[-1].cancel()
        engine.advance()
    return [[handle.finish_reason, handle.output().tokens.tolist()] for handle in handles]


PROGRAM = """
from bass_jax.engine import device_executor, timed_steps
from bass_jax.runtime import processes
from bass_jax.runtime.jit_cache import JIT_CACHE
from tests.engine import test_several_processes as shared

is_first = jax.process_index() == 0
processes._NUM_KEPT = 50  # Old values are dropped.
# Alone, the second process would plan without drafts, and compile nothing further.
timed_steps.calibrate = lambda pair, num_rows, lengths: np.asarray(lengths, np.float32) * 9 * (not is_first) + 1
collect, steps = device_executor.DeviceExecutor.collect, []

def recorded(executor):
    result = collect(executor)
    steps.append([result.draft_len, result.info.num_drafted.tolist()])
    JIT_CACHE.run_seconds = 1e9 if is_first else 0.0
    return result

device_executor.DeviceExecutor.collect = recorded
with shared.make_engine(mesh, spec=bass.SpecConfig(None, "greedy"), page_size=8) as engine:
    if is_first:
        found = shared.serve(engine)
    else:
        try:
            engine.submit([1])
        except ValueError as error:
            found = str(error)
        engine.follow()
print(json.dumps([found, steps]))
"""


@pytest.mark.slow
def test_two_processes_serve_as_one():
    """`auto` takes the same lengths in both, although they measure different times."""
    (found, steps), (error, second_steps) = run_in_two_processes(PROGRAM)
    assert steps == second_steps and len({draft_len for draft_len, _ in steps}) > 1
    assert error == "submit: expected process 0, which takes the requests; this is 1"
    with make_engine(spec=bass.SpecConfig(3, "greedy")) as engine:
        expected = serve(engine)
    assert {reason for reason, _ in found} == {"length", "cancelled"}
    for (reason, tokens), (_, alone) in zip(found, expected, strict=True):
        num = min(len(tokens), len(alone)) if reason == "cancelled" else len(alone)
        assert tokens[:num] == alone[:num]


SHARED_TEXT = """
from bass_jax.drafters import suffix_drafter
from tests.engine import test_several_processes as shared

found, drafter = None, suffix_drafter(shared_tokens=100)
with shared.make_engine(mesh, spec=bass.SpecConfig(3, "greedy"), drafter=drafter) as engine:
    if jax.process_index() == 0:
        found = shared.serve(engine)
    else:
        engine.follow()
print(json.dumps([found, np.asarray(engine.executor._pair.drafter.finished_text.tokens).tolist()]))
"""


@pytest.mark.slow
def test_two_processes_keep_the_same_text_of_finished_requests():
    (found, kept), (_, second_kept) = run_in_two_processes(SHARED_TEXT)
    assert kept == second_kept and kept.count(-1) < 50
    with make_engine(spec=bass.SpecConfig(3, "greedy"), drafter=suffix_drafter(shared_tokens=100)) as engine:
        expected = serve(engine)
    for (reason, tokens), (_, alone) in zip(found, expected, strict=True):
        num = min(len(tokens), len(alone)) if reason == "cancelled" else len(alone)
        assert tokens[:num] == alone[:num]


PATTERN = "(ab|c ){2,6}d?"


def serve_grammars(mesh=None) -> list[str] | None:
    """Serves requests with and without a grammar; returns the text of each, and None in the second process."""
    tokenizer = bass.load_pair(ROOT / "checkpoints" / "quickstart").tokenizer
    engine = make_engine(mesh, tokenizer, spec=bass.SpecConfig(3, "shared_noise"))
    if jax.process_index():
        return engine.follow()
    grammar, handles = bass.sampling.Grammar(tokenizer, regex=PATTERN), []
    for prompt in ([1, 2], [3], [0, 5, 6], [2]):
        sampling = bass.SamplingParams(temperature=1.0, grammar=grammar if len(handles) % 2 else None)
        handles.append(engine.submit(prompt, max_new_tokens=16, sampling=sampling, seed=len(handles)))
    engine.run()
    engine.close()
    return [handle.output().text for handle in handles]


GRAMMARS = """
from tests.engine import test_several_processes as shared

print(json.dumps(shared.serve_grammars(mesh)))
"""


@pytest.mark.slow
def test_grammars_hold_in_two_processes():
    """The second process has parsers of its own, which give the same masks."""
    pytest.importorskip("llguidance", reason="needs llguidance, the extra 'grammar'")
    found, _ = run_in_two_processes(GRAMMARS)
    assert all(re.fullmatch(PATTERN, text) for text in found[1::2])
    assert serve_grammars() == found


def test_one_process_has_nothing_to_follow():
    with (
        make_engine(spec=bass.SpecConfig(3, "greedy")) as engine,
        pytest.raises(ValueError, match="follow: expected a process"),
    ):
        engine.follow()
