"""Output of the demo: a progress bar in the terminal, and a drawing of the losses."""

from pathlib import Path

from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


def progress_bar(console: Console) -> Progress:
    """A bar whose task has the fields `loss` and `rate`."""
    return Progress(
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.3f} nats/byte"),
        TextColumn("{task.fields[rate]:,.0f} tokens/s"),
        TimeElapsedColumn(),
        console=console,
    )


def draw_losses(losses: list[float], levels: dict[str, float], path: Path) -> None:
    """The loss of every step, with a line at each named level."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(range(1, len(losses) + 1), losses, label="training loss")
    for (name, level), color in zip(levels.items(), ("tab:red", "tab:orange"), strict=True):
        axes.axhline(level, linestyle="--", color=color, label=f"{name} {level:.2f}")
    axes.set(xlabel="step", ylabel="nats a byte")
    axes.legend()
    figure.savefig(path, dpi=120)
