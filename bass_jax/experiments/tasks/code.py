"""Extracts code from an answer."""

import re

_OPENING = re.compile(r"^[ \t]*```[^\n`]+\n", re.MULTILINE)
_CLOSING = re.compile(r"^[ \t]*```.*\Z", re.DOTALL | re.MULTILINE)


def code_of(answer: str) -> str:
    """Returns the first fenced block with a language, or else the answer up to a fence.

    A fence without a language closes a block. The question or the given start of the answer may have opened it.
    """
    opened, closed = _OPENING.search(answer), _CLOSING.search(answer)
    if opened is not None and closed is not None and closed.start() >= opened.start():
        answer = answer[opened.end() :]
    return _CLOSING.sub("", answer)
