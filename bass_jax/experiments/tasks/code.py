"""Code inside an answer."""

import re

_OPENING = re.compile(r"^[ \t]*```[^\n`]+\n", re.MULTILINE)
_CLOSING = re.compile(r"^[ \t]*```.*\Z", re.DOTALL | re.MULTILINE)


def code_of(answer: str) -> str:
    """Returns the code of an answer: its first fenced block with a language, else all of it up to a fence.

    A fence without a language closes a block, which the question or the answer's given start may have opened.
    """
    opened, closed = _OPENING.search(answer), _CLOSING.search(answer)
    if opened is not None and closed is not None and closed.start() >= opened.start():
        answer = answer[opened.end() :]
    return _CLOSING.sub("", answer)
