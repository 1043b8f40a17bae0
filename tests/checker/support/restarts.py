"""A program in three files, which is imported again as a restarted process would."""

import importlib
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Final
from unittest import mock

from shardmap_torch.checker.ir import rank_only
from shardmap_torch.checker.rules.registry import table_version
from shardmap_torch.checker.stored import circumstances

FILES: Final[Mapping[str, str]] = {
    "stored_base": """\
SCALE = 2.0

def scaled(x, by=1.0):
    return x * SCALE * by
""",
    "stored_layers": """\
from dataclasses import dataclass
import stored_base

class Kind:
    steep = False

@dataclass(frozen=True)
class Layer(Kind):
    gain: float
    words: frozenset = frozenset({"alpha", "beta", "gamma"})

    def __call__(self, x):
        y = stored_base.scaled(x) * self.gain
        return y.tanh() if self.steep else y.relu()
""",
    "stored_model": """\
import functools
import torch
from torch import nn
from shardmap_torch import I, P, R, all_reduce, convert, shard_map
import stored_layers

TABLE = {"doubled": 1, "limits": (1, 2.5)}
WEIGHT = torch.ones(3)

@functools.cache
def limit(name):
    return TABLE["limits"][name]

def make(mesh, check="local", layer=None):
    layer = layer or stored_layers.Layer(3.0)
    shift = 0.5
    halve = nn.Identity()

    def body(x, w, power=1):
        x = convert(x, "tp", src=I, dst=R)
        h = halve(layer(x @ w)) + shift * WEIGHT.sum()
        h = (h * limit(1)) ** power
        for _ in range(TABLE["doubled"]):
            h = 2 * h
        return all_reduce(h.sum(1), "tp", dst=I)

    specs = (P("dp", invariant={"tp"}), P(None, "tp"), None)
    return shard_map(body, mesh=mesh, in_specs=specs, out_specs=P("dp"), check=check)
""",
}


@contextmanager
def imported(folder: Path, edits: Mapping[str, tuple[str, str]] = {}) -> Iterator[ModuleType]:
    """Writes the files with some edits, by name of the file, and imports them as new modules."""
    for name, source in FILES.items():
        old, new = edits.get(name, ("", ""))
        assert old in source
        (folder / f"{name}.py").write_text(source.replace(old, new) if old else source)
    written, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    for name in FILES:
        sys.modules.pop(name, None)
    try:
        yield importlib.import_module("stored_model")
    finally:
        sys.dont_write_bytecode = written
        sys.path.remove(str(folder))
        for name in FILES:
            sys.modules.pop(name, None)


@contextmanager
def as_started() -> Iterator[None]:
    """Forgets what other tests have registered in this process, as a restarted one would."""
    others = table_version()

    def own() -> int:
        return table_version() - others

    with (
        mock.patch.object(circumstances, "table_version", own),
        mock.patch.object(rank_only, "_COMMUNICATING", set()),
    ):
        yield
