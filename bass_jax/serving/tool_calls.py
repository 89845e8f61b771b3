"""Tools: what a client offers, the grammar of a call that must be made, and the calls in the text of an answer."""

import json
import re
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

MARK, END = "<tool_call>", "</tool_call>"
"""Around a call, in the text of the models whose templates say so (Qwen, Hermes). Others write the JSON alone."""


def call_schema(functions: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the JSON schema of a call of one of `functions`, each with a name and the schema of its arguments."""
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": function["name"]},
                "arguments": function.get("parameters") or {"type": "object"},
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for function in functions
    ]
    # Without this a model could write white space until it reaches its limit.
    return {"anyOf": calls, "x-guidance": {"whitespace_flexible": False}}


def split_calls(text: str, names: Sequence[str]) -> tuple[str, list[dict[str, Any]]]:
    """Returns the text of an answer without its calls, and the calls as in OpenAI's API.

    A call is JSON with the name of a tool and its ``arguments`` (or ``parameters``), either the whole answer or between
    `MARK` and `END`. If one of them is anything else, the whole answer is text.

    Args:
        text: of the answer.
        names: of the tools.
    """
    if MARK in text:
        content, *rest = text.split(MARK)
        parts = [part.partition(END)[0] for part in rest]
    else:
        content, parts = "", [text]
    calls = [_call(part, names) for part in parts]
    if any(call is None for call in calls):
        return text, []
    return content.rstrip(), [call for call in calls if call is not None]


def num_visible(text: str) -> int:
    """Returns how many characters at the beginning of a text that is being written cannot be part of a call."""
    if not text.strip() or text.lstrip()[0] == "{":
        return 0
    if MARK in text:
        return len(text[: text.index(MARK)].rstrip())
    held = next((num for num in range(len(MARK) - 1, 0, -1) if text.endswith(MARK[:num])), 0)
    return len(text[: len(text) - held].rstrip())


def _call(text: str, names: Sequence[str]) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
    except ValueError:
        return None
    if not isinstance(value, dict) or value.get("name") not in names:
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if not isinstance(arguments, dict):
        return None
    function = {"name": value["name"], "arguments": json.dumps(arguments, ensure_ascii=False)}
    return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}


def is_function_name(name: str) -> bool:
    """Returns whether a function can have this name in OpenAI's API."""
    return re.fullmatch("[a-zA-Z0-9_-]{1,64}", name) is not None
