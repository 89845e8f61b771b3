"""The host loop, the stream and the device loop emit the same tokens, and compile one function per bucket."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bass_jax as bass
from bass_jax.config import DRAFT_LEN_BUCKETS
from bass_jax.drafters import NgramDrafter, suffix_drafter
from bass_jax.engine.device_executor import DeviceExecutor
from bass_jax.runtime.jit_cache import JIT_CACHE
from tests import tiny
from tests.letters import Letters
from tests.marks import mostly_slow

SPEC = bass.SpecConfig(4)
SAMPLED = bass.SamplingParams(temperature=1.0, top_p=0.95)


@pytest.fixture(scope="module")
def pair():
    target = tiny.model(1)
    return bass.Pair(target, tiny.model_drafter(tiny.perturbed(target, 0.2)), Letters(tiny.VOCAB))


@pytest.fixture(scope="module")
def ngram_pair(pair):
    """A pair whose steps compile faster."""
    return pair.with_drafter(NgramDrafter())


@pytest.mark.parametrize("drafter", mostly_slow(["ngram", "model"], lambda drafter: drafter == "ngram"))
def test_the_device_loop_equals_the_host_loop(pair, drafter):
    pair = pair.with_drafter(NgramDrafter()) if drafter == "ngram" else pair
    host = bass.generate(pair, tiny.PROMPTS, SPEC, sampling=SAMPLED, max_new_tokens=[20, 11, 17])
    state = bass.prefill(pair, tiny.PROMPTS, SPEC, sampling=SAMPLED, max_new_tokens=[20, 11, 17])
    state, infos = bass.decoding.generate_on_device(pair, state, SPEC, max_steps=20)
    for row in range(3):
        np.testing.assert_array_equal(bass.output_tokens(state, row), host.tokens[row])
    assert repr(bass.summarize(infos)) == repr(host.metrics)  # By repr, because NaN is not equal to itself.


@pytest.mark.slow
def test_the_device_loop_keeps_the_text_of_finished_rows(pair):
    """Its steps are those of a loop on the host that adds the text of each row when it ends."""
    pair = pair.with_drafter(suffix_drafter(shared_tokens=100))
    options = {"sampling": SAMPLED, "max_new_tokens": [20, 5, 17]}
    state = bass.prefill(pair, tiny.PROMPTS, SPEC, **options)
    _, infos = bass.decoding.generate_on_device(pair, state, SPEC, max_steps=20)
    state, step, own, num_kept = (
        bass.prefill(pair, tiny.PROMPTS, SPEC, **options),
        jax.jit(bass.speculate_step),
        pair,
        0,
    )
    expected = []
    while not state.done.all():
        state, info = step(own, state, SPEC)
        expected.append(info)
        for row in np.flatnonzero(info.is_active & state.done):
            text = own.drafter.remember(state.tokens[row], state.lengths[row])
            own, num_kept = pair.with_drafter(own.drafter.with_finished_text(text)), num_kept + 1
    assert num_kept == 3
    assert repr(bass.summarize(infos)) == repr(bass.summarize(expected))


@pytest.mark.slow
def test_a_jitted_step_in_a_loop_equals_generate(pair):
    host = bass.generate(pair, tiny.PROMPTS, SPEC, sampling=SAMPLED, max_new_tokens=20)
    state = bass.prefill(pair, tiny.PROMPTS, SPEC, sampling=SAMPLED, max_new_tokens=20)
    step, infos = jax.jit(bass.speculate_step, donate_argnames="state"), []
    while not state.done.all():
        state, info = step(pair, state, SPEC)
        infos.append(info)
    for row in range(3):
        np.testing.assert_array_equal(bass.output_tokens(state, row), host.tokens[row])
    assert repr(bass.summarize(infos)) == repr(host.metrics)  # By repr, because NaN is not equal to itself.


class ChatLetters(Letters):
    """A tokenizer with a chat template, which precedes a message by the letter a."""

    has_chat_template = True

    def encode_chat(self, text):
        return self.encode_batch(["a" + text])[0]


def test_texts_are_asked_in_the_chat_template_by_default(ngram_pair):
    pair = dataclasses.replace(ngram_pair, tokenizer=ChatLetters(tiny.VOCAB))

    def tokens(prompts, **options):
        return bass.generate(pair, prompts, bass.SpecConfig(0), max_new_tokens=8, **options).tokens[0].tolist()

    in_template, as_text = tokens([[0, 1, 2]]), tokens([[1, 2]])
    assert in_template != as_text
    assert tokens(["bc"]) == in_template and tokens(["bc"], raw=True) == as_text
    engine = bass.Engine(pair, bass.SpecConfig(0), config=bass.EngineConfig(num_slots=1, capacity=64, chunk=8))
    for raw, expected in ((False, in_template), (True, as_text)):
        assert engine.submit("bc", raw=raw, max_new_tokens=8).result().tokens.tolist() == expected


def test_the_repr_of_a_generation_is_short(ngram_pair):
    """Arrays of all steps would fill pages."""
    run = bass.generate(ngram_pair, tiny.PROMPTS, SPEC, sampling=SAMPLED, max_new_tokens=8)
    assert repr(run).startswith("Generation(3 rows (3 length), 24 tokens, ") and len(repr(run)) < 200


@pytest.mark.parametrize("step", ["speculate", "decode"])
@pytest.mark.parametrize("stop_strings", [(), ("ed", "kgk"), ("a",)])
def test_the_events_of_a_stream_add_up_to_the_output_of_generate(pair, step, stop_strings):
    options = {"sampling": SAMPLED, "max_new_tokens": 30, "stop_strings": stop_strings, "step": step}
    whole = bass.generate(pair, tiny.PROMPTS, SPEC, **options)
    events = list(bass.stream(pair, tiny.PROMPTS, SPEC, **options))
    for row in range(3):
        mine = [event for event in events if event.row == row]
        assert "".join(event.text for event in mine) == whole.texts[row]
        np.testing.assert_array_equal(np.concatenate([event.tokens for event in mine]), whole.tokens[row])
        assert [event.finish_reason for event in mine[:-1]] == [None] * (len(mine) - 1)
        assert mine[-1].finish_reason == whole.finish_reasons[row]


@pytest.mark.parametrize("step", ["speculate", "decode"])
def test_nothing_follows_a_stop_string(pair, step):
    """A stop string can end at any position of an accepted run."""
    endless = bass.generate(pair, tiny.PROMPTS, SPEC, sampling=SAMPLED, max_new_tokens=40, step=step)
    checked = 0
    for string in {text[i : i + 2] for text in endless.texts for i in range(0, 30, 3)}:
        run = bass.generate(
            pair, tiny.PROMPTS, SPEC, sampling=SAMPLED, max_new_tokens=40, stop_strings=[string], step=step
        )
        for row, text in enumerate(endless.texts):
            end = text.find(string)
            checked += end >= 0
            num = end + len(string) if end >= 0 else 40
            assert run.texts[row] == (text[:end] if end >= 0 else text)
            np.testing.assert_array_equal(run.tokens[row], endless.tokens[row][:num])
            assert len(run.logprobs[row]) == num
            assert run.finish_reasons[row] == ("stop" if end >= 0 else "length")
            # The infos of the steps also end there.
            emitted = np.concatenate([info.tokens[row][info.tokens[row] >= 0] for info in run.infos])
            np.testing.assert_array_equal(emitted, run.tokens[row])
    assert checked > 10


def test_log_probabilities_are_those_of_the_raw_distribution(pair):
    """They do not depend on the temperature, so they can rank the samples of a prompt."""
    run = bass.generate(pair, tiny.PROMPTS, SPEC, sampling=SAMPLED, max_new_tokens=12)
    for row, prompt in enumerate(tiny.PROMPTS):
        text = np.zeros((1, 64), np.int32)
        text[0, : len(prompt) + 12] = [*prompt, *run.tokens[row]]
        positions = jnp.arange(64, dtype=jnp.int32)[None]
        logits, *_ = jax.jit(bass.models.Model.forward)(pair.target, text, positions, pair.target.init_cache(1, 64))
        logprobs = np.asarray(jax.nn.log_softmax(logits[0]))[len(prompt) - 1 : len(prompt) + 11]
        expected = logprobs[np.arange(12), run.tokens[row]]
        # Passes over one token and over several round differently: 1e-5 of logits up to 30.
        np.testing.assert_allclose(run.logprobs[row], expected, atol=3e-4)
        np.testing.assert_allclose(run.mean_logprobs[row], run.logprobs[row].mean(), rtol=1e-6)


@pytest.mark.parametrize("rule, is_lossless", [("token", True), ("typical", False)])
def test_an_output_states_whether_it_is_lossless(ngram_pair, rule, is_lossless):
    spec = dataclasses.replace(SPEC, acceptance=rule)
    assert bass.generate(ngram_pair, tiny.PROMPTS, spec, sampling=SAMPLED, max_new_tokens=2).is_lossless == is_lossless
    decoded = bass.generate(ngram_pair, tiny.PROMPTS, spec, sampling=SAMPLED, max_new_tokens=2, step="decode")
    assert decoded.is_lossless


def test_one_function_is_compiled_per_bucket():
    """A new temperature or length must not compile anything."""
    target = tiny.model(1, mlp_width=20)  # Its shape is used in no other test, so nothing is compiled yet.
    pair = bass.Pair(target, NgramDrafter())
    before = JIT_CACHE.num_compiled

    def run(prompts=tiny.PROMPTS, draft_len=8, **options):
        options = {"sampling": SAMPLED, "max_new_tokens": 8} | options
        return bass.generate(pair, prompts, bass.SpecConfig(draft_len), **options).timings

    assert run().num_compiled == JIT_CACHE.num_compiled - before > 0
    warps = ((3, 1.0, 0.0), (0, 0.5, 0.0), (0, 1.0, 0.3), ([1, 2, 3], 0.9, 0.1))
    sweeps = [
        *({"sampling": bass.SamplingParams(temperature=t)} for t in (0.1, 0.7, 1.0, [0.0, 1.0, 2.0])),
        *({"sampling": bass.SamplingParams(temperature=1.0, top_k=k, top_p=p, min_p=m)} for k, p, m in warps),
        *({"draft_len": g} for g in (7, 8)),
        *({"stop_tokens": stops} for stops in ((), (1,), (1, 2), (5, 6, 7))),
        *({"max_new_tokens": limits} for limits in (1, 20, [3, 1, 9])),
        *({"prompts": prompts} for prompts in ([[1], [2], [3]], [[1] * 30, [2], [3, 4]], [[1]] * 4)),
        {"key": jax.random.key(3)},
    ]
    for options in sweeps:
        timings = run(**options)
        assert (timings.num_compiled, timings.compile) == (0, 0.0), options
    # Seeds are made into keys by another function, which is compiled once.
    assert [run(seeds=seeds).num_compiled for seeds in ([1, 2, 3], [4, 5, 6])] in ([1, 0], [0, 0])
    # Another bucket compiles one function. Other lengths in the bucket compile nothing.
    assert [run(draft_len=g).num_compiled for g in (6, 5, 6)] == [1, 0, 0]


@pytest.mark.slow
def test_a_jitted_step_is_traced_once_per_bucket(ngram_pair):
    """In a user's own loop that changes every traced value; jax counts."""
    step = jax.jit(lambda pair, state, spec: bass.speculate_step(pair, state, spec), donate_argnums=1)
    for draft_len in (1, 2):
        for seed in range(3):
            state = bass.prefill(
                ngram_pair,
                [[1 + seed] * (1 + seed), [2]],
                bass.SpecConfig(draft_len),
                max_new_tokens=5 + seed,
                sampling=bass.SamplingParams(temperature=seed, top_k=seed),
                stop_tokens=[seed],
            )
            while not state.done.all():
                state = state._replace(draft_lens=jnp.minimum(state.draft_lens, seed))
                state, _ = step(ngram_pair, state, bass.SpecConfig(draft_len))
    assert step._cache_size() == 2


@pytest.mark.parametrize("draft_len", range(33))
def test_the_bucket_of_a_draft_length_is_the_next_larger_one(draft_len):
    bucket = bass.SpecConfig(draft_len).bucket
    assert bucket in DRAFT_LEN_BUCKETS
    assert bucket >= draft_len > max((b for b in DRAFT_LEN_BUCKETS if b < bucket), default=-1)


MISTAKES = [
    ("prompts", {"prompts": []}),
    (r"prompts\[1\] is empty", {"prompts": [[1], []]}),
    (r"prompts\[0\] has token 11", {"prompts": [[11]]}),
    (r"prompts\[0\] has token -1", {"prompts": [[-1]]}),
    (r"prompts\[0\] has 250 tokens", {"prompts": [[1] * 250]}),
    ("max_new_tokens=0", {"max_new_tokens": 0}),
    ("max_new_tokens has 2 values: expected 1 or 3", {"max_new_tokens": [1, 2]}),
    ("temperature has 2 values: expected 1 or 3", {"sampling": bass.SamplingParams(temperature=[1, 2])}),
    ("num_samples=0", {"num_samples": 0}),
    ("step='regular'", {"step": "regular"}),
    ("acceptance='tokens'", {"spec": bass.SpecConfig(4, "tokens")}),
    ("acceptance='nowhere:RULE'", {"spec": bass.SpecConfig(4, "nowhere:RULE")}),
    ("stop_strings", {"stop_strings": [""]}),
]


@pytest.mark.parametrize("message, options", MISTAKES)
def test_an_invalid_argument_is_refused_by_name(pair, message, options):
    options = {"prompts": tiny.PROMPTS, "spec": SPEC} | options
    with pytest.raises(ValueError, match=message):
        bass.generate(pair, **options)


@pytest.mark.parametrize("draft_len", [-1, 33])
def test_a_draft_length_out_of_range_is_refused(draft_len):
    with pytest.raises(ValueError, match=f"draft_len={draft_len}"):
        bass.SpecConfig(draft_len)


@pytest.mark.parametrize("options", [{"step": "decode"}, {"policy": "fixed(draft_len=2)"}, {"policy": "auto"}])
def test_a_step_runs_ahead_as_long_as_a_row_has_room_for_it(ngram_pair, monkeypatch, options):
    """Also late in a long answer."""
    ahead, num_new = [], 120
    can_run_ahead = DeviceExecutor.can_run_ahead

    def observed(self):
        room = max(one.request.max_new_tokens - one.num_tokens for one in self._handles if one is not None)
        timed, num_rows = self._timed_steps, len(self.state.lengths)
        step = self.steps.find(timed.bucket(int(self._wanted[0]), num_rows), num_rows)
        found = can_run_ahead(self)
        # A further step that `auto` has chosen is compiled first.
        if room > DRAFT_LEN_BUCKETS[-1] and step is not None and (not timed.uses_clock or step.num_calls > 0):
            ahead.append((num_new - room, found))
        return found

    monkeypatch.setattr(DeviceExecutor, "can_run_ahead", observed)
    for _ in range(2):  # The first call compiles.
        ahead.clear()
        bass.generate(ngram_pair, tiny.PROMPTS, max_new_tokens=num_new, **options)
    assert any(num_tokens > 60 for num_tokens, _ in ahead)
    assert all(found for _, found in ahead)
