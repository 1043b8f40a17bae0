"""Measures a training step beside its alternatives, prints tables, and writes docs/train_step.md.

    python -m benchmarks.train_step [--widths 64,256,512] [--rounds 15] [--steps 3] [--out FILE]
        [--steps-of NAME ...]

The step is the one of examples/gpt: a 4-layer Llama with tensor and sequence parallelism over two
gloo processes, gradients clipped by their global norm, AdamW. Beside it the same step as Megatron
writes it, in autograd Functions on raw torch.distributed, and as a module that torch's
`parallelize_module` shards. All start from the same parameters, and must have the same losses.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Container, Sequence
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from benchmarks.train_step import profile, simulated
from benchmarks.train_step.rank import CONTESTANTS, ON_PROCESSES
from benchmarks.train_step.report import COMPILED, header, overhead_sheet, step_sheet

PAGE: Final = Path(__file__).resolve().parents[2] / "docs" / "train_step.md"
NUM_RANKS: Final = 2

INTRODUCTION: Final = """# Benchmark: a training step

This page compares a training step with the same step written by hand. The step is that of
`examples/gpt`: a Llama of 4 layers with tensor and sequence parallelism, gradients clipped by
their global norm, and AdamW, checked (the default).

- *By hand* is the same mathematics in autograd Functions on raw `torch.distributed`, as
  Megatron-LM writes them, with gradients of the norms' scales summed in one buffer and foreach
  updates in place.
- *parallelize_module* is the same model as a module that torch shards into DTensors, with
  `loss_parallel`, `clip_grad_norm_` and `torch.optim.AdamW(foreach=True)`.
- *Replayed* is ours with [replay=True](replay.md), as `examples/train_gpt.py` runs it.
- *Compiled* steps are compared with the step by hand whose loss, backward and update inductor has
  compiled.

Losses are compared before anything is timed. What else was measured, and the goals, are in
[benchmarks.md](benchmarks.md).
"""

ABOUT_SIMULATED: Final = """
All ranks in one process, beside a GPT of torch's own layers on one device, with
`torch.optim.AdamW`; of that, the loss and its backward are compiled, of ours the whole step.
"""

ABOUT_OVERHEAD: Final = """
Measured on torch's fake process group, where nothing is sent: a forward and a backward of one
collective in a body, beside an autograd Function on `torch.distributed`; AdamW alone in a checked
body, beside the same foreach calls on plain tensors; and whole training steps.
"""

ABOUT_CALLS: Final = """
Calls of Python functions and of builtins, counted at width 64 on the fake process group by
`python -m benchmarks.train_step.profile`. *Around them* is the boundary of the call, what being
checked costs, and pytrees. Numbers of calls are not times: the step takes 17.9 ms there and 14.1
ms by hand. Of the difference, 1.3 ms are in the forward, 1.1 ms in the norm and in the optimizer,
which makes new trees, and 1.4 ms around them, in pieces of 0.1 to 0.25 ms: comparing captured
state, making DTensors, flattening trees, freeing what was there before.
"""


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Reads the flags."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--widths", default="64,256,512")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=3, help="steps a round")
    # Those that are compiled take minutes each.
    eager = [name for name in CONTESTANTS if not name.endswith(COMPILED)]
    parser.add_argument("--steps-of", nargs="+", default=eager, choices=CONTESTANTS)
    parser.add_argument("--out", type=Path, default=PAGE)
    return parser.parse_args(arguments)


def measure_steps(options: argparse.Namespace, names: Container[str], num_ranks: int) -> list[Any]:
    """Starts the ranks, and reads what the first one prints; those of `names` that are wanted."""
    chosen = ",".join(each for each in options.steps_of if each in names)
    if not chosen:
        return []
    with tempfile.TemporaryDirectory() as folder:
        numbers = [str(num_ranks), str(options.rounds), str(options.steps)]
        rest = [f"{folder}/store", options.widths, chosen]
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.train_step.rank"]
        ranks = [
            subprocess.Popen(
                [*command, str(rank), *numbers, *rest], stdout=subprocess.PIPE, text=True
            )
            for rank in range(num_ranks)
        ]
        printed = [process.communicate()[0] for process in ranks]
    failed = [rank for rank, process in enumerate(ranks) if process.returncode]
    if failed:
        raise SystemExit(f"ranks {failed} failed; see above")
    return [json.loads(line) for line in printed[0].splitlines()]


def measure_alone(*arguments: str) -> Any:
    """Runs a module in a process of its own, whose process group is torch's fake one."""
    command = [sys.executable, "-W", "ignore", "-m", *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout)


def main() -> None:
    """Measures, prints and writes."""
    options = parse()
    about = "\n".join(header(options.rounds, options.steps))
    steps = step_sheet("A training step", measure_steps(options, ON_PROCESSES, NUM_RANKS))
    alone = step_sheet("The step on simulated meshes", measure_steps(options, simulated.MADE, 1))
    overhead = overhead_sheet(measure_alone("benchmarks.train_step.overhead"))
    calls = profile.sheet(measure_alone("benchmarks.train_step.profile", "--json"))
    console = Console()
    console.print(about, markup=False, highlight=False)
    for sheet in (steps, alone, overhead, calls):
        sheet.show(console)
    tables = [steps.markdown(), alone.markdown() + ABOUT_SIMULATED]
    tables += [overhead.markdown() + ABOUT_OVERHEAD, calls.markdown() + ABOUT_CALLS]
    parts = [INTRODUCTION, about + "\n", *tables]
    options.out.write_text("\n".join(parts))
    console.print(f"wrote {options.out}", markup=False, highlight=False)


if __name__ == "__main__":
    main()
