"""What a command redraws on the terminal while it works."""

import abc

from rich.console import Console, RenderableType
from rich.live import Live


class LiveView(abc.ABC):
    """Draws itself again and again between ``with`` and its end."""

    def __init__(self, console: Console, *, is_shown: bool):
        """Args: console: terminal to draw on; is_shown: False draws nothing."""
        self._live = Live(self, console=console, refresh_per_second=8, transient=True) if is_shown else None

    def __enter__(self):
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *exception) -> None:
        if self._live is not None:
            self._live.stop()

    @abc.abstractmethod
    def __rich__(self) -> RenderableType:
        """What is drawn now."""
