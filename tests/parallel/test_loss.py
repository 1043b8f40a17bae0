"""`loss_parallel`: cross-entropy of sharded logits, with all of its arguments."""

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import loss_parallel as torch_loss_parallel
from torch.nn import CrossEntropyLoss, functional
from torch.overrides import _get_current_function_mode_stack

from shardmap_torch import SpecError, loss_parallel, make_mesh
from tests.programs.support.harness import global_value, random, worker_mesh
from tests.support.golden import told
from tests.support.pool import Gloo

NUM_CLASSES = 6
WEIGHT = torch.linspace(0.5, 2.0, NUM_CLASSES, dtype=torch.float64)
SHAPES = ((4, NUM_CLASSES), (NUM_CLASSES,), (4, NUM_CLASSES, 2))
OPTIONS = tuple(product(("none", "sum", "mean"), (0.0, 0.3), (None, WEIGHT)))


def targets(shape: tuple[int, ...]) -> Tensor:
    """Class numbers, one of them ignored."""
    shape = shape[:1] + shape[2:] if len(shape) > 1 else ()
    found = torch.arange(torch.Size(shape).numel()) * 5 % NUM_CLASSES
    return found.index_fill(0, torch.tensor([0]), -100).reshape(shape) if shape else found[0]


def loss_and_gradient(logits: Tensor, target: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    loss = functional.cross_entropy(logits, target, **options)
    out = global_value(loss)
    if isinstance(loss, DTensor):
        loss = loss.full_tensor()
    (loss * random(loss.shape, 3)).sum().backward()
    assert logits.grad is not None
    return out, global_value(logits.grad)


def options(reduction: str, smoothing: float, weight: Tensor | None) -> dict[str, Any]:
    return {"reduction": reduction, "label_smoothing": smoothing, "weight": weight}


def plain(shape: tuple[int, ...]) -> Tensor:
    return random(shape, 0).requires_grad_()


@pytest.mark.sample(1)
@pytest.mark.parametrize("shape", SHAPES)
def test_values_and_gradients_are_those_of_one_device(shape: tuple[int, ...]) -> None:
    mesh = make_mesh((3, 2), ("dp", "tp"), kind="simulated")
    for chosen in OPTIONS:
        expected = loss_and_gradient(plain(shape), targets(shape), **options(*chosen))
        with loss_parallel(mesh, axis="tp"):
            actual = loss_and_gradient(plain(shape), targets(shape), **options(*chosen))
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


def on_processes(shape: tuple[int, ...]) -> None:
    """Beside one device, and beside torch where torch can."""
    mesh = worker_mesh((2,), ("tp",)).device_mesh
    dim = 1 if len(shape) > 1 else 0

    def logits() -> Tensor:
        return distribute_tensor(random(shape, 0), mesh, [Shard(dim)]).requires_grad_()

    for chosen in OPTIONS:
        expected = loss_and_gradient(plain(shape), targets(shape), **options(*chosen))
        with loss_parallel():
            actual = loss_and_gradient(logits(), targets(shape), **options(*chosen))
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)
        if chosen[1:] == (0.0, None):  # torch has no smoothing, and fails on weight with ignored
            with torch_loss_parallel():
                theirs = loss_and_gradient(logits(), targets(shape), **options(*chosen))
            torch.testing.assert_close(actual, theirs, rtol=1e-10, atol=1e-10)
    found = []
    for x in (plain(shape), logits()):  # torch's own makes the identity of this backward
        with loss_parallel():
            functional.log_softmax(x, dim).square().sum().backward()
        assert x.grad is not None
        found.append(global_value(x.grad))
    torch.testing.assert_close(found[0], found[1], rtol=1e-10, atol=1e-10)


@pytest.mark.sample(1)
@pytest.mark.parametrize("shape", SHAPES)
def test_values_and_gradients_are_those_of_torch_on_processes(
    shape: tuple[int, ...], gloo: Gloo
) -> None:
    gloo(2).run(on_processes, shape, timeout=100)


def sharded_batch() -> None:
    """Sums and means of the global batch, where another axis shards it; torch has no mean."""
    mesh, shape = worker_mesh((2, 2), ("dp", "tp")).device_mesh, (4, NUM_CLASSES)
    both: list[Placement] = [Shard(0), Shard(1)]
    rows: list[Placement] = [Shard(0), Replicate()]
    for chosen in OPTIONS:
        expected = loss_and_gradient(plain(shape), targets(shape), **options(*chosen))
        logits = distribute_tensor(random(shape, 0), mesh, both).requires_grad_()
        target = distribute_tensor(targets(shape), mesh, rows)
        with loss_parallel():
            actual = loss_and_gradient(logits, target, **options(*chosen))
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


def test_classes_may_be_sharded_over_several_axes(gloo: Gloo) -> None:
    gloo(4).run(sharded_classes, timeout=100)


def sharded_classes() -> None:
    mesh, shape = worker_mesh((2, 2), ("dp", "tp")).device_mesh, (4, 8)
    weight = torch.arange(1.0, 9.0, dtype=torch.float64)
    for chosen in (("none", 0.0, None), ("mean", 0.3, weight)):
        logits = distribute_tensor(random(shape, 0), mesh, [Shard(1), Shard(1)]).requires_grad_()
        with loss_parallel():
            actual = loss_and_gradient(logits, targets(shape), **options(*chosen))
        expected = loss_and_gradient(plain(shape), targets(shape), **options(*chosen))
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


def test_means_are_those_of_the_global_batch(gloo: Gloo) -> None:
    gloo(4).run(sharded_batch, timeout=100)


def test_the_backward_may_run_outside_and_an_exception_leaves_nothing_behind() -> None:
    mesh, x, y = make_mesh((2,), ("tp",), kind="simulated"), plain((4, 6)), targets((4, 6))
    with loss_parallel(mesh):
        loss = CrossEntropyLoss()(x, y)
    loss.backward()
    assert x.grad is not None
    with pytest.raises(KeyError, match="on purpose"), loss_parallel(mesh):
        raise KeyError("on purpose")
    assert not _get_current_function_mode_stack()
    assert functional.cross_entropy(torch.zeros(1, 5), torch.tensor([0])).item() > 0  # 5 is odd


def test_what_is_no_dtensor_is_left_to_torch() -> None:
    probabilities = torch.tensor([[0.25, 0.75]])
    with loss_parallel():
        own = functional.cross_entropy(torch.zeros(1, 2), probabilities)
    torch.testing.assert_close(own, functional.cross_entropy(torch.zeros(1, 2), probabilities))


WRONG: list[tuple[tuple[int, ...], Tensor, dict[str, Any]]] = [
    ((4, 6), torch.rand(4, 6), {}),
    ((4, 6), torch.tensor([1, 2]), {}),
    ((1, 6), torch.tensor([1]), {"reduce": False}),
    ((1, 6), torch.tensor([1]), {"reduction": "max", "label_smoothing": 2.0}),
]


@pytest.mark.parametrize(("shape", "target", "arguments"), WRONG)
def test_arguments_that_cannot_be_meant_are_refused(
    shape: tuple[int, ...], target: Tensor, arguments: dict[str, Any]
) -> None:
    with told(SpecError), loss_parallel(make_mesh((2,), ("tp",))):
        functional.cross_entropy(torch.zeros(shape), target, **arguments)


def test_uneven_classes_are_refused_with_the_arithmetic() -> None:
    with pytest.raises(SpecError, match=r"size 5, which does not divide over 'tp' = 2 ranks"):
        with loss_parallel(make_mesh((2,), ("tp",), kind="simulated")):
            functional.cross_entropy(torch.zeros(1, 5), torch.tensor([0]))
    with told(SpecError), loss_parallel(axis="tp"):
        pass


def wrong_layouts() -> list[str]:
    mesh = worker_mesh((2, 2), ("dp", "tp")).device_mesh
    whole_classes: list[Placement] = [Shard(0), Replicate()]
    both: list[Placement] = [Shard(0), Shard(1)]
    found = []
    for placements in (whole_classes, both):
        logits = distribute_tensor(torch.zeros(4, 6), mesh, placements)
        with pytest.raises(SpecError) as caught, loss_parallel():
            functional.cross_entropy(logits, torch.zeros(4, dtype=torch.int64))
        found.append(str(caught.value))
    return found


def test_logits_that_lie_otherwise_are_refused(gloo: Gloo) -> None:
    assert gloo(4).run(wrong_layouts)[0] == [
        "loss_parallel: the classes, dim 1 of the logits [4, 6], must be sharded over a mesh "
        "axis, but their spec is P('dp'). Give the last layer output_layouts=Shard(-1), "
        "use_local_output=False, or leave loss_parallel.",
        "loss_parallel: the batch is sharded by P('dp'), so the target is a DTensor sharded "
        "alike; make it by from_local or device_put.",
    ]
