"""`functional`: a module as a pure function of its parameters."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn

from shardmap_torch.errors import SpecError, listing
from shardmap_torch.parallel.bound import BoundModule

Params = dict[str, Tensor]


def functional(module: nn.Module) -> tuple[Params, Callable[..., Any]]:
    """Splits a module into its parameters and a pure function of them.

    `apply(params, *args, **kwargs)` computes what `module(*args, **kwargs)` would compute if its
    parameters were `params`. It may be called in the body of a `shard_map`, where `params` are this
    rank's shards, under `torch.func` transforms, and on several threads at once: it runs a shallow
    copy of the module, so the module itself neither changes nor keeps anything.

    Args:
        module: any module. Buffers are constants of the function; `train()` and `eval()` on the
            module decide what later calls do.

    Returns:
        `params`, by the names of `named_parameters`, detached and sharing memory with the module's
        (a shared parameter stands there once), and `apply`.

    Raises:
        SpecError: not a module; or, in a call of `apply`, names that are missing or unknown, a
            forward that sets attributes of the module, or one that writes into its buffers (as
            BatchNorm in training).

    Source: `torch.func.functional_call`; `haiku.transform`.

    Example:
        >>> import torch
        >>> from shardmap_torch import functional
        >>> params, apply = functional(torch.nn.Linear(2, 1, bias=False))
        >>> loss = lambda params, x: apply(params, x).sum()
        >>> torch.func.grad(loss)(params, torch.tensor([[3.0, 4.0]]))
        {'weight': tensor([[3., 4.]])}
    """
    if not isinstance(module, nn.Module):
        raise SpecError(f"functional takes a torch.nn.Module, not a {type(module).__name__}.")
    params = {name: value.detach() for name, value in module.named_parameters()}
    # A partial, not a closure: the checker looks through it at the module and its code.
    return params, partial(_apply, module)


def _apply(module: nn.Module, params: Mapping[str, Tensor], /, *args: Any, **kwargs: Any) -> Any:
    _check_names(module, params)
    bound = BoundModule(module, params)
    versions = [(name, x, x._version) for name, x in module.named_buffers()]
    out = bound.root(*args, **kwargs)
    bound.check_unwritten()
    written = [name for name, x, version in versions if x._version != version]
    if written:
        head = f"{type(module).__name__}: the forward wrote into its buffers, which are constants:"
        raise SpecError(listing(head, written) + "\nFix: module.eval(), or a layer without them.")
    return out


def _check_names(module: nn.Module, params: Mapping[str, Tensor]) -> None:
    if not isinstance(params, Mapping):
        raise SpecError(
            f"{type(module).__name__}: apply takes the parameters first, by name, not "
            f"a {type(params).__name__}."
        )
    names = dict(module.named_parameters())
    problems = [f"{name}: is missing" for name in names if name not in params]
    problems += [f"{name}: is not a parameter of it" for name in params if name not in names]
    if problems:
        raise SpecError(listing(f"{type(module).__name__}: params do not match:", problems))
