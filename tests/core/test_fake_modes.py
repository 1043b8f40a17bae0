"""A first check imports neither Dynamo nor sympy, and its fake tensors are torch's own."""

import itertools
import subprocess
import sys
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from shardmap_torch.core.torch_private import fake_modes

FIRST = """
import sys
import torch
import shardmap_torch as sm
from torch.nn import functional as F

def block(x, w, v):
    h = F.layer_norm(x, x.shape[-1:]).softmax(-1)
    h = torch.relu(F.gelu(sm.convert(h, "tp", src=sm.I, dst=sm.R) @ w))
    return x + sm.all_reduce(h @ v, "tp", dst=sm.I)

def step(x, w, v, targets):
    def loss(w, v):
        y = block(x, w, v)
        return F.cross_entropy(y, targets) + F.mse_loss(y, x)
    value, grads = sm.value_and_grad(loss, argnums=(0, 1))(w, v)
    return value, *grads

specs = sm.P(), sm.P(None, "tp"), sm.P("tp")
map_over = dict(mesh=sm.make_mesh((2,), ("tp",), kind="simulated"), check="global")
f = sm.shard_map(block, in_specs=specs, out_specs=sm.P(), **map_over)
g = sm.shard_map(step, in_specs=(*specs, sm.P()), out_specs=specs, **map_over)
x, w, v = (torch.randn(s) for s in ((3, 4), (4, 8), (8, 4)))
g(x, w, v, torch.tensor([0, 3, 1]))
f(x, w.requires_grad_(), v.requires_grad_()).sum().backward()
print(sorted({"torch._dynamo", "sympy", "torch.distributed.tensor"} & set(sys.modules)))
"""


@pytest.mark.slow
def test_a_first_check_imports_no_compiler() -> None:
    done = subprocess.run([sys.executable, "-c", FIRST], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_what_stands_for_symbols_answers_as_torch_does() -> None:
    real = fake_modes._imported(fake_modes.SYMBOLS)
    values = [True, False, 0, 3, (), (3, 4), [3, 4], torch.Size([3, 4]), 1.5, None]
    values += [(True,), torch.ones(2, 3), torch.ones(2).to_sparse(), "x"]
    for name, function in fake_modes._FUNCTIONS.items():
        for number in (0, 1, 2):
            for args in itertools.product(values, repeat=number):
                assert result_of(function, args) == result_of(getattr(real, name), args), name


def result_of(function: Any, args: tuple[Any, ...]) -> Any:
    try:
        result = function(*args)
    except Exception as error:
        return type(error)
    return list(result) if hasattr(result, "__next__") else repr(result)


OUTSIDE = "\ndef ask(name):\n    import sympy\n    return getattr(sympy, name)\n"


def test_only_torch_is_answered_only_while_a_check_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    sympy = pytest.importorskip("sympy")
    for name in fake_modes._STAND_INS:
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(fake_modes.experimental, "symbolic_shapes", None, raising=False)
    torchs, users = ({"__name__": name} for name in ("torch._refs", "torchvision"))
    for known in (torchs, users):
        exec(OUTSIDE, known)
    standing = fake_modes._STAND_INS["sympy"]
    with fake_modes.postponing_imports():
        with fake_modes.postponing_imports():
            assert not isinstance(3, torchs["ask"]("Basic"))  # type: ignore[operator]
        assert sys.modules["sympy"] is standing
    assert "sympy" not in sys.modules
    monkeypatch.setattr(fake_modes, "import_module", lambda name: sympy)
    with fake_modes.postponing_imports():
        assert users["ask"]("Basic") is sympy.Basic  # type: ignore[operator]
        monkeypatch.setitem(sys.modules, "sympy", sympy)
    assert sys.modules["sympy"] is sympy
    assert isinstance(standing, ModuleType)
    assert vars(standing)["Symbol"] is sympy.Symbol


def test_what_is_left_alone_is_forgotten_once_no_check_runs() -> None:
    plain = FunctionType(result_of.__code__, globals())
    with fake_modes.postponing_imports():
        plain.__dict__["__dynamo_disable"] = fake_modes._leave_alone(plain, True, wrapping=False)
        assert torch._disable_dynamo(plain)(int, ("3",)) == "3"  # type: ignore[attr-defined]
    assert "__dynamo_disable" not in vars(plain)


F = torch.nn.functional
BY_DEVICE: dict[str, Callable[[torch.Tensor], object]] = {
    "in place": lambda x: x.clone().mul_(2).t_(),
    "sort": lambda x: torch.sort(x.t(), 0),
    "log_sigmoid": lambda x: torch.ops.aten.log_sigmoid_forward(x),
    "layer_norm": lambda x: torch.ops.aten.native_layer_norm(x.bfloat16(), (4,), None, None, 1e-5),
    "cross_entropy": lambda x: F.cross_entropy(x, x.argmax(1)),
    "numbers without dims": lambda x: x * x.sum() + x.new_ones((), dtype=torch.float64),
}


@pytest.mark.parametrize("name", BY_DEVICE)
def test_kernels_run_as_torch_runs_them(name: str) -> None:
    """Some kernels in Python look at the device of their operands."""
    found = []
    for mode in (fake_modes.CheckMode(), FakeTensorMode()):
        with mode:
            outs = torch.utils._pytree.tree_leaves(BY_DEVICE[name](torch.ones(4, 4)))
        found.append([(x.shape, x.stride(), x.dtype, x.device) for x in outs])
        assert all(type(x) is FakeTensor and x.fake_mode is mode for x in outs)
    assert found[0] == found[1]
