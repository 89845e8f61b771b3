"""The server, asked by OpenAI's client over a socket: it gives what the engine gives, and survives wrong requests."""

import asyncio
import concurrent.futures
import json
import re
import shutil
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request

import jax.numpy as jnp
import numpy as np
import openai
import pytest
import uvicorn

import bass_jax as bass
from bass_jax.drafters import ModelDrafter
from bass_jax.serving.app import MAX_BODY, Server
from bass_jax.serving.metrics import Metrics
from bass_jax.serving.tool_calls import num_visible, split_calls
from tests import tiny
from tests.checkpoint.small import VOCAB, small_tokenizer

KEY = "a key"
TEMPLATE = (
    "{% if tools %}{{ tools[0].function.name }}\n{% endif %}"
    "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }}\n{% endfor %}a:"
)
MODEL = "tiny"


@pytest.fixture(scope="module")
def pair():
    target = tiny.model(1, vocab_size=VOCAB)
    tokenizer = small_tokenizer()
    tokenizer._fast.chat_template = TEMPLATE
    return bass.Pair(target, ModelDrafter(tiny.perturbed(target, 0.05), VOCAB), tokenizer)


@pytest.fixture(scope="module")
def server(pair):
    metrics = Metrics()
    return Server(make_engine(pair, metrics), metrics, MODEL, api_key=KEY)


def make_engine(pair, metrics, **options):
    spec = bass.SpecConfig(3, "shared_noise", num_logprobs=3)
    config = bass.EngineConfig(num_slots=8, capacity=64, chunk=64, max_waiting=64, buckets=(8,))
    return bass.Engine(pair, spec, config=config, is_processed=True, on_step=metrics.on_step, **options)


@pytest.fixture(scope="module")
def url(server):
    """The address of the running server."""
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    uvicorn_server = uvicorn.Server(uvicorn.Config(server.app(), log_level="error"))
    thread = threading.Thread(target=uvicorn_server.run, args=([listening],))
    thread.start()
    while not uvicorn_server.started:
        time.sleep(0.01)
    yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    uvicorn_server.should_exit = True
    thread.join(timeout=30)
    assert not thread.is_alive() and server.engine.is_closed


@pytest.fixture(scope="module")
def client(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0) as client:
        yield client


def expected(pair, prompt, **options) -> bass.Generation:
    """Returns what regular decoding gives."""
    ids = pair.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
    return bass.generate(pair, [ids], bass.SpecConfig(3, "shared_noise"), step="decode", **options)


def test_a_completion_equals_regular_decoding(client, pair):
    found = client.completions.create(model=MODEL, prompt="the cat", max_tokens=20, temperature=0)
    regular = expected(pair, "the cat", max_new_tokens=20)
    assert found.choices[0].text == regular.texts[0]
    assert found.choices[0].finish_reason == regular.finish_reasons[0]
    num = len(regular.tokens[0])
    assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (len(pair.tokenizer.encode("the cat")), num)
    details = found.usage.completion_tokens_details
    speculation = found.usage.model_extra["speculation"]
    assert details.accepted_prediction_tokens > 0
    assert speculation["tokens_per_pass"] == num / speculation["num_steps"] > 1


def test_a_chat_uses_the_template(client, pair):
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
    ]
    found = client.chat.completions.create(model=MODEL, messages=messages, max_completion_tokens=12, temperature=0)
    regular = expected(pair, "s:be brief\nu:hi\na:", max_new_tokens=12)
    assert found.choices[0].message.content == regular.texts[0]


def tool(name: str, *values: str) -> dict:
    schema = {"type": "object", "properties": {"x": {"enum": list(values)}}, "required": ["x"]}
    return {"type": "function", "function": {"name": name, "parameters": schema | {"additionalProperties": False}}}


TOOLS = [tool("add", "a", "b"), tool("sub", "c")]


@pytest.mark.parametrize(
    "choice, names", [("required", ("add", "sub")), ({"type": "function", "function": {"name": "sub"}}, ("sub",))]
)
def test_a_tool_that_has_to_be_called_is_called(client, choice, names):
    pytest.importorskip("llguidance", reason="needs llguidance, the extra 'grammar'")
    options = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "tools": TOOLS, "tool_choice": choice}
    for seed in range(3):
        (found,) = client.chat.completions.create(**options, seed=seed).choices
        assert found.finish_reason == "tool_calls" and found.message.content is None
        (call,) = found.message.tool_calls
        assert call.id.startswith("call_") and call.function.name in names
        assert json.loads(call.function.arguments)["x"] in ("a", "b", "c")
        chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**options, seed=seed, stream=True)]
        assert "".join(chunk.delta.content or "" for chunk in chunks) == ""
        (streamed,) = chunks[-1].delta.tool_calls
        assert chunks[-1].finish_reason == "tool_calls"
        assert (streamed.function.name, streamed.function.arguments) == (call.function.name, call.function.arguments)
    answer = {"role": "assistant", "tool_calls": [call.to_dict()]}
    messages = [answer, {"role": "tool", "tool_call_id": call.id, "content": "3"}]
    assert client.chat.completions.create(model=MODEL, messages=messages, max_tokens=4).choices[0].message.content


def test_a_tool_that_may_be_called(client, pair):
    """The text of a random model is no call, so it is returned as it is."""
    messages = [{"role": "user", "content": "hi"}]
    options = {"model": MODEL, "messages": messages, "tools": TOOLS, "max_tokens": 12, "temperature": 0}
    (found,) = client.chat.completions.create(**options).choices
    assert found.message.content == expected(pair, "add\nu:hi\na:", max_new_tokens=12).texts[0]
    assert found.message.tool_calls is None and found.finish_reason == "length"
    streamed = client.chat.completions.create(**options, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed) == found.message.content
    (found,) = client.chat.completions.create(**options, tool_choice="none").choices
    assert found.message.content == expected(pair, "u:hi\na:", max_new_tokens=12).texts[0]


CALL = '{"name": "add", "arguments": {"x": "a"}}'


@pytest.mark.parametrize(
    ("text", "content", "names"),
    [
        (CALL, "", ["add"]),
        (f"\n{CALL.replace('arguments', 'parameters')} ", "", ["add"]),
        (f"I add.\n<tool_call>\n{CALL}\n</tool_call>\n<tool_call>{CALL}</tool_call>", "I add.", ["add", "add"]),
        (f"I add. <tool_call>{CALL}", "I add.", ["add"]),
        (f"I add. <tool_call>{CALL[:-1]}</tool_call>", None, []),
        (CALL.replace("add", "mul"), None, []),
        ('{"name": "add", "arguments": 3}', None, []),
        ("[1, 2]", None, []),
        ("a < b <tool", None, []),
    ],
)
def test_calls_are_found_in_a_text(text, content, names):
    found, calls = split_calls(text, ["add"])
    assert [call["function"]["name"] for call in calls] == names
    assert all(json.loads(call["function"]["arguments"]) == {"x": "a"} for call in calls)
    assert found == (text if content is None else content)
    visible = [text[: num_visible(text[:num])] for num in range(len(text) + 1)]
    assert all(found.startswith(one) for one in visible), "nothing that is sent is a part of a call"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tools": [tool("a b", "c")]}, "tools: expected different names"),
        ({"tools": [TOOLS[0]] * 2}, "tools: expected different names"),
        ({"tool_choice": "required"}, "tool_choice: expected a function of tools"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "mul"}}}, "expected a function of"),
        (
            {"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}},
            "expected 'none' or 'auto' with response_format",
        ),
        ({"messages": [{"role": "assistant"}]}, "messages: expected content"),
        ({"tools": [{"type": "function", "function": {}}]}, r"tools\.0\.function\.name: Field required"),
    ],
)
def test_wrong_tools_are_refused(client, changes, message):
    with pytest.raises(openai.BadRequestError, match=message):
        client.chat.completions.create(**({"model": MODEL, "messages": [{"role": "user", "content": "hi"}]} | changes))


def test_a_seed_gives_the_same_texts_under_load(client, pair):
    """With the shared-noise rule, the texts are those of regular sampling, whatever else is decoded."""
    options = {"model": MODEL, "prompt": "once", "max_tokens": 16, "temperature": 0.9, "seed": 7, "n": 3}

    def texts(_):
        return [choice.text for choice in client.completions.create(**options).choices]

    with concurrent.futures.ThreadPoolExecutor(6) as threads:
        found = list(threads.map(texts, range(6)))
    sampling = bass.SamplingParams(0.9)
    regular = [expected(pair, "once", max_new_tokens=16, sampling=sampling, seeds=[7 + i]).texts[0] for i in range(3)]
    assert found == [regular] * 6


def test_a_stream_joins_to_the_whole_text(client):
    options = {"model": MODEL, "prompt": ["a b", "the"], "max_tokens": 24, "temperature": 0.8, "seed": 3, "n": 2}
    whole = client.completions.create(**options)
    texts, usage = ["", "", "", ""], None
    for chunk in client.completions.create(**options, stream=True, stream_options={"include_usage": True}):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
        usage = chunk.usage or usage
    assert texts == [choice.text for choice in whole.choices]
    assert usage.completion_tokens == whole.usage.completion_tokens


def test_a_chat_stream_begins_with_the_role(client):
    options = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 9, "temperature": 0}
    whole = client.chat.completions.create(**options).choices[0]
    chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**options, stream=True)]
    assert [chunk.delta.role for chunk in chunks] == ["assistant"] + [None] * (len(chunks) - 1)
    assert "".join(chunk.delta.content for chunk in chunks) == whole.message.content
    assert chunks[-1].finish_reason == whole.finish_reason


def test_a_stop_string_ends_the_text_before_it(client):
    options = {"model": MODEL, "prompt": "the", "max_tokens": 30, "temperature": 0}
    text = client.completions.create(**options).choices[0].text
    stop = text[8:11]
    found = client.completions.create(**options, stop=[stop]).choices[0]
    assert found.text == text[: text.index(stop)] and found.finish_reason == "stop"


def test_log_probabilities_are_those_of_a_fresh_pass(client, pair):
    found = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "hi"}],
        max_tokens=8,
        temperature=0.7,
        seed=1,
        logprobs=True,
        top_logprobs=3,
    ).choices[0]
    prompt = pair.tokenizer.encode("u:hi\na:")
    regular = expected(pair, prompt, max_new_tokens=8, sampling=bass.SamplingParams(0.7), seeds=[1])
    tokens = [*prompt.tolist(), *regular.tokens[0].tolist()]
    positions = jnp.arange(len(tokens), dtype=jnp.int32)[None]
    target = pair.target
    logits = np.asarray(target.forward(jnp.array([tokens], jnp.int32), positions, target.init_cache(1, 64)).logits[0])
    raw = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)
    assert len(found.logprobs.content) == len(regular.tokens[0])
    for i, entry in enumerate(found.logprobs.content):
        row = raw[len(prompt) - 1 + i]
        np.testing.assert_allclose(entry.logprob, row[regular.tokens[0][i]], atol=1e-4)
        np.testing.assert_allclose([top.logprob for top in entry.top_logprobs], np.sort(row)[::-1][:3], atol=1e-4)
        assert bytes(entry.bytes).decode() == entry.token


def test_the_options_of_sampling_arrive(client, pair):
    options = {"max_tokens": 20, "temperature": 0, "presence_penalty": 2.0, "logit_bias": {"97": -100}}
    found = client.completions.create(model=MODEL, prompt="the", **options, extra_body={"min_tokens": 5})
    sampling = bass.SamplingParams(presence_penalty=2.0, logit_bias={97: -100.0}, min_new_tokens=5)
    assert found.choices[0].text == expected(pair, "the", max_new_tokens=20, sampling=sampling).texts[0]


def test_a_client_that_leaves_cancels_its_requests(client, server):
    with client.completions.create(model=MODEL, prompt="x", max_tokens=60, stream=True, n=4, temperature=1) as stream:
        next(iter(stream))
    deadline = time.monotonic() + 20
    while not server.engine.loop.is_idle and time.monotonic() < deadline:
        time.sleep(0.01)
    assert server.engine.loop.is_idle


def test_a_request_can_do_without_speculation(client):
    options = {"model": MODEL, "prompt": "the", "max_tokens": 20, "seed": 4}
    with_drafts, without = (
        client.completions.create(**options, extra_body={"speculative": value}) for value in (True, False)
    )
    assert with_drafts.choices[0].text == without.choices[0].text
    assert with_drafts.usage.completion_tokens_details.accepted_prediction_tokens > 0
    assert without.usage.completion_tokens_details.accepted_prediction_tokens == 0
    assert without.usage.completion_tokens_details.rejected_prediction_tokens == 0


SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}


def test_outputs_have_the_format(client):
    """Under JSON, a schema, a regular expression and a grammar, at temperature 1, beside requests without a format."""
    schema = {"name": "flag", "schema": SCHEMA, "strict": True}
    formats = [
        {"type": "json_schema", "json_schema": schema},
        {"type": "regex", "regex": "[ab]{3}c?"},
        {"type": "grammar", "grammar": 'start: "x" ("y" | "z")+ "."'},
        {"type": "json_object"},
        {"type": "text"},
    ]

    def ask(chosen, seed):
        messages = [{"role": "user", "content": "hi"}]
        answer = client.chat.completions.create(
            model=MODEL, messages=messages, response_format=chosen, seed=seed, max_completion_tokens=48
        )
        return answer.choices[0].message.content, answer.choices[0].finish_reason

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        found = list(pool.map(ask, formats * 4, range(20)))
    patterns = [r"\{\s*\"a\"\s*:\s*(true|false)\s*\}", "[ab]{3}c?", r"x[yz]+\."]
    for index, pattern in enumerate(patterns):
        answers = found[index :: len(formats)]
        assert any(reason == "stop" for _, reason in answers)
        assert all(re.fullmatch(pattern, text) for text, reason in answers if reason == "stop"), answers
    assert all(text.startswith("{") for text, _ in found[3 :: len(formats)])


def send(url, path, body: bytes, key: str = KEY) -> tuple[int, dict]:
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    request = urllib.request.Request(url + path, body, headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


GOOD = {"model": MODEL, "prompt": "the", "max_tokens": 2}
WRONG_FIELDS = [
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 10**9}, "prompt"),
    ({"max_tokens": "2"}, "max_tokens"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"n": 65}, "n"),
    ({"prompt": ["a"] * 40, "n": 2}, "n"),
    ({"prompt": []}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": [VOCAB]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": "x" * 100}, "prompt"),
    ({"prompt": {"a": 1}}, "prompt"),
    ({"stop": [""]}, "stop"),
    ({"stop": ["a"] * 5}, "stop"),
    ({"logprobs": 4}, "logprobs"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"1": 1000}}, "logit_bias"),
    ({"seed": 1.5}, "seed"),
    ({"echo": True}, "echo"),
    ({"unknown": 1}, "unknown"),
    ({"response_format": {"type": "xml"}}, "response_format"),
    ({"response_format": {"type": "regex"}}, "response_format"),
    ({"response_format": {"type": "regex", "regex": "("}}, "response_format"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": 1}}}},
        "response_format",
    ),
]


@pytest.mark.parametrize("change, field", WRONG_FIELDS, ids=lambda value: str(value)[:30])
def test_a_wrong_field_is_named(url, change, field):
    status, answer = send(url, "/v1/completions", json.dumps(GOOD | change).encode())
    assert status == 400, answer
    assert answer["error"]["param"].split(".")[0] == field and field in answer["error"]["message"] + field


def test_other_mistakes_are_answered(url):
    assert send(url, "/v1/completions", b"{" * 100)[0] == 400
    assert send(url, "/v1/completions", b"\xff\xfe")[0] == 400
    assert send(url, "/v1/completions", json.dumps(GOOD).encode(), key="wrong")[0] == 401
    assert send(url, "/v1/completions", json.dumps(GOOD | {"model": "other"}).encode())[0] == 404
    assert send(url, "/v1/nothing", b"{}")[0] == 404
    assert send(url, "/health", b"{}")[0] == 405
    assert send(url, "/v1/completions", b" " * (MAX_BODY + 1))[0] == 413
    assert send(url, "/v1/chat/completions", json.dumps({"model": MODEL, "messages": []}).encode())[0] == 400
    assert send(url, "/v1/completions", json.dumps(GOOD).encode())[0] == 200


def test_random_requests_never_fail_on_the_server(url, server):
    """Fields with random values of random types: an answer or a 4xx, and the server goes on."""
    random = np.random.default_rng(0)
    values = [None, True, -1, 0, 1, 2**40, 1e308, -0.5, "", "a", "é\ud800", [], [0], ["a", 1], {}, {"a": {}}, [[]]]
    names = [*GOOD, "temperature", "top_p", "n", "seed", "stop", "stream_options", "logprobs", "logit_bias", "top_k"]
    statuses = []
    for _ in range(300):
        body = dict(GOOD)
        for name in random.choice(names, random.integers(1, 4)):
            body[name] = values[random.integers(len(values))]
        text = json.dumps(body).encode()
        if random.random() < 0.1:
            text = text[: random.integers(len(text))]
        status, answer = send(url, "/v1/completions", text)
        assert status == 200 or (400 <= status < 500 and answer["error"]["message"]), (body, status, answer)
        statuses.append(status)
    assert statuses.count(200) > 10 and statuses.count(400) > 100
    assert not server.engine.is_closed


def test_a_full_queue_is_answered_with_429(url, server, client):
    options = {"model": MODEL, "prompt": "x", "max_tokens": 60, "temperature": 1}
    stepping = server.engine.loop._stepping
    stepping.acquire()  # No step runs, so the queue fills.
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        first = threads.submit(client.completions.create, **options, n=64)
        try:
            while server.engine.loop.num_waiting < 64:
                time.sleep(0.01)
            with pytest.raises(openai.RateLimitError):
                client.completions.create(**options)
        finally:
            stepping.release()
        assert len(first.result(timeout=60).choices) == 64


def test_a_request_that_takes_too_long_is_cancelled(client, server, monkeypatch):
    monkeypatch.setattr(server, "max_seconds", 0.0)
    with pytest.raises(openai.InternalServerError, match="longer than 0 s"):
        client.completions.create(model=MODEL, prompt="x", max_tokens=50)


def test_models_health_page_and_metrics(url, client):
    assert [model.id for model in client.models.list()] == [MODEL]
    client.completions.create(model=MODEL, prompt="the", n=4, max_tokens=30, temperature=0)
    texts = {}
    for path in ("/health", "/", "/metrics"):
        with urllib.request.urlopen(url + path, timeout=60) as response:
            texts[path] = response.read().decode()
    assert json.loads(texts["/health"]) == {"status": "ok"} and "<title>" in texts["/"]
    lines = dict(line.rsplit(" ", 1) for line in texts["/metrics"].splitlines() if not line.startswith("#"))
    assert float(lines["bass_jax_tokens_total"]) > 100 and float(lines["bass_jax_step_seconds_count"]) > 10
    drafted = float(lines['bass_jax_drafted_tokens_total{position="1"}'])
    assert drafted >= float(lines['bass_jax_accepted_tokens_total{position="1"}']) > 0


@pytest.mark.slow
def test_a_browser_shows_the_figures(url, client, tmp_path):
    """Chromium runs the page's script for three seconds of its clock, so that the page reads the figures again."""
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        pytest.skip("needs Chromium or Chrome on the PATH")
    client.completions.create(model=MODEL, prompt="the", n=4, max_tokens=30, temperature=0)
    options = "--headless", "--no-sandbox", "--virtual-time-budget=3000", f"--user-data-dir={tmp_path}", "--dump-dom"
    page = subprocess.run([browser, *options, url], capture_output=True, text=True, timeout=120, check=True).stdout
    shown = dict(re.findall("<tr><td>([^<]*)</td><td>([^<]*)</td></tr>", page))
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as response:
        lines = dict(line.rsplit(" ", 1) for line in response.read().decode().splitlines() if line[0] != "#")
    assert int(shown["tokens"]) == float(lines["bass_jax_tokens_total"]) > 100
    assert (shown["running requests"], shown["waiting requests"], shown["tokens per second"]) == ("0", "0", "0.0")
    assert float(shown["mean step"].removesuffix(" ms")) > 0 and 0 < float(shown["drafts per row and step"]) <= 3
    (first,) = re.findall("<td>1</td><td><meter .*?</meter></td><td>([0-9]+) %</td>", page)
    drafted, accepted = (
        float(lines[f'bass_jax_{name}_tokens_total{{position="1"}}']) for name in ("drafted", "accepted")
    )
    assert abs(int(first) - 100 * accepted / drafted) <= 0.5


def test_a_failed_step_ends_requests_with_an_error(pair):
    """The client gets a 503, and the health page tells."""
    metrics = Metrics()
    engine = make_engine(pair, metrics, warm_up=False)
    engine.executor.collect = lambda: 1 / 0
    app = Server(engine, metrics, MODEL).app()

    async def ask() -> tuple[int, int]:
        import httpx2 as httpx

        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            answer = await client.post("/v1/completions", json=GOOD)
            assert "ZeroDivisionError" in answer.json()["error"]["message"]
            return answer.status_code, (await client.get("/health")).status_code

    assert asyncio.run(ask()) == (503, 503)
