"""Private names of torch's core: autograd, functorch, modes, fake tensors, c10d."""

from collections.abc import Callable, Sequence
from operator import is_
from pkgutil import resolve_name
from typing import Any, Final

from torch import Tensor, _make_dual
from torch._C import DisableTorchFunction, _distributed_c10d
from torch._C import _are_functorch_transforms_active as are_transforms_active
from torch._C import _current_autograd_node as current_autograd_node
from torch._C import _current_graph_task_id as current_graph_task_id
from torch._C import _DisableTorchDispatch as DisableTorchDispatch
from torch._C import _functorch as functorch
from torch._C import _set_grad_enabled as set_grad_enabled
from torch._C import _set_throw_on_mutable_data_ptr as set_throw_on_data_pointer
from torch._C import _vmapmode_decrement_nesting as leave_vmapmode
from torch._C import _vmapmode_increment_nesting as enter_vmapmode
from torch._C._autograd import _get_sequence_nr as sequence_number
from torch._C._autograd import _pop_saved_tensors_default_hooks as pop_saved_tensors_hooks
from torch._C._autograd import _push_saved_tensors_default_hooks as push_saved_tensors_hooks
from torch._C._autograd import _top_saved_tensors_default_hooks as top_saved_tensors_hooks
from torch._C._distributed_c10d import Store
from torch._C._functorch import TransformType
from torch._functorch.autograd_function import CtxWithSavedTensors, custom_function_call
from torch._functorch.eager_transforms import _autograd_grad as gradient_of_transform
from torch._functorch.predispatch import lazy_load_decompositions
from torch._functorch.pyfunctorch import (
    GradInterpreter,
    retrieve_all_functorch_interpreters,
    temporarily_clear_interpreter_stack,
    temporarily_pop_interpreter_stack,
)
from torch._functorch.utils import enable_single_level_autograd_function as allowing_single_level
from torch._functorch.vmap import restore_vmap
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.autograd import forward_ad, profiler
from torch.autograd.forward_ad import _set_fwd_grad_enabled as set_forward_mode
from torch.autograd.function import _SingleLevelFunction as SingleLevelFunction
from torch.distributed import distributed_c10d
from torch.distributed.nn import functional as differentiable_collectives
from torch.nn.modules import module as modules
from torch.overrides import _get_current_function_mode_stack as function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes as disable_current_modes
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack as dispatch_mode_stack
from torch.utils._python_dispatch import return_and_correct_aliasing as finish_inplace_view
from torch.utils._pytree import SUPPORTED_NODES

c10d: Final = _distributed_c10d
make_subclass: Final[Callable[..., Any]] = Tensor._make_subclass
make_dual: Final[Callable[..., Any]] = _make_dual
# A public name since torch 2.14, which warns of the private one.
set_timeout: Final[Callable[..., None]] = (
    getattr(distributed_c10d, "set_timeout", None) or distributed_c10d._set_pg_timeout
)
GLOBAL_MODULE_HOOKS: Final[tuple[dict[int, Any], ...]] = (
    modules._global_forward_pre_hooks,
    modules._global_forward_hooks,
    modules._global_backward_pre_hooks,
)
default_store: Final = distributed_c10d._get_default_store
join_group: Final[Callable[..., Any]] = distributed_c10d._new_process_group_helper


def forward_level() -> int:
    """Returns the level of forward-mode differentiation that is active; negative for none."""
    return forward_ad._current_level


def is_profiling() -> bool:
    """Returns whether one of torch's profilers is on."""
    return profiler._is_profiler_enabled


def is_vmapped_by_autograd() -> bool:
    """Returns whether the vmap of `torch.autograd.grad(is_grads_batched=True)` is active."""
    level: int = enter_vmapmode()
    leave_vmapmode()
    return level > 1


def group_names() -> Any:
    """Returns torch's table from process groups to their names."""
    return distributed_c10d._world.pg_names


def group_members() -> Any:
    """Returns torch's table from process groups to the ranks in them, by those of all processes."""
    return distributed_c10d._world.pg_group_ranks


class Identities:
    """Stands in for `dict_version` where torch has none, at 20 ns an entry."""

    def __init__(self, table: dict[Any, Any]) -> None:
        """Keeps the keys and values."""
        self._items = [*dict.keys(table), *dict.values(table)]

    def __eq__(self, other: object) -> bool:
        """Returns whether they are the same objects."""
        items = other._items if isinstance(other, Identities) else []
        return len(items) == len(self._items) and all(map(is_, items, self._items))

    __hash__ = None  # type: ignore[assignment]  # compared alone


def probed(path: str, otherwise: Any) -> Any:
    """Returns what has this path, or `otherwise` where this torch has nothing there."""
    try:
        return resolve_name(path)
    except (ImportError, AttributeError):
        return otherwise


dict_version: Final[Callable[[dict[Any, Any]], Any]] = probed(
    "torch._C._dynamo.guards:dict_version", Identities
)
"""Returns what is another one after each change of a dict."""

no_torch_function: Final[Any] = probed("torch._C:_disabled_torch_function_impl", None)
"""The `__torch_function__` of subclasses of tensors that answer questions as tensors do."""

_TENSOR_GUARDS: Final[Any] = probed("torch._C._dynamo.guards:TensorGuards", None)


def tensor_guard(tensors: Sequence[Tensor]) -> Any:
    """Returns what compares shapes, strides, dtypes and `requires_grad` of tensors, or None."""
    if _TENSOR_GUARDS is None:
        return None
    sizes, strides = ([list(get(x)) for x in tensors] for get in (Tensor.size, Tensor.stride))
    return _TENSOR_GUARDS(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)


has_kernel: Final[Callable[[str, str], bool]] = probed(
    "torch._C:_dispatch_has_kernel_for_dispatch_key", lambda name, key: False
)
"""Returns whether an operator has a kernel for a dispatch key; without torch's, none has."""

fused_adamw_: Final[Any] = probed("torch:_fused_adamw_", None)
"""Steps many tensors in place and in one pass, as `torch.optim.AdamW(fused=True)` does; or None."""

warn_of_fallbacks: Final[Callable[[bool], None]] = probed(
    "torch._C._functorch:_set_vmap_fallback_warning_enabled", lambda on: None
)
"""Sets whether vmap warns of operators without batching rules, as it does at first."""


def no_compiler(compiler: Any) -> None:
    """Stands in for `set_compiler` where torch has none."""


set_compiler: Final[Callable[[Any], Any]] = probed(
    "torch._C._dynamo.eval_frame:set_eval_frame", no_compiler
)
"""Sets what compiles the functions that this thread calls from now on; returns what did before.

None compiles nothing, and stands for torch.compile not being active.
"""

_MARKS: Final[list[Any]] = [
    probed(f"torch._C._dynamo.eval_frame:{name}", None)
    for name in ("_FrameAction", "_FrameExecStrategy", "set_code_exec_strategy", "set_eval_frame")
]


def leave_uncompiled(function: Any, nested: bool) -> bool:
    """Has torch.compile run a function as it is, `nested` with all that it calls.

    Returns whether this torch can.
    """
    if None in _MARKS:
        return False
    action, strategy, mark, _ = _MARKS
    mark(function.__code__, strategy(action.SKIP, action.SKIP if nested else action.DEFAULT))
    return True


class UncompiledMode(TorchDispatchMode):
    """A mode whose handling of operations Dynamo skips, with all that it calls.

    torch wraps what handles them for that, at three microseconds an operation, unless a mode says
    no; here its code is marked once.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Marks what handles operations; returns whether torch has to wrap it all the same."""
        if "__torch_dispatch__" not in vars(cls):
            return True
        return not leave_uncompiled(cls.__torch_dispatch__, nested=True)


def _is_held(tensor: Tensor) -> int:
    return 2


use_count: Final[Callable[[Tensor], int]] = probed("torch:Tensor._use_count", _is_held)
"""Returns how many hold a tensor, those in C++ too; without torch's, each is held by others."""

__all__ = (
    "SUPPORTED_NODES",
    "CtxWithSavedTensors",
    "DataDependentOutputException",
    "DisableTorchDispatch",
    "DisableTorchFunction",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "GradInterpreter",
    "HigherOrderOperator",
    "OpOverload",
    "OpOverloadPacket",
    "SingleLevelFunction",
    "Store",
    "TorchDispatchMode",
    "TransformType",
    "UncompiledMode",
    "UnsupportedOperatorException",
    "allowing_single_level",
    "are_transforms_active",
    "c10d",
    "current_autograd_node",
    "current_graph_task_id",
    "custom_function_call",
    "default_store",
    "dict_version",
    "differentiable_collectives",
    "disable_current_modes",
    "dispatch_mode_stack",
    "finish_inplace_view",
    "forward_level",
    "function_mode_stack",
    "functorch",
    "fused_adamw_",
    "gradient_of_transform",
    "group_members",
    "group_names",
    "has_kernel",
    "is_vmapped_by_autograd",
    "join_group",
    "lazy_load_decompositions",
    "leave_uncompiled",
    "make_dual",
    "make_subclass",
    "no_compiler",
    "no_torch_function",
    "pop_saved_tensors_hooks",
    "probed",
    "push_saved_tensors_hooks",
    "restore_vmap",
    "retrieve_all_functorch_interpreters",
    "sequence_number",
    "set_compiler",
    "set_forward_mode",
    "set_grad_enabled",
    "set_throw_on_data_pointer",
    "set_timeout",
    "temporarily_clear_interpreter_stack",
    "temporarily_pop_interpreter_stack",
    "tensor_guard",
    "top_saved_tensors_hooks",
    "use_count",
    "warn_of_fallbacks",
)
