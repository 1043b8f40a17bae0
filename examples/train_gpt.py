"""Trains a small GPT on the help topics of Python, with tensor, sequence and data parallelism.

    python examples/train_gpt.py                        # 2x4 simulated ranks in this process
    python examples/train_gpt.py --parallel fsdp+tp     # sharded in another way; see --help
    torchrun --nproc-per-node 2 examples/train_gpt.py --mesh 1x2     # the same on two processes
    torchrun ... --overlap                              # with overlapped matmuls where they pay
    torchrun --max-restarts 3 ... --checkpoint out/run --resume      # goes on after a crash

The model is `examples/gpt/model.py`, its parallel layers `layers.py`, the train step `step.py`.
"""

import argparse
import json
import sys
import time
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.text import Text
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run as a script, from anywhere

from examples.gpt import data, model
from examples.gpt.check import compare, tolerance
from examples.gpt.model import Config, Params
from examples.gpt.optim import make_optimizer
from examples.gpt.parallel import CHOICES, Parallel
from examples.gpt.report import draw_losses, progress_bar
from examples.gpt.step import (
    LossAndGrads,
    logits_spec,
    sharded_logits,
    sharded_loss,
    sharded_loss_and_grads,
    sharded_next_logits,
    sharded_step,
)
from shardmap_torch import Mesh, P, device_put, make_mesh, visualize_sharding
from shardmap_torch.optim import Optimizer
from shardmap_torch.saving import latest, load, save

DEFAULT_SIZES = {1: (4,), 2: (2, 4), 3: (2, 2, 2), 4: (2, 2, 2, 2)}
LAST = 20  # the final loss is the mean over so many steps


@dataclass(frozen=True)
class Run:
    """Values that one run of this program works with."""

    options: argparse.Namespace
    config: Config
    mesh: Mesh
    console: Console
    text: Tensor
    held_out: Tensor

    def batch(self, step: int) -> Tensor:
        """Global batch [b, t+1], the same on every rank."""
        return self._sample(self.text, self.options.seed + step)

    def held_out_batch(self, step: int) -> Tensor:
        """Samples a batch from text that is never trained on."""
        return self._sample(self.held_out, step)

    def _sample(self, text: Tensor, seed: int) -> Tensor:
        batch = data.sample_batch(text, self.config.length, self.options.batch, seed)
        return device_put(batch, self.mesh, P("dp"))


def mesh_sizes(text: str) -> tuple[int, ...]:
    """Reads 2x4."""
    return tuple(int(size) for size in text.split("x"))


def parallel(text: str) -> Parallel:
    """Reads dp+tp+sp."""
    try:
        return Parallel.of(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def sizes() -> dict[str, int]:
    """The model's sizes, and their defaults."""
    return {each.name: getattr(Config(), each.name) for each in fields(Config) if each.type is int}


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Reads the flags."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    choices = "; ".join(f"{name}: {meaning}" for name, meaning in CHOICES.items())
    parser.add_argument("--parallel", type=parallel, default="dp+tp+sp", help=choices)
    parser.add_argument(
        "--mesh",
        type=mesh_sizes,
        help="ranks along each axis, data x context x pipeline x tensor: 2x4",
    )
    parser.add_argument("--strategy", default="auto", choices=["auto", "vmap", "ranks"])
    parser.add_argument("--device", help="cpu or cuda; by default where the mesh's kind runs")
    parser.add_argument("--dtype", default="float32", choices=["float32", "float64"])
    parser.add_argument(
        "--overlap",
        nargs="?",
        const="auto",
        default="off",
        choices=["auto", "require", "off"],
        help="hide the layers' communication behind their matmuls: where it pays, or everywhere",
    )
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--batch", type=int, default=16, help="sequences a step")
    parser.add_argument("--check", type=int, default=3, help="steps compared with one device")
    parser.add_argument("--sample", type=int, default=240, help="bytes written at the end")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for results")
    parser.add_argument("--checkpoint", type=Path, help="folder to save the training state in")
    parser.add_argument("--every", type=int, default=20, help="steps between two checkpoints")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint")
    for name, default in sizes().items():
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args(arguments)
    axes = options.parallel.axes
    sizes_of_axes = dict(zip(axes, DEFAULT_SIZES[len(axes)], strict=True))
    if "pp" in sizes_of_axes:
        sizes_of_axes["pp"] = options.layers  # its ranks must divide them
    options.mesh = options.mesh or tuple(sizes_of_axes.values())
    if len(options.mesh) != len(axes):
        parser.error(f"--mesh needs {len(axes)} sizes, of {' x '.join(axes)}")
    num_groups = options.parallel.mesh_sizes(options.mesh)[0] * (
        options.microbatches if options.parallel.has_stages else 1
    )
    if options.batch % num_groups:
        parser.error(
            f"--batch {options.batch} must be a multiple of {num_groups}: dp x microbatches"
        )
    if options.steps < 1:
        parser.error("--steps must be at least 1")
    if options.resume and options.checkpoint is None:
        parser.error("--resume needs --checkpoint")
    return options


def start(options: argparse.Namespace) -> Run:
    """Makes the mesh and loads the text."""
    config = Config(
        **{name: getattr(options, name) for name in sizes()},
        overlap=options.overlap,
        parallel=options.parallel,
    )
    sizes_of_axes = options.parallel.mesh_sizes(options.mesh)
    mesh = make_mesh(
        sizes_of_axes,
        options.parallel.mesh_axes,
        views=options.parallel.views(sizes_of_axes, config.experts),
        simulate=options.strategy,
        device=options.device,
    )
    text = torch.tensor(list(data.load_text()))
    split = len(text) * 19 // 20
    return Run(options, config, mesh, Console(quiet=mesh.rank != 0), text[:split], text[split:])


def show_sharding(run: Run, params: Params) -> None:
    """Prints which ranks hold which part of a weight, a batch and the logits."""
    tokens = run.batch(0)[:, :-1]
    logits = sharded_logits(run.mesh, run.config)(params, tokens)
    shown: dict[str, tuple[Any, P]] = {
        **one_weight(params["layers"], model.specs(run.config)["layers"]),
        "the batch [sequences, positions]": (tokens, P("dp")),
    }
    if run.config.parallel.context is None:  # else three dims are sharded, and a table shows two
        name = "the logits [sequences, positions, vocabulary]"
        shown[name] = logits, logits_spec(run.config)
    for name, (value, spec) in shown.items():
        run.console.print(f"\n{name}", style="bold", markup=False, highlight=False)
        visualize_sharding(value, mesh=run.mesh, spec=spec, console=run.console)


def one_weight(layers: Params, specs: Params) -> dict[str, tuple[tuple[int, ...], P]]:
    """A weight and its spec by its name; those of a pipeline are of all layers.

    A table shows two sharded dims: of more, the first layer's or expert's.
    """
    stacked = isinstance(layers, dict)
    down, spec = (layers, specs) if stacked else (layers[0], specs[0])
    (*shape,), (*entries,) = down["down"].shape, spec["down"].entries
    names = ["layer"] * stacked + ["expert"] * (len(shape) - 2 - stacked) + ["hidden", "width"]
    while len(P(*entries).sharded_dims) > 2:
        del shape[0], entries[0], names[0]
    where = "layers" if stacked else "layers[0]"
    return {f"one weight, {where}['down'] [{', '.join(names)}]": (tuple(shape), P(*entries))}


def check(run: Run, sharded: LossAndGrads, step: int, params: Params) -> None:
    """Compares loss and gradients of this step with one device, in two precisions."""
    for dtype in dict.fromkeys((torch.float64, getattr(torch, run.options.dtype))):
        batch = run.batch(step)
        errors = compare(sharded, params, batch, dtype, run.config.num_microbatches)
        worst = max(errors, key=lambda name: errors[name])
        run.console.print(
            f"step {step + 1}, {dtype}: loss and {len(errors) - 1} gradients equal one device's; "
            f"largest relative error {errors[worst]:.1e} ({worst}), "
            f"allowed {tolerance(dtype, batch[:, 1:].numel()):.1e}"
        )


def initial(run: Run, optimizer: Optimizer) -> dict[str, Any]:
    """The state of training before its first step: what a checkpoint holds."""
    weights = model.init(run.config, run.options.seed, getattr(torch, run.options.dtype))
    specs = model.specs(run.config)
    params = device_put(weights, run.mesh, specs)
    moments = device_put(optimizer.init(params), run.mesh, optimizer.specs(specs))
    losses = torch.full([run.options.steps], torch.nan, dtype=torch.float64)
    return {"params": params, "optimizer": moments, "losses": losses}


def train(run: Run, optimizer: Optimizer, state: dict[str, Any], done: int) -> None:
    """Trains from step `done` on, and changes the state; the first steps are checked."""
    # What Python does once need not be done in each step; overlapped kernels are not recorded.
    replays = run.options.strategy != "ranks" and run.options.overlap == "off"
    step = sharded_step(run.mesh, run.config, optimizer, replay=replays)
    sharded = sharded_loss_and_grads(run.mesh, run.config)
    tokens = run.options.batch * run.config.length
    with progress_bar(run.console) as progress:
        total = run.options.steps
        task = progress.add_task("train", total=total, completed=done, loss=float("nan"), rate=0)
        for number in range(done, total):
            if number < run.options.check:
                check(run, sharded, number, state["params"])
            began = time.perf_counter()
            batch = run.batch(number)
            params, moments, loss = step(state["params"], state["optimizer"], batch)
            state.update(params=params, optimizer=moments)
            state["losses"][number] = loss.item()
            rate = tokens / (time.perf_counter() - began)
            progress.update(task, advance=1, loss=state["losses"][number].item(), rate=rate)
            if run.options.checkpoint and (number + 1) % run.options.every == 0:
                save(state, run.options.checkpoint, number + 1, keep=2)


def held_out_loss(run: Run, params: Params, num_batches: int = 8) -> float:
    """Mean nats a byte on text that was not trained on."""
    loss = sharded_loss(run.mesh, run.config)
    return sum(loss(params, run.held_out_batch(i)).item() for i in range(num_batches)) / num_batches


def sample(run: Run, params: Params, temperature: float = 0.7) -> tuple[str, str]:
    """The end of the held-out text, and how the model continues it; every rank draws the same."""
    next_logits = sharded_next_logits(run.mesh, run.config)
    generator = torch.Generator().manual_seed(run.options.seed)
    text = run.held_out[-run.config.length :].tolist()
    num_copies = run.mesh.shape["dp"]  # the batch must divide over "dp"
    for _ in range(run.options.sample):
        window = torch.tensor([text[-run.config.length :]] * num_copies)
        logits = next_logits(params, device_put(window, run.mesh, P("dp")))[0].double().cpu()
        drawn = torch.multinomial((logits / temperature).softmax(0), 1, generator=generator)
        text.append(int(drawn))
    prompt, written = bytes(text[: run.config.length]), bytes(text[run.config.length :])
    return prompt.decode(errors="replace"), written.decode(errors="replace")


def report(run: Run, params: Params, losses: list[float]) -> None:
    """Prints what was learned, and writes the losses and their curve."""
    whole = torch.cat([run.text, run.held_out]).tolist()
    levels = {
        "unigram entropy": data.unigram_entropy(whole),
        "bigram entropy": data.bigram_entropy(whole),
    }
    last = losses[-LAST:]
    results = {"final loss": sum(last) / len(last), "held-out loss": held_out_loss(run, params)}
    run.console.print()
    for name, value in {**levels, **results}.items():
        run.console.print(f"{name:16} {value:.3f} nats/byte")
    prompt, written = sample(run, params)
    run.console.print("\n[bold]sample[/]")
    run.console.print(Text.assemble((prompt, "dim"), written))
    if run.mesh.rank == 0:
        run.options.out.mkdir(parents=True, exist_ok=True)
        draw_losses(losses, levels, run.options.out / "loss.png")
        (run.options.out / "losses.json").write_text(json.dumps(losses))
        run.console.print(f"\nwrote {run.options.out / 'loss.png'}")


def main(arguments: list[str] | None = None) -> list[float]:
    """Runs the demo and returns the loss of every step."""
    run = start(parse(arguments))
    optimizer = make_optimizer(run.config, run.options.steps)
    state = initial(run, optimizer)
    run.console.print(f"{run.mesh}, {run.config}, {len(run.text):,} bytes of text")
    done = latest(run.options.checkpoint) if run.options.resume else None
    if done is not None:
        state = load(state, run.options.checkpoint, done)
        run.console.print(f"resumed after step {done}")
    show_sharding(run, state["params"])
    train(run, optimizer, state, done or 0)
    losses: list[float] = state["losses"].tolist()
    report(run, state["params"], losses)
    return losses


if __name__ == "__main__":
    torch.set_num_threads(1)  # the tensors are small, and more threads wait for each other
    main()
