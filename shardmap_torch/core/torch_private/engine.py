"""Private names of torch's core: autograd, functorch, modes, fake tensors, c10d."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final

import torch
from torch import Tensor
from torch._C import DisableTorchFunction, DispatchKey, DispatchKeySet, _distributed_c10d
from torch._C import DisableTorchFunctionSubclass as DisableTorchFunctionSubclass
from torch._C import _are_functorch_transforms_active as are_transforms_active
from torch._C import _current_autograd_node as current_autograd_node
from torch._C import _current_graph_task_id as current_graph_task_id
from torch._C import _disabled_torch_function_impl as no_torch_function  # of closed subclasses
from torch._C import _DisableTorchDispatch as DisableTorchDispatch
from torch._C import _dispatch_has_kernel_for_dispatch_key as has_kernel
from torch._C import _ExcludeDispatchKeyGuard as ExcludeDispatchKeys
from torch._C import _functorch as functorch
from torch._C import _len_torch_dispatch_stack as num_dispatch_modes
from torch._C import _len_torch_function_stack as num_function_modes
from torch._C import _set_grad_enabled as set_grad_enabled
from torch._C import _set_throw_on_mutable_data_ptr as set_throw_on_data_pointer
from torch._C import _vmapmode_decrement_nesting as leave_vmapmode
from torch._C import _vmapmode_increment_nesting as enter_vmapmode
from torch._C._autograd import _get_sequence_nr as sequence_number
from torch._C._autograd import _pop_saved_tensors_default_hooks as pop_saved_tensors_hooks
from torch._C._autograd import _push_saved_tensors_default_hooks as push_saved_tensors_hooks
from torch._C._autograd import _top_saved_tensors_default_hooks as top_saved_tensors_hooks
from torch._C._distributed_c10d import Store
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
from torch._C._dynamo.eval_frame import set_eval_frame as set_compiler
from torch._C._dynamo.guards import TensorGuards, dict_version
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
from torch._guards import Source
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch._refs import native_layer_norm
from torch._subclasses.fake_impls import has_meta, op_implementations_checks
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
    torch_decomp_decompositions,
)
from torch._subclasses.fake_tensor import in_kernel_invocation_manager as in_kernel_invocation
from torch.autograd import forward_ad, profiler
from torch.autograd.forward_ad import _set_fwd_grad_enabled as set_forward_mode
from torch.autograd.function import _SingleLevelFunction as SingleLevelFunction
from torch.autograd.graph import _engine_run_backward as run_engine
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
fused_adamw_: Final[Callable[..., None]] = torch._fused_adamw_
"""Steps many tensors in place and in one pass, as `torch.optim.AdamW(fused=True)` does."""

use_count: Final[Callable[[Tensor], int]] = Tensor._use_count  # type: ignore[attr-defined]
"""Returns how many hold a tensor, those in C++ too."""

warn_of_fallbacks: Final[Callable[[bool], None]] = functorch._set_vmap_fallback_warning_enabled  # type: ignore[attr-defined]
"""Sets whether vmap warns of operators without batching rules, as it does at first."""

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


def is_taken_apart(op: OpOverload) -> bool:
    """Returns whether torch runs an operation on fake tensors as others, though it has a kernel."""
    from torch._decomp import decomposition_table, meta_table  # no attributes of torch at first

    has_others = op in decomposition_table and op not in meta_table
    return has_others and torch_decomp_decompositions(op)


def is_profiling() -> bool:
    """Returns whether one of torch's profilers is on."""
    return profiler._is_profiler_enabled


def is_vmapped_by_autograd() -> bool:
    """Returns whether the vmap of `torch.autograd.grad(is_grads_batched=True)` is active."""
    level: int = enter_vmapmode()
    leave_vmapmode()
    return level > 1


@contextmanager
def vmapping_by_autograd() -> Iterator[None]:
    """Enters what that vmap counts as, in which its errors are raised."""
    enter_vmapmode()
    try:
        yield
    finally:
        leave_vmapmode()


def group_names() -> Any:
    """Returns torch's table from process groups to their names."""
    return distributed_c10d._world.pg_names


def group_members() -> Any:
    """Returns torch's table from process groups to the ranks in them, by those of all processes."""
    return distributed_c10d._world.pg_group_ranks


_BATCHED: Final = DispatchKeySet(DispatchKey.FuncTorchBatched)


def under_vmap() -> AbstractContextManager[object]:
    """Returns a context for a batching rule: operators run at the level below, autograd's too."""
    guard: AbstractContextManager[object] = ExcludeDispatchKeys(_BATCHED)
    return guard


def tensor_guard(tensors: Sequence[Tensor]) -> Any:
    """Returns what compares shapes, strides, dtypes and `requires_grad` of tensors."""
    kind: Any = TensorGuards  # whose stubs know no sizes by tensor
    sizes, strides = ([list(get(x)) for x in tensors] for get in (Tensor.size, Tensor.stride))
    return kind(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)


def leave_uncompiled(function: Any, nested: bool, why: str = "") -> None:
    """Has torch.compile run a function as it is, `nested` with all that it calls.

    With `why` also where code that it compiles calls the function: an error with `fullgraph=True`.
    """
    if why:  # as torch.compiler.disable does, which imports the compiler
        function._torchdynamo_disable, function._torchdynamo_disable_msg = True, why
    inner = _FrameAction.SKIP if nested else _FrameAction.DEFAULT
    set_code_exec_strategy(function.__code__, _FrameExecStrategy(_FrameAction.SKIP, inner))


class UncompiledMode(TorchDispatchMode):
    """A mode whose handling of operations Dynamo skips, with all that it calls.

    torch wraps what handles them for that, at three microseconds an operation, unless a mode says
    no; here its code is marked once.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Marks what handles operations; returns whether torch has to wrap it all the same."""
        is_own = "__torch_dispatch__" in vars(cls)
        if is_own:
            leave_uncompiled(cls.__torch_dispatch__, nested=True)
        return not is_own
