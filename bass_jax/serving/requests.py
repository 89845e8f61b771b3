"""The bodies of requests, checked, and translated to the arguments of `bass_jax.engine.Engine.submit`."""

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from bass_jax.checkpoint.tokenizer import Tokenizer
from bass_jax.sampling import SamplingParams
from bass_jax.sampling.grammar import Grammar
from bass_jax.serving.tool_calls import call_schema, is_function_name

MAX_CHOICES = 64
"""The largest number of outputs of one request: prompts times ``n``."""

_Penalty = Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)]
_Stop = Annotated[str, Field(min_length=1, max_length=256)]
_TokenId = Annotated[int, Field(ge=0, lt=2**31)]


class RequestError(ValueError):
    """A mistake of the client.

    Attributes:
        param: the field of the body; None if the mistake concerns the whole body.
        status: of the HTTP response.
    """

    def __init__(self, message: str, param: str | None = None, status: int = 400):
        super().__init__(message)
        self.param, self.status = param, status


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")


class StreamOptions(_Body):
    """``stream_options``."""

    include_usage: bool = False


class NamedSchema(_Body):
    """``response_format.json_schema``. The schema always holds, whether or not `strict` is set."""

    name: str
    schema_: Annotated[dict[str, Any], Field(alias="schema")] = {}
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(_Body):
    """``response_format``: text, JSON, JSON of a schema; ours are a regular expression and a grammar of llguidance."""

    type: Literal["text", "json_object", "json_schema", "regex", "grammar"] = "text"
    json_schema: NamedSchema | None = None
    regex: str | None = None
    grammar: str | None = None

    def compile(self, tokenizer: Tokenizer) -> Grammar | None:
        """Returns the grammar; None for text.

        Raises:
            RequestError: if the grammar is missing or wrong.
        """
        if self.type == "text":
            return None
        name = f"response_format.{self.type}"
        value: Any = {"type": "object"} if self.type == "json_object" else getattr(self, self.type)
        if value is None:
            raise RequestError(f"{name}: expected a value with this type", name)
        if isinstance(value, NamedSchema):
            value = value.schema_
        kind = {"regex": "regex", "grammar": "lark"}.get(self.type, "json_schema")
        try:
            return Grammar(tokenizer, **{kind: value})
        except ValueError as error:
            raise RequestError(f"{name}: {error}", name) from None


class _Options(_Body):
    """The fields that completions and chats share. The last group are ours; the one before is accepted and ignored."""

    model: str
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] = 1
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: _Stop | Annotated[list[_Stop], Field(max_length=4)] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = None
    presence_penalty: _Penalty | None = None
    frequency_penalty: _Penalty | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False)]] | None = None

    user: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None

    top_k: Annotated[int, Field(ge=0)] = 0
    min_p: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] = 0.0
    repetition_penalty: Annotated[float, Field(gt=0, le=10, allow_inf_nan=False)] = 1.0
    min_tokens: Annotated[int, Field(ge=0)] = 0
    speculative: bool = True
    response_format: ResponseFormat | None = None

    def sampling(self, vocab_size: int, tokenizer: Tokenizer) -> SamplingParams:
        """Returns the sampling parameters of one row; the temperature is 1 unless it is given, as in OpenAI's API."""
        bias = {}
        for key, value in (self.logit_bias or {}).items():
            if not (key.isascii() and key.isdecimal() and len(key) < 10 and int(key) < vocab_size):
                raise RequestError(f"logit_bias: {key[:20]!r} is not a token id below {vocab_size}", "logit_bias")
            bias[int(key)] = value
        return SamplingParams(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            repetition_penalty=self.repetition_penalty,
            min_new_tokens=self.min_tokens,
            logit_bias=bias or None,
            grammar=self.grammar(tokenizer),
        )

    def grammar(self, tokenizer: Tokenizer) -> Grammar | None:
        """Returns the grammar of the output; None for any text."""
        return None if self.response_format is None else self.response_format.compile(tokenizer)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class CompletionBody(_Options):
    """The body of ``/v1/completions``."""

    prompt: (
        str
        | Annotated[list[_TokenId], Field(min_length=1)]
        | Annotated[list[str] | list[list[_TokenId]], Field(min_length=1, max_length=MAX_CHOICES)]
    )
    max_tokens: Annotated[int, Field(ge=1)] = 16
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    best_of: Literal[1] | None = None
    echo: Literal[False] = False
    suffix: None = None

    def prompts(self, tokenizer: Tokenizer) -> list[Any]:
        """Returns the token ids of every prompt."""
        prompt: Any = self.prompt
        if isinstance(prompt, str) or isinstance(prompt[0], int):
            prompt = [prompt]
        return [tokenizer.encode(one) if isinstance(one, str) else one for one in prompt]

    def limit(self, room: int) -> int:
        """Returns the largest number of new tokens."""
        return self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        """How many alternatives are wanted at each token; None for no log-probabilities."""
        return self.logprobs


class TextPart(_Body):
    """A part of a message."""

    type: Literal["text"]
    text: str


class CalledFunction(_Body):
    """The function of a call."""

    name: str
    arguments: str


class ToolCall(_Body):
    """A call of an earlier answer."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(_Body):
    """A message of a chat. The result of a call has the role ``"tool"``."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    refusal: None = None

    def for_template(self) -> dict[str, Any]:
        """Returns the message as chat templates read it: the arguments of calls are objects.

        Raises:
            RequestError: if the arguments of a call are not JSON, or there is neither a text nor a call.
        """
        content = self.content
        if content is None and not self.tool_calls:
            raise RequestError("messages: expected content", "messages")
        text = content if isinstance(content, str) else "".join(part.text for part in content or ())
        message: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": text}
        message |= {name: value for name in ("name", "tool_call_id") if (value := getattr(self, name)) is not None}
        if self.tool_calls:
            try:
                calls = [
                    {"name": one.function.name, "arguments": json.loads(one.function.arguments)}
                    for one in self.tool_calls
                ]
            except ValueError:
                raise RequestError("messages: tool_calls: expected arguments in JSON", "messages") from None
            message["tool_calls"] = [{"type": "function", "function": call} for call in calls]
        return message


class Function(_Body):
    """A function that an answer can call; `parameters` is a JSON schema."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(_Body):
    """A tool."""

    type: Literal["function"]
    function: Function


class FunctionName(_Body):
    """The function of a choice."""

    name: str


class NamedTool(_Body):
    """The function that has to be called."""

    type: Literal["function"]
    function: FunctionName


class ChatBody(_Options):
    """The body of ``/v1/chat/completions``."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=1000)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: Annotated[list[Tool], Field(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None

    def prompts(self, tokenizer: Tokenizer) -> list[Any]:
        """Returns the token ids of the conversation."""
        names = [tool.function.name for tool in self.tools or ()]
        if not all(map(is_function_name, names)) or len(set(names)) < len(names):
            raise RequestError("tools: expected different names of letters, digits, _ and -", "tools")
        tools = None
        if self.tool_names:
            if not tokenizer.takes_tools:
                raise RequestError("tools: the chat template of this model has no place for tools", "tools")
            tools = [tool.model_dump(exclude_none=True) for tool in self.tools or ()]
        messages = [message.for_template() for message in self.messages]
        try:
            return [tokenizer.encode_chat(messages, tools=tools)]
        except ValueError as error:
            raise RequestError(str(error), "messages") from None

    @property
    def tool_names(self) -> list[str]:
        """The functions that the answer can call."""
        return [] if self.tool_choice == "none" else [tool.function.name for tool in self.tools or ()]

    def grammar(self, tokenizer: Tokenizer) -> Grammar | None:
        """Returns the grammar of the output. If a tool has to be called, it is the JSON of one call.

        Raises:
            RequestError: if there is no such tool, or the output has to be something else too.
        """
        grammar = super().grammar(tokenizer)
        if self.tool_choice in (None, "none", "auto"):
            return grammar
        functions = [tool.function.model_dump() for tool in self.tools or ()]
        if isinstance(self.tool_choice, NamedTool):
            functions = [one for one in functions if one["name"] == self.tool_choice.function.name]
        if not functions:
            raise RequestError("tool_choice: expected a function of tools", "tool_choice")
        if grammar is not None:
            raise RequestError("tool_choice: expected 'none' or 'auto' with response_format", "tool_choice")
        try:
            return Grammar(tokenizer, json_schema=call_schema(functions))
        except ValueError as error:
            raise RequestError(f"tools: {error}", "tools") from None

    def limit(self, room: int) -> int:
        """Returns the largest number of new tokens: `room` unless the body limits it."""
        return self.max_completion_tokens or self.max_tokens or room

    @property
    def num_logprobs(self) -> int | None:
        """How many alternatives are wanted at each token; None for no log-probabilities."""
        if not self.logprobs:
            if self.top_logprobs is not None:
                raise RequestError("top_logprobs: expected logprobs=true with it", "top_logprobs")
            return None
        return self.top_logprobs or 0


def parse[Body: _Options](kind: type[Body], body: bytes) -> Body:
    """Reads the JSON of a body.

    Raises:
        RequestError: naming the first field that is wrong.
    """
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        # Pydantic adds the tried types of a union to the location; they are not part of the path in the body.
        path = [str(part) for part in first["loc"] if isinstance(part, int) or part in _NAMES]
        param = ".".join(path) or ".".join(str(part)[:40] for part in first["loc"][:1]) or None
        raise RequestError(f"{param or 'body'}: {first['msg']}", param) from None


_NAMES = {
    name
    for kind in (
        CompletionBody,
        ChatBody,
        Message,
        TextPart,
        StreamOptions,
        ResponseFormat,
        NamedSchema,
        ToolCall,
        CalledFunction,
        Tool,
        Function,
        NamedTool,
        FunctionName,
    )
    for name in kind.model_fields
}
