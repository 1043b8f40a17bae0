"""Private names of torch are in one package, which says which of them a release lacks."""

import ast
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo import convert_frame

from shardmap_torch.core.torch_private import names
from shardmap_torch.core.torch_private.engine import UncompiledMode
from shardmap_torch.core.torch_private.names import PrivateName, demand
from shardmap_torch.errors import UnsupportedTorchError

REPO = Path(__file__).parent.parent.parent
SOURCES = sorted(
    path
    for folder in ("shardmap_torch", "ops", "kernels")
    for path in (REPO / folder).rglob("*.py")
    if "torch_private" not in path.parts
)
OPERATORS = ("torch.ops.",)
"""Names of operators, not of Python: a table without a row for one refuses it."""
EVERY_NAME = (*names.ENGINE, *names.DTENSOR, *names.DYNAMO)


def _is_private(path: str) -> bool:
    parts = [part for part in path.split(".") if not part.startswith("__")]
    return any(part.startswith("_") for part in parts) and not path.startswith(OPERATORS)


def _imported(nodes: Sequence[ast.AST]) -> dict[str, str]:
    """The names that a module gives to torch's modules and what is in them, with their paths."""
    found = {}
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                root = alias.name if alias.asname else alias.name.split(".")[0]
                found[alias.asname or root] = root
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            for alias in node.names:
                found[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return {name: path for name, path in found.items() if path.split(".")[0] == "torch"}


def _read(nodes: Sequence[ast.AST], imported: dict[str, str]) -> Iterator[str]:
    """The paths under torch that a module reads, by attributes."""
    for node in nodes:
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.insert(0, node.attr)
            node = node.value
        if parts and isinstance(node, ast.Name) and node.id in imported:
            yield ".".join([imported[node.id], *parts])


def private_names(source: str) -> set[str]:
    """The private names of torch that a module imports or reads."""
    nodes = list(ast.walk(ast.parse(source)))
    imported = _imported(nodes)
    return {path for path in (*imported.values(), *_read(nodes, imported)) if _is_private(path)}


@pytest.mark.parametrize(
    ("line", "path"),
    [
        ("import torch\ntorch._C._current_graph_task_id()", "torch._C._current_graph_task_id"),
        ("from torch._ops import OpOverload", "torch._ops.OpOverload"),
        (
            "from torch.autograd import forward_ad as f\nf._level",
            "torch.autograd.forward_ad._level",
        ),
        ("import torch._guards as guards", "torch._guards"),
    ],
)
def test_a_private_name_is_seen(line: str, path: str) -> None:
    assert path in private_names(line)


def test_public_names_dunders_and_operators_are_not_private() -> None:
    source = "import torch\ntorch.nn.Linear\ntorch.__version__\ntorch.ops.aten._neg_view.default"
    assert private_names(source) == set()


def test_no_other_module_of_the_product_uses_a_private_name_of_torch() -> None:
    found = {
        f"{path.relative_to(REPO)}: {name}"
        for path in SOURCES
        for name in private_names(path.read_text())
    }
    assert found == set()


def test_this_torch_has_every_private_name() -> None:
    assert [name.path for name in EVERY_NAME if name.is_missing] == []


def test_missing_names_are_listed_all_at_once_with_what_needs_them() -> None:
    torch_has = PrivateName("torch._C:_current_graph_task_id", "a backward")
    gone = PrivateName("torch._C:_gone", "a backward")
    moved = PrivateName("torch._moved.module:name", "transforms")
    with pytest.raises(UnsupportedTorchError) as raised:
        demand([torch_has, gone, moved])
    first, *rest = str(raised.value).splitlines()
    assert first.startswith("shardmap_torch needs private names that torch 2.")
    assert rest == [
        "  torch._C._gone, for a backward",
        "  torch._moved.module.name, for transforms",
        "Known to work: torch 2.13 and 2.14. Install one of these, or a newer shardmap_torch.",
    ]


def _run(lines: str) -> str:
    command = [sys.executable, "-c", f"import torch\n{lines}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=REPO)
    return done.stdout.strip()


def test_importing_beside_a_torch_without_required_names_raises_one_clear_error() -> None:
    printed = _run(
        "del torch._C._current_graph_task_id, torch._C._functorch.is_batchedtensor\n"
        "try:\n    import shardmap_torch\n"
        "except ImportError as error:\n    print(type(error).__name__, error)"
    )
    name, *rest = printed.splitlines()
    assert name.startswith("UnsupportedTorchError shardmap_torch needs private names that torch")
    assert rest[:2] == [
        "  torch._C._current_graph_task_id, for collectives and checks in a backward",
        "  torch._C._functorch.is_batchedtensor, for torch.func transforms in and around a body",
    ]


def test_dynamo_compiles_nothing_of_what_handles_the_operations_of_a_mode() -> None:
    class Handling(UncompiledMode):
        def __init__(self) -> None:
            super().__init__()  # type: ignore[no-untyped-call]  # torch's
            self.count = 0

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            self.count = counted(self.count)
            return func(*args, **(kwargs or {}))

    def counted(count: int) -> int:
        return count + 1

    def body(x: torch.Tensor) -> torch.Tensor:
        return x.sin()

    compiled = torch.compile(body, backend="eager")
    with Handling() as mode:
        compiled(torch.ones(2))  # Dynamo skips what runs under a mode, and looks at all it calls
    looked_at = {code() for code in convert_frame.input_codes.seen}
    assert mode.count
    assert body.__code__ in looked_at
    assert looked_at.isdisjoint((Handling.__torch_dispatch__.__code__, counted.__code__))
