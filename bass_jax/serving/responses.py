"""Builds the answers of OpenAI's API from the events of requests."""

import dataclasses
import time
import uuid
from typing import Any

from bass_jax.checkpoint.tokenizer import Tokenizer
from bass_jax.engine import RequestEvent, RequestHandle
from bass_jax.serving.tool_calls import num_visible, split_calls


@dataclasses.dataclass
class Answer:
    """The parts of an answer that its chunks share.

    Attributes:
        is_chat: for a chat, or else for a completion.
        model: name of the pair.
        tokenizer: of the pair.
        num_logprobs: alternatives at each token; None for no log-probabilities.
        tool_names: the functions that a chat can call.
    """

    is_chat: bool
    model: str
    tokenizer: Tokenizer
    num_logprobs: int | None
    tool_names: tuple[str, ...] = ()

    def __post_init__(self):
        self._id = f"{'chatcmpl' if self.is_chat else 'cmpl'}-{uuid.uuid4().hex}"
        self._created = int(time.time())

    def envelope(self, choices: list[dict[str, Any]], *, is_chunk: bool) -> dict[str, Any]:
        """Returns the object around `choices`."""
        kind = "text_completion"
        if self.is_chat:
            kind = "chat.completion.chunk" if is_chunk else "chat.completion"
        return {"id": self._id, "object": kind, "created": self._created, "model": self.model, "choices": choices}

    def chunk(self, index: int, event: RequestEvent, *, is_first: bool, offset: int) -> dict[str, Any]:
        """Returns the choice of one event of a stream; `offset` is the number of characters before it."""
        choice = {"index": index, "finish_reason": finish_reason(event.finish_reason)}
        choice["logprobs"] = self._logprobs([event], offset)
        if self.is_chat:
            return choice | {"delta": ({"role": "assistant"} if is_first else {}) | {"content": event.text}}
        return choice | {"text": event.text}

    def choice(self, index: int, handle: RequestHandle, events: list[RequestEvent]) -> dict[str, Any]:
        """Returns the choice of a request that has ended."""
        choice = {"index": index, "finish_reason": finish_reason(handle.finish_reason)}
        choice["logprobs"] = self._logprobs(events, 0)
        text = "".join(event.text for event in events)
        if not self.is_chat:
            return choice | {"text": text}
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        content, calls = split_calls(text, self.tool_names) if self.tool_names else (text, [])
        if calls:
            message |= {"content": content or None, "tool_calls": calls}
            choice["finish_reason"] = "tool_calls"
        return choice | {"message": message}

    def visible(self, written: str, num_sent: int, reason: str | None) -> tuple[str, list[dict[str, Any]]]:
        """Returns what a stream sends next of a chat that can call tools: text, and at the end the calls.

        Args:
            written: the answer so far.
            num_sent: number of its characters that were sent.
            reason: why it has ended; None while it has not.
        """
        if reason is None:
            return written[num_sent : max(num_sent, num_visible(written))], []
        content, calls = split_calls(written, self.tool_names)
        return content[num_sent:], [{"index": index, **call} for index, call in enumerate(calls)]

    def _logprobs(self, events: list[RequestEvent], offset: int) -> dict[str, Any] | None:
        if self.num_logprobs is None:
            return None
        entries = [entry for event in events for entry in self._entries(event)]
        if self.is_chat:
            return {"content": entries, "refusal": None}
        texts = [entry["token"] for entry in entries]
        offsets = [offset + sum(map(len, texts[:i])) for i in range(len(texts))]
        return {
            "tokens": texts,
            "token_logprobs": [entry["logprob"] for entry in entries],
            "top_logprobs": [{one["token"]: one["logprob"] for one in entry["top_logprobs"]} for entry in entries],
            "text_offset": offsets,
        }

    def _entries(self, event: RequestEvent) -> list[dict[str, Any]]:
        entries = []
        for i, (token, logprob) in enumerate(zip(event.tokens.tolist(), event.logprobs.tolist(), strict=True)):
            entry: dict[str, Any] = self._token(token, logprob) | {"top_logprobs": []}
            if event.token_logprobs is not None and self.num_logprobs:
                tops = event.token_logprobs.raw_top_tokens[i], event.token_logprobs.raw_top_logprobs[i]
                pairs = zip(*(field[: self.num_logprobs].tolist() for field in tops), strict=True)
                entry["top_logprobs"] = [self._token(*pair) for pair in pairs]
            entries.append(entry)
        return entries

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        text = self.tokenizer.decode([token], skip_special=False)
        # JSON has no infinity.
        return {"token": text, "logprob": max(logprob, -9999.0), "bytes": list(text.encode())}


def usage(handles: list[RequestHandle], num_prompts: int) -> dict[str, Any]:
    """Returns the token counts of an answer.

    Args:
        handles: the requests, those of one prompt in sequence.
        num_prompts: number of prompts, each of which counts once.
    """
    step = len(handles) // num_prompts
    num_prompt = sum(len(handle.request.prompt) for handle in handles[::step])
    num_tokens = sum(handle.num_tokens for handle in handles)
    num_accepted = sum(handle.num_accepted for handle in handles)
    num_steps = sum(handle.num_steps for handle in handles)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_tokens,
        "total_tokens": num_prompt + num_tokens,
        "completion_tokens_details": {
            "accepted_prediction_tokens": num_accepted,
            "rejected_prediction_tokens": sum(handle.num_drafted for handle in handles) - num_accepted,
        },
        "speculation": {"num_steps": num_steps, "tokens_per_pass": num_tokens / num_steps if num_steps else None},
    }


def finish_reason(reason: str | None) -> str | None:
    """Returns the reason in the words of OpenAI's API."""
    return reason if reason in (None, "stop", "length") else "error"


def error_body(message: str, kind: str, param: str | None = None) -> dict[str, Any]:
    """Returns the object of an error."""
    return {"error": {"message": message, "type": kind, "param": param, "code": None}}
