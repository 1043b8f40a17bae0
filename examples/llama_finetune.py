"""Fine-tunes SmolLM2-135M on the help topics of Python, with tensor and data parallelism.

    python examples/llama_finetune.py                          # 2x3 simulated ranks
    python examples/llama_finetune.py --compare                # and the same on one device
    torchrun --nproc-per-node 6 examples/llama_finetune.py     # the same on six processes

The state is saved as shards, loaded on a mesh of another shape, and exported from there as Hugging
Face lays out a Llama: `config.json` and `model.safetensors`.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run as a script, from anywhere

from examples.gpt.data import load_text, sample_batch
from examples.llama import hugging_face, model
from examples.llama.finetune import (
    AXES,
    initial,
    make_optimizer,
    sharded_loss,
    train,
    train_on_one_device,
)
from examples.llama.model import Config, Params
from examples.llama.pretrained import MissingModelError, find_weights, load
from shardmap_torch import Mesh, P, SpecError, device_put, full, make_mesh, saving


@dataclass(frozen=True)
class Results:
    """Findings of a run.

    Attributes:
        losses: of each step.
        expected: on one device; empty without `--compare`, and on ranks other than 0.
        held_out: losses of one batch of other text: on the first mesh, on the other mesh from the
            checkpoint, and on the first one from the exported file.
    """

    losses: list[float]
    expected: list[float]
    held_out: list[float]


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Reads the flags."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--mesh", type=_sizes, default="2x3", help="ranks: data x tensor parallel")
    parser.add_argument("--other", type=_sizes, default="6x1", help="mesh that loads what is saved")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=6, help="sequences a step")
    parser.add_argument("--length", type=int, default=32, help="tokens a sequence")
    parser.add_argument("--rate", type=float, default=1e-4, help="of learning")
    parser.add_argument("--layers", type=int, help="keep only the first ones")
    parser.add_argument("--text", type=int, default=50_000, help="characters to train on")
    parser.add_argument("--dtype", default="float32", choices=["float32", "float64"])
    parser.add_argument("--compare", action="store_true", help="train on one device as well")
    parser.add_argument("--out", type=Path, default=Path("out/llama"), help="folder for results")
    return parser.parse_args(arguments)


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(int(size) for size in text.split("x"))


def shorten(config: Config, params: Params, layers: int | None) -> tuple[Config, Params]:
    """Keeps the first layers, or all."""
    first = params["layers"][:layers]
    return replace(config, layers=len(first)), {**params, "layers": first}


def held_out_loss(mesh: Mesh, config: Config, params: Params, batch: Tensor) -> float:
    """Mean nats a token of global or placed parameters."""
    placed = device_put(params, mesh, model.specs(config))
    with torch.no_grad():
        return sharded_loss(mesh, config)(placed, device_put(batch, mesh, P("dp"))).item()


def difference(losses: Sequence[float], expected: Sequence[float]) -> float:
    """The largest, relative to what is expected."""
    pairs = zip(losses, expected, strict=True)
    return max(abs(found - wanted) / wanted for found, wanted in pairs)


def shown(batches: Sequence[Tensor], say: Callable[[str], None]) -> Iterator[Tensor]:
    """Says now and then how far the training is."""
    for done, batch in enumerate(batches):
        if done and done % 10 == 0:
            say(f"{done} of {len(batches)} steps")
        yield batch


def main(arguments: list[str] | None = None) -> Results:
    """Trains, saves, loads on another mesh, exports and loads that."""
    options = parse(arguments)
    ranks = max(options.mesh[1], options.other[1])
    config, params, tokenizer = load(find_weights(), ranks, getattr(torch, options.dtype))
    config, params = shorten(config, params, options.layers)
    mesh = make_mesh(options.mesh, AXES)

    def say(text: str) -> None:
        if mesh.rank == 0:
            print(text, flush=True)

    text = torch.tensor(tokenizer.encode(load_text().decode()[: options.text]))
    trained_on, held_out = text[: len(text) * 9 // 10], text[len(text) * 9 // 10 :]
    batches = [
        sample_batch(trained_on, options.length, options.batch, seed)
        for seed in range(options.steps)
    ]
    other_text = sample_batch(held_out, options.length, options.batch, seed=0)
    say(f"{mesh}, {config}, {len(text):,} tokens")

    optimizer = make_optimizer(mesh, config, params, options.rate)
    state, losses = train(
        mesh, config, optimizer, initial(mesh, config, params, optimizer), shown(batches, say)
    )
    say(f"loss {losses[0]:.4f} -> {losses[-1]:.4f} nats a token in {len(losses)} steps")

    where = saving.save(state, options.out / "checkpoint", options.steps)
    other = make_mesh(options.other, AXES)
    optimizer = make_optimizer(other, config, params, options.rate)
    loaded = saving.load(initial(other, config, params, optimizer), where.parent, options.steps)
    exported = options.out / "hugging_face"
    learned = full(loaded["params"])
    if mesh.rank == 0:
        hugging_face.export(learned, config, exported)
    if mesh.kind == "process_group":
        dist.barrier()
    _, read = hugging_face.load(exported, mesh.shape["tp"])
    found = [
        held_out_loss(mesh, config, state["params"], other_text),
        held_out_loss(other, config, loaded["params"], other_text),
        held_out_loss(mesh, config, read, other_text),
    ]
    say(f"saved in {where}, loaded on a {other}, exported to {exported}")
    say("held-out loss of each: " + ", ".join(f"{loss:.6f}" for loss in found))
    expected: list[float] = []
    if options.compare and mesh.rank == 0:
        _, expected = train_on_one_device(config, params, shown(batches, say), options.rate)
        say(f"as on one device: largest difference {difference(losses, expected):.1e}, relative")
    return Results(losses, expected, found)


if __name__ == "__main__":
    torch.set_num_threads(1)
    try:
        main()
    except (MissingModelError, SpecError) as error:
        sys.exit(str(error))
