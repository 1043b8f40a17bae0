"""Random bodies that write and read data of their own, and write files."""

import random
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from shardmap_torch import P, ShardMapError, make_mesh, shard_map
from tests.checker.support.classes.trials import EQUAL, REFUSED, WRONG

MESHES: Final = {
    strategy: make_mesh((2,), ("i",), kind="simulated", simulate=strategy)
    for strategy in ("ranks", "auto")
}
X: Final = torch.arange(1.0, 5.0, dtype=torch.float64)

SETUP: Final = """
import time
from argparse import Namespace
from collections import deque
import torch

log, table, seen, queue, count = [], {}, set(), deque([1, 2, 3]), 0
args, layer, constant = Namespace(step=0), torch.nn.Module(), 3
layer.calls = 0

def outer():
    hidden = 0
    def tick():
        nonlocal hidden
        hidden += 1
        return hidden
    return tick

tick = outer()
"""

WRITES: Final = (
    "log.append(1)",
    "log.append(x.shape)",
    "log.extend([x.dtype] * 2)",
    "del log[:]",
    "table['n'] = table.get('n', 0) + 1",
    "table['shape'] = tuple(x.shape)",
    "table.setdefault('k', 2)",
    "table.clear()",
    "seen.add(len(seen))",
    "seen.add('x')",
    "queue.rotate(1)",
    "queue.append(queue.popleft())",
    "count += 1",
    "count = 5",
    "count = constant",
    "args.step += 1",
    "args.step = 2",
    "layer.calls += 1",
    "tick()",
    "open(path, 'a').write('x')",
    "open(path, 'w').write('xy')",
    "time.time()",
    "setattr(body, 'calls', getattr(body, 'calls', 0) + 1)",
)
"""Statements that leave something behind."""

READS: Final = (
    "x = x * len(log)",
    "x = x + table.get('n', 0)",
    "x = x * table.setdefault('k', 2)",
    "x = x * len(table)",
    "x = x + len(seen)",
    "x = x * (2 if 'x' in seen else 3)",
    "x = x * queue[0]",
    "x = x * count",
    "x = x + torch.tensor(float(count))",
    "x = x * 2 if count % 2 else x",
    "x = x[:1] * x if args.step > 1 else x",
    "x = x * args.step",
    "x = x * layer.calls",
    "x = x * tick()",
    "x = x + getattr(body, 'calls', 0)",
)
"""Statements whose effect on the result depends on state."""

HARMLESS: Final = ("x = x * 2", "x = x + constant", "x = x.sin()", "x = x * len([*range(3)])")


@dataclass(frozen=True)
class Impure:
    """Statements of a body; the truth is the same body run once on one device, with new state."""

    lines: tuple[str, ...]
    strategy: str

    right = True

    def _body(self, path: Path) -> Any:
        path.write_text("x")
        space: dict[str, Any] = {"path": str(path), "__name__": "script_of_a_user"}
        lines = [SETUP, "def body(x):", "    global count"]
        exec("\n".join([*lines, *(f"    {line}" for line in self.lines), "    return x"]), space)
        return space["body"]

    def fate(self) -> str:
        with tempfile.TemporaryDirectory() as folder:
            mapped: Any = shard_map(
                self._body(Path(folder) / "checked"),
                mesh=MESHES[self.strategy],
                in_specs=P("i"),
                out_specs=P("i"),
            )
            parts = X.chunk(2)
            truth = [self._body(Path(folder) / f"rank {i}") for i in range(2)]
            for _ in range(2):
                try:
                    found = mapped(X)
                except ShardMapError:
                    return REFUSED
                expected = [body(part) for body, part in zip(truth, parts, strict=True)]
                if not torch.equal(found, torch.cat(expected)):
                    return WRONG
        return EQUAL


def drawn(rng: random.Random) -> Impure:
    """Draws up to five statements."""
    tables: Mapping[str, tuple[str, ...]] = {"w": WRITES, "r": READS, "h": HARMLESS}
    kinds = rng.choice(("wh", "w", "r", "wr", "wr", "whr"))
    lines = tuple(rng.choice(tables[rng.choice(kinds)]) for _ in range(rng.randint(1, 5)))
    return Impure(lines, rng.choice(sorted(MESHES)))
