"""Traces: what is recorded, and how a file is continued."""

import json

import numpy as np
import pytest

import bass_jax as bass
from bass_jax.decoding.traces import TraceWriter, read_trace
from tests import tiny


@pytest.fixture(scope="module")
def pair():
    target = tiny.model(1, num_layers=1)
    return bass.Pair(target, tiny.model_drafter(tiny.perturbed(target, 0.2)))


@pytest.mark.slow
def test_a_killed_recording_is_continued(tmp_path, pair):
    """Everything after the last complete run is cut off, wherever the file ends, and the next run is appended."""
    path, spec = tmp_path / "trace.jsonl", bass.SpecConfig(2)
    for expected in range(2):
        with TraceWriter(path) as trace:
            assert trace.num_complete == expected
            bass.generate(pair, tiny.PROMPTS, spec, max_new_tokens=6, trace=trace)
    whole = path.read_text()
    first_end = whole.index('{"kind":"end"}') + len('{"kind":"end"}\n')
    for cut in (first_end + 40, whole.index("\n", first_end) + 1, len(whole) - 5, first_end - 5, 30):
        path.write_text(whole[:cut])
        with TraceWriter(path) as trace:
            assert trace.num_complete == (1 if cut >= first_end else 0)
            bass.generate(pair, tiny.PROMPTS, spec, max_new_tokens=6, trace=trace)
        assert len(read_trace(path)) == (2 if cut >= first_end else 1)
    runs = read_trace(path)
    assert [len(run.steps) for run in runs] == [len(runs[0].steps)] * len(runs)
    assert runs[0].seconds > 0


def test_the_recorded_numbers_give_the_recorded_acceptance(tmp_path, pair):
    """A draft is accepted if its uniform number is at most the ratio of the recorded probabilities."""
    path, sampling = tmp_path / "trace.jsonl", bass.SamplingParams(temperature=1.0)
    with TraceWriter(path) as trace:
        bass.generate(pair, tiny.PROMPTS, bass.SpecConfig(3), sampling=sampling, max_new_tokens=30, trace=trace)
    (run,) = read_trace(path)
    assert run.about["prompt_lengths"] == [1, 9, 8]
    assert run.about["limits"] == [30, 30, 30]
    num_checked = 0
    for step in run.steps:
        for slot, (drafted, accepted) in enumerate(zip(step["num_drafted"], step["num_accepted"], strict=True)):
            target, draft, draws = (step[name][slot] for name in ("target_logprobs", "draft_logprobs", "accept_draws"))
            assert len(target) == len(draft) == len(draws) == drafted
            ratios = [0.0 if t is None else np.exp(t - d) for t, d in zip(target, draft, strict=True)]
            if any(abs(ratio - draw) < 0.01 for ratio, draw in zip(ratios, draws, strict=True)):
                continue  # The numbers are rounded to four digits.
            is_accepted = [draw <= ratio for ratio, draw in zip(ratios, draws, strict=True)]
            assert accepted == (is_accepted.index(False) if False in is_accepted else drafted)
            num_checked += drafted
    assert num_checked > 30
    assert sum(map(sum, (step["num_emitted"] for step in run.steps))) == 90


@pytest.mark.parametrize("text", ["", "hello\n", '{"a": 1}\n', "[]\n"])
def test_other_files_are_refused(tmp_path, text):
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match="trace"):
        read_trace(path)
    if text:
        with pytest.raises(ValueError, match="trace"):
            TraceWriter(path)
        assert path.read_text() == text
    with pytest.raises(ValueError, match="cannot be read"):
        read_trace(tmp_path / "absent.jsonl")


def test_every_line_is_a_json_object(tmp_path, pair):
    path = tmp_path / "trace.jsonl"
    with TraceWriter(path) as trace:
        bass.generate(pair, tiny.PROMPTS, bass.SpecConfig(0), max_new_tokens=4, trace=trace)
    kinds = [json.loads(line)["kind"] for line in path.read_text().splitlines()]
    assert kinds[0] == "run" and kinds[-1] == "end" and set(kinds[1:-1]) == {"step"}
