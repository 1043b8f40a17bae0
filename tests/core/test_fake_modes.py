"""A first check imports neither Dynamo nor sympy, and its fake tensors are torch's own."""

import itertools
import subprocess
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from shardmap_torch.core.torch_private import fake_modes

FIRST = """
import sys
import torch
import shardmap_torch as sm
early = {"sympy", "torch.distributed.tensor"} & set(sys.modules)
assert not early, f"imported with the package: {early}"

def block(x, w, v):
    h = torch.nn.functional.layer_norm(x, x.shape[-1:])
    h = torch.nn.functional.gelu(sm.convert(h, "tp", src=sm.I, dst=sm.R) @ w).softmax(-2)
    return x + sm.all_reduce(torch.relu(h) @ v, "tp", dst=sm.I)

mesh = sm.make_mesh((2,), ("tp",), kind="simulated")
specs = sm.P(), sm.P(None, "tp"), sm.P("tp")
x, w, v = (torch.randn(s).requires_grad_() for s in ((3, 4), (4, 8), (8, 4)))
f = sm.shard_map(block, mesh=mesh, in_specs=specs, out_specs=sm.P())
f(x, w, v).sum().backward()
sm.trace(f, sm.ShapeDtype((5, 4)), w, v)
print(sorted({"torch._dynamo", "torch._inductor", "torch.onnx", "sympy"} & set(sys.modules)))
"""
# torch's C++ imports DTensor for the first two, and symbols, for a second size, import sympy too.
LIGHT = FIRST.replace("torch.nn.functional.layer_norm(x, x.shape[-1:])", "x - x.mean(0, True)")
LIGHT = LIGHT.replace("relu", "tanh").replace("sm.trace", "()#")


@pytest.mark.slow
@pytest.mark.parametrize(("body", "imported"), [(FIRST, "['sympy']\n"), (LIGHT, "[]\n")])
def test_a_first_check_imports_no_compiler(body: str, imported: str) -> None:
    """A global one does: DTensor's propagation makes fake tensors of torch's own."""
    done = subprocess.run([sys.executable, "-c", body], capture_output=True, text=True, check=True)
    assert done.stdout == imported


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


def test_only_torch_is_answered_and_only_while_a_check_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sympy = pytest.importorskip("sympy")
    for name in fake_modes._STAND_INS:
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(fake_modes.experimental, "symbolic_shapes", None, raising=False)
    monkeypatch.setattr(fake_modes._STANDING, "is_over", False)
    torchs, users = ({"__name__": name} for name in ("torch._refs", "torchvision"))
    for known in (torchs, users):
        exec(OUTSIDE, known)
    standing = fake_modes._STAND_INS["sympy"]
    with fake_modes.postponing_symbols():
        with fake_modes.postponing_symbols():
            assert not isinstance(3, torchs["ask"]("Basic"))  # type: ignore[operator]
        assert sys.modules["sympy"] is standing
    assert "sympy" not in sys.modules
    monkeypatch.setattr(fake_modes, "import_module", lambda name: sympy)
    with fake_modes.postponing_symbols():
        assert users["ask"]("Basic") is sympy.Basic  # type: ignore[operator]
        assert sys.modules.get("sympy") is not standing
    assert isinstance(standing, ModuleType)
    assert vars(standing)["Symbol"] is sympy.Symbol


OPTIONS: list[dict[str, Any]] = [{}, {"allow_non_fake_inputs": True, "static_shapes": True}]


@pytest.mark.parametrize("options", OPTIONS)
def test_a_mode_is_made_as_torch_makes_it(options: dict[str, Any]) -> None:
    light, plain = fake_modes._LightMode(**options), FakeTensorMode(**options)
    own = {"fake_tensor_converter", "_stack_trace"}
    for name, value in vars(plain).items():
        assert name in own or vars(light)[name] == value, name
    assert vars(light).keys() == vars(plain).keys()
    with light:
        x = torch.ones(3, 4)
        assert torch.relu(x @ torch.ones(4, 5)).shape == (3, 5)


def test_flags_are_those_of_the_environment_until_dynamo_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import torch._dynamo.config as real

    monkeypatch.setenv("TORCH_FAKE_TENSOR_DISPATCH_CACHE", "0")
    flags = fake_modes._TORCH._dynamo.config
    assert flags.fake_tensor_cache_enabled is real.fake_tensor_cache_enabled
    monkeypatch.setattr(fake_modes, "DYNAMO", "not imported")
    assert flags.fake_tensor_cache_enabled is False
    assert flags.fake_tensor_cache_crosscheck_enabled is False
    assert flags.verbose is real.verbose


def test_nothing_that_is_postponed_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake_modes, "DYNAMO", "not imported")
    held = [f for f in fake_modes._disabled() if fake_modes._HELD not in vars(f)]
    with fake_modes.postponing_dynamo():
        assert all(vars(f)[fake_modes._HELD] is f for f in held)
    assert not any(fake_modes._HELD in vars(f) for f in held)
    assert len(fake_modes._disabled()) > 100
