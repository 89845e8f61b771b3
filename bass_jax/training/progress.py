"""Shows how far a distillation is, in a terminal."""

from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from bass_jax.training.distill_config import DistillConfig
from bass_jax.training.train_log import TrainProgress
from bass_jax.training.write_corpus import WriteProgress


class DistillProgress:
    """One bar for the corpus and one for the training."""

    def __init__(self, config: DistillConfig, *, is_shown: bool = True):
        """Args: config: of the distillation; is_shown: draw at all."""
        self._config = config
        self._bars = Progress(
            TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"),
            TextColumn("{task.fields[figures]}"), TimeRemainingColumn(), disable=not is_shown,
        )  # fmt: skip
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> "DistillProgress":
        self._bars.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bars.stop()

    def wrote(self, line: WriteProgress) -> None:
        """Shows the corpus' progress."""
        figures = f"{line.num_tokens:,} tokens, {line.tokens_per_second:,.0f}/s"
        self._show("corpus", line.num_tokens, line.wanted, figures)

    def trained(self, line: TrainProgress) -> None:
        """Shows the training's progress."""
        figures = (
            f"step {line.step}, loss {line.loss:.3f}, agreement {line.agreement:.3f}, "
            f"{line.tokens_per_second:,.0f} tokens/s"
        )
        self._show("train", line.step, self._config.training.num_steps, figures)

    def _show(self, name: str, completed: int, total: int, figures: str) -> None:
        if name not in self._tasks:
            self._tasks[name] = self._bars.add_task(name, total=total, figures="")
        self._bars.update(self._tasks[name], completed=completed, total=total, figures=figures)
