"""Measures a training step of the example GPT under several ways to share the work, side by side.

    python -m examples.profile                                   # plain, tp, tp+sp, tp+sp+overlap
    python -m examples.profile --parallel plain fsdp zero --ranks 4
    python -m examples.profile --parallel plain+ep ep ep+tp         # mixtures of experts
    torchrun --nproc-per-node 4 -m examples.profile              # on processes

Loss and gradient norm must be those of the plain model on one device. The bytes are those that the
checked program says, forward and backward; time and memory are measured, on a simulated mesh of all
ranks together, in one process. On processes that send by gloo, the communication is measured too,
and how much of it is hidden: under way while its rank computes.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

# torch's profiler, which counts the memory, says on the terminal when it starts.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")

import torch
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from examples.gpt import data, model, plain, step
from examples.gpt.model import Config, Params
from examples.gpt.optim import make_optimizer
from examples.gpt.parallel import Parallel
from shardmap_torch import Mesh, P, device_put, full, make_mesh, shard_map, trace
from shardmap_torch.optim import clip_by_global_norm, global_norm

PLAIN = {"plain": "dp", "plain+ep": "ep", "plain+pp+ep": "pp+ep"}
"""The model on one device, with mixtures of experts, and those balanced in each microbatch."""

DEFAULT = ("plain", "tp", "tp+sp", "tp+sp+overlap")


def sizes_of(num_axes: int, ranks: int) -> tuple[int, ...]:
    """Gives each axis but the last two ranks, and the last one the rest."""
    return (*[2] * (num_axes - 1), ranks // 2 ** (num_axes - 1))


@dataclass(frozen=True)
class Measured:
    """Time, memory and bytes that a step of one choice takes.

    Attributes:
        loss: of the first step.
        norm: of its gradients, before they are clipped.
        milliseconds: the median of the steps after the first.
        peak_bytes: the most that a step has allocated at once, parameters and state left out.
        sent: bytes that each rank sends in a step, by axis.
        communicating: milliseconds of a step in which messages between processes are under way.
        hidden: the part of that time in which this rank computes; None where there is none.
    """

    loss: float
    norm: float
    milliseconds: float
    peak_bytes: int
    sent: Mapping[str, int]
    communicating: float
    hidden: float | None


def measure(choice: str, config: Config, ranks: int, batch: Tensor, steps: int) -> Measured:
    """Runs some steps of one choice."""
    if choice in PLAIN:
        config = replace(config, parallel=Parallel.of(PLAIN[choice]))
        return _measured(*_plain(config, batch), steps, {})
    names = choice.removesuffix("+overlap")
    parallel = Parallel.of(names)
    overlap: Any = "auto" if choice.endswith("+overlap") else "off"
    config = replace(config, parallel=parallel, overlap=overlap)
    sizes = parallel.mesh_sizes(sizes_of(len(parallel.axes), ranks))
    views = parallel.views(sizes, config.experts)
    mesh = make_mesh(sizes, parallel.mesh_axes, views=views)
    return _measured(*_sharded(mesh, config, batch), steps, bytes_sent(mesh, config, batch))


Step = Callable[[], float]
Norm = Callable[[], float]


def _plain(config: Config, batch: Tensor) -> tuple[Step, Norm]:
    """A step on one device, by the model in torch's own layers."""
    optimizer = make_optimizer(config, steps=1000).optimizer  # type: ignore[attr-defined]
    params, num_microbatches = model.init(config), config.num_microbatches
    state = optimizer.init(params)

    def run() -> float:
        nonlocal params, state
        loss, grads = plain.loss_and_grads(params, batch, num_microbatches)
        grads, _ = clip_by_global_norm(grads)
        params, state = optimizer.update(params, grads, state)
        return loss.item()

    return run, lambda: global_norm(plain.loss_and_grads(params, batch, num_microbatches)[1]).item()


def _sharded(mesh: Mesh, config: Config, batch: Tensor) -> tuple[Step, Norm]:
    specs = model.specs(config)
    optimizer = make_optimizer(config, steps=1000)
    params = device_put(model.init(config), mesh, specs)
    state = device_put(optimizer.init(model.init(config)), mesh, optimizer.specs(specs))
    train = step.sharded_step(mesh, config, optimizer)
    placed = device_put(batch, mesh, P("dp"))

    def run() -> float:
        nonlocal params, state
        params, state, loss = train(params, state, placed)
        return float(full(loss))

    def norm(params: Params, batch: Tensor) -> Tensor:
        return global_norm(step.loss_and_grads(params, batch, config)[1], specs)

    measured = shard_map(norm, mesh=mesh, in_specs=(specs, P("dp")), out_specs=P())
    return run, lambda: float(full(measured(params, placed)))


def bytes_sent(mesh: Mesh, config: Config, batch: Tensor) -> Mapping[str, int]:
    """Counts the bytes that a step's program sends, on an abstract mesh of the same shape."""
    views = config.parallel.views(mesh.axis_sizes, config.experts)
    abstract = make_mesh(mesh.axis_sizes, mesh.axis_names, kind="abstract", views=views)
    optimizer = make_optimizer(config, steps=1000)
    params = model.init(config)
    train = step.sharded_step(abstract, config, optimizer)
    sent = trace(train, params, optimizer.init(params), batch).bytes_sent()
    return {str(axis): count for axis, count in sorted(sent.items()) if count}


def _measured(run: Step, norm: Norm, steps: int, sent: Mapping[str, int]) -> Measured:
    first_norm = norm()
    loss = run()
    seconds = []
    for _ in range(steps):
        began = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - began)
    peak, communicating, hidden = _recorded(run)
    milliseconds = 1e3 * statistics.median(seconds)
    return Measured(loss, first_norm, milliseconds, peak, sent, communicating, hidden)


def _recorded(run: Step) -> tuple[int, float, float | None]:
    """Runs one step under torch's profiler: the peak of memory, and the last two of `Measured`."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        run()
    recorded: Any = profiled.profiler
    events = recorded.kineto_results.events()
    messages, work = (_spans(events, prefix) for prefix in ("gloo:", "aten::"))
    both = sum(max(0, min(a[1], b[1]) - max(a[0], b[0])) for a in messages for b in work)
    total = sum(end - start for start, end in messages)
    if torch.cuda.is_available():
        peak = torch.cuda.max_memory_allocated() - before
    else:
        peak = _peak_bytes(events)
    return peak, total / 1e6, both / total if total else None


def _spans(events: Sequence[Any], prefix: str) -> list[tuple[int, int]]:
    """Finds the nanoseconds in which something of these names runs, as disjoint intervals."""
    spans: list[tuple[int, int]] = []
    named = (event for event in events if event.name().startswith(prefix))
    for start, end in sorted((event.start_ns(), event.end_ns()) for event in named):
        if spans and start <= spans[-1][1]:
            spans[-1] = spans[-1][0], max(end, spans[-1][1])
        else:
            spans.append((start, end))
    return spans


def _peak_bytes(events: Sequence[Any]) -> int:
    """The largest sum of what is allocated and not yet freed."""
    total = peak = 0
    allocations = (event for event in events if event.name() == "[memory]")
    for event in sorted(allocations, key=lambda event: event.start_ns()):
        total += event.nbytes()
        peak = max(peak, total)
    return peak


def show(results: Mapping[str, Measured], title: str, console: Console) -> None:
    """Prints a row for each choice."""
    table = Table(title=title)
    table.add_column("parallel", no_wrap=True)
    for name in ("loss", "gradient norm", "step ms", "peak MB", "sent by each rank", "sending ms"):
        table.add_column(name, justify="right")
    for choice, found in results.items():
        sent = ", ".join(f"{axis} {count / 1e6:.3f} MB" for axis, count in found.sent.items())
        numbers = f"{found.loss:.6f}", f"{found.norm:.6f}", f"{found.milliseconds:.1f}"
        sending = f"{found.communicating:.1f}"
        if found.hidden is not None:
            sending += f", {found.hidden:.0%} hidden"
        memory = f"{found.peak_bytes / 1e6:.2f}"
        table.add_row(choice, *numbers, memory, sent or "nothing", sending)
    console.print(table)


def draw(results: Mapping[str, Measured], path: Path) -> None:
    """Bars of time, memory and bytes, a picture for each."""
    figure = Figure(figsize=(10, 3.5), layout="constrained")
    panels: Any = figure.subplots(1, 3)
    heights = {
        "step time, ms": [found.milliseconds for found in results.values()],
        "peak memory, MB": [found.peak_bytes / 1e6 for found in results.values()],
        "sent by each rank, MB": [sum(found.sent.values()) / 1e6 for found in results.values()],
    }
    for axes, (title, values) in zip(panels, heights.items(), strict=True):
        axes.bar(range(len(values)), values)
        axes.set_xticks(range(len(values)), list(results), rotation=30, ha="right")
        axes.set_title(title)
    figure.savefig(path, dpi=120)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Reads the flags."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--parallel", nargs="+", default=DEFAULT, help="choices; see train_gpt.py")
    parser.add_argument("--ranks", type=int, default=4, help="simulated ranks")
    parser.add_argument("--steps", type=int, default=5, help="steps that are timed")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("out"))
    options = parser.parse_args(arguments)
    for choice in options.parallel:
        try:
            choice in PLAIN or Parallel.of(choice.removesuffix("+overlap"))
        except ValueError as error:
            parser.error(str(error))
    return options


def main(arguments: list[str] | None = None) -> dict[str, Measured]:
    """Measures, prints the table, and writes the picture and the numbers."""
    options = parse(arguments)
    ranks = int(os.environ.get("WORLD_SIZE", options.ranks))
    rank = int(os.environ.get("RANK", 0))
    config = Config(length=options.length, width=options.width, layers=options.layers)
    text = torch.tensor(list(data.load_text()))
    batch = data.sample_batch(text, config.length, options.batch, seed=0)
    results = {
        choice: measure(choice, config, ranks, batch, options.steps) for choice in options.parallel
    }
    where = "processes" if "WORLD_SIZE" in os.environ else "simulated ranks in one process"
    if rank == 0:
        show(results, f"one step on {ranks} {where}", Console())
        options.out.mkdir(parents=True, exist_ok=True)
        draw(results, options.out / "profile.png")
        numbers = {choice: asdict(found) for choice, found in results.items()}
        (options.out / "profile.json").write_text(json.dumps(numbers, indent=2))
        Console().print(f"wrote {options.out / 'profile.png'}")
    return results
