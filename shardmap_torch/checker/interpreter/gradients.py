"""The cotangents that a backward in a body starts from, and the gradients that it ends with."""

import torch
from torch import Tensor

from shardmap_torch.checker.interpreter import messages
from shardmap_torch.checker.interpreter.interpreter import Interpreter
from shardmap_torch.checker.rules.lattice import accepts, plain
from shardmap_torch.types import I, K, Partial, R, V


def seed(interpreter: Interpreter, output: Tensor, given: Tensor | None) -> Tensor | None:
    """Checks, or makes and types, the cotangent that a backward in the body starts from."""
    if isinstance(output, torch.autograd.graph.GradientEdge) or not output.requires_grad:
        return given
    have = interpreter.storage_type(output).types
    if given is None:
        if R in have:
            raise messages.seeded(interpreter, have.index(R), interpreter.storage_type(output))
        if output.numel() != 1:
            return None  # torch says why it needs one
        given = torch.ones_like(output)
        # What a rank does not share with the others is seeded as its own.
        dual = {I: I, V: V, Partial: R}
        interpreter.storage_type(given).types = tuple(dual.get(axis_type, K) for axis_type in have)
    cotangents = interpreter.storage_type(given).types
    for axis, (axis_type, cotangent) in enumerate(zip(have, cotangents, strict=True)):
        if not accepts(axis_type, cotangent):
            what = "the differentiated value"
            raise messages.cotangent(
                interpreter, axis, axis_type, interpreter.storage_type(given), what
            )
    # The cotangents of what ranks do not share are their own, even where they are equal.
    own = tuple(V if plain(k) == V else c for k, c in zip(have, cotangents, strict=True))
    if own != cotangents:
        given = given.clone()
        interpreter.storage_type(given).types = own
    return given


def check_gradient(
    interpreter: Interpreter, operand: Tensor, gradient: Tensor | None, what: str
) -> None:
    """Holds a gradient against the type of the value that it belongs to."""
    if gradient is None:
        return
    have, storage_type = interpreter.storage_type(operand).types, interpreter.storage_type(gradient)
    for axis, (axis_type, cotangent) in enumerate(zip(have, storage_type.types, strict=True)):
        if not accepts(axis_type, cotangent):
            raise messages.cotangent(interpreter, axis, axis_type, storage_type, what)
