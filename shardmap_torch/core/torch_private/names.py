"""Table of the private names of torch that the library uses, and what happens without them."""

from collections.abc import Sequence
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Final

import torch

from shardmap_torch.errors import UnsupportedTorchError

KNOWN: Final = "2.13 and 2.14"
"""Releases of torch that have every name below; docs/versions.md says what was run on each."""


@dataclass(frozen=True, slots=True)
class PrivateName:
    """One private name of torch.

    Attributes:
        path: its module, a colon, and its name there.
        serves: what the library needs it for.
        known: the releases that are known to have it.
    """

    path: str
    serves: str
    known: str = KNOWN

    @property
    def is_missing(self) -> bool:
        """Returns whether this torch lacks it."""
        try:
            resolve_name(self.path)
        except (ImportError, AttributeError):
            return True
        return False


def _rows(serves: str, module: str, *names: str) -> tuple[PrivateName, ...]:
    return tuple(PrivateName(f"{module}:{name}", serves) for name in names)


_MODES: Final = "interpretation under torch's modes"
_BACKWARD: Final = "collectives and checks in a backward"
_TRANSFORMS: Final = "torch.func transforms in and around a body"
_PROCESSES: Final = "meshes of processes"

ENGINE: Final[Sequence[PrivateName]] = (
    *_rows(
        "bodies that call torch.distributed.nn.functional",
        "torch.distributed.nn.functional",
        "_AllGather",
        "_AllReduce",
        "_AlltoAll",
        "_AlltoAllSingle",
        "_Reduce_Scatter",
    ),
    *_rows(_MODES, "torch._C", "DisableTorchFunction", "_DisableTorchDispatch"),
    *_rows(_MODES, "torch._C", "_set_grad_enabled", "_set_throw_on_mutable_data_ptr"),
    *_rows(_MODES, "torch", "Tensor._is_zerotensor", "Tensor._make_subclass", "_make_dual"),
    *_rows(_MODES, "torch._ops", "HigherOrderOperator", "OpOverload", "OpOverloadPacket"),
    *_rows(
        _MODES,
        "torch._subclasses.fake_tensor",
        "DataDependentOutputException",
        "DynamicOutputShapeException",
        "FakeTensor",
        "FakeTensorMode.cache",
        "FakeTensorMode.cache_clear",
        "UnsupportedOperatorException",
    ),
    *_rows("arguments of any pytree that torch knows", "torch.utils._pytree", "SUPPORTED_NODES"),
    *_rows(
        _MODES,
        "torch.utils._python_dispatch",
        "TorchDispatchMode",
        "_disable_current_modes",
        "_get_current_dispatch_mode_stack",
    ),
    *_rows(_MODES, "torch.overrides", "_get_current_function_mode_stack"),
    *_rows(
        "trackers of modules, as CommDebugMode has one",
        "torch.nn.modules.module",
        "_global_backward_pre_hooks",
        "_global_forward_hooks",
        "_global_forward_pre_hooks",
    ),
    *_rows("events of profilers", "torch.autograd.profiler", "_is_profiler_enabled"),
    *_rows(_BACKWARD, "torch._C", "_current_autograd_node", "_current_graph_task_id"),
    *_rows(
        _BACKWARD,
        "torch._C._autograd",
        "_get_sequence_nr",
        "_pop_saved_tensors_default_hooks",
        "_push_saved_tensors_default_hooks",
        "_top_saved_tensors_default_hooks",
    ),
    *_rows("autograd Functions of the user's", "torch.autograd.function", "_SingleLevelFunction"),
    *_rows(
        "autograd Functions of the user's",
        "torch._functorch.autograd_function",
        "CtxWithSavedTensors",
        "custom_function_call",
    ),
    *_rows(
        _TRANSFORMS,
        "torch._C",
        "_are_functorch_transforms_active",
        "_vmapmode_decrement_nesting",
        "_vmapmode_increment_nesting",
    ),
    *_rows(
        _TRANSFORMS,
        "torch._C._functorch",
        "TransformType",
        "get_dynamic_layer_stack_depth",
        "get_interpreter_stack",
        "get_unwrapped",
        "is_batchedtensor",
        "is_functorch_wrapped_tensor",
        "is_gradtrackingtensor",
        "maybe_get_bdim",
        "maybe_get_level",
        "peek_interpreter_stack",
    ),
    *_rows(_TRANSFORMS, "torch._functorch.eager_transforms", "_autograd_grad"),
    *_rows(
        _TRANSFORMS,
        "torch._functorch.pyfunctorch",
        "GradInterpreter",
        "GradInterpreter._cptr",
        "GradInterpreter.lower",
        "retrieve_all_functorch_interpreters",
        "temporarily_clear_interpreter_stack",
    ),
    *_rows(_TRANSFORMS, "torch._functorch.utils", "enable_single_level_autograd_function"),
    *_rows(_TRANSFORMS, "torch._functorch.vmap", "restore_vmap"),
    *_rows(_TRANSFORMS, "torch.autograd.forward_ad", "_current_level", "_set_fwd_grad_enabled"),
    *_rows(
        _PROCESSES,
        "torch._C._distributed_c10d",
        "AllgatherOptions",
        "AllreduceOptions",
        "FakeWork",
        "ProcessGroup.unbox",
        "ReduceScatterOptions",
        "Store",
        "Work.boxed",
    ),
    *_rows(
        _PROCESSES,
        "torch.distributed.distributed_c10d",
        "_get_default_store",
        "_new_process_group_helper",
        "_set_pg_timeout",
        "_world",
    ),
)
"""Names without which nothing works: `import shardmap_torch` raises an error that lists them."""

DTENSOR: Final[Sequence[PrivateName]] = (
    *_rows(
        "DTensors as arguments and results",
        "torch.distributed._functional_collectives",
        "AsyncCollectiveTensor",
    ),
    *_rows(
        "DTensors as arguments and results, check='global'",
        "torch.distributed.tensor._dtensor_spec",
        "DTensorSpec",
        "TensorMeta",
    ),
    *_rows("check='global'", "torch.distributed.tensor._op_schema", "OpSchema"),
    *_rows(
        "check='global'",
        "torch.distributed.tensor",
        "DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding_non_cached",
        "DTensor._op_dispatcher.sharding_propagator.op_to_schema_info",
    ),
)
"""Names that DTensors and global strictness need: the first use of either raises the error."""

SYMBOLS: Final[Sequence[PrivateName]] = _rows(
    "one verdict for many sizes", "torch._guards", "Source"
)
"""Names that symbolic sizes need: without them each signature is checked by itself."""

DYNAMO: Final[Sequence[PrivateName]] = (
    *_rows("errors while torch.compile traces", "torch._dynamo.exc", "Unsupported"),
    *_rows("torch.utils.checkpoint beside parallelized modules", "torch._dynamo", "disable"),
)
"""Names that torch.compile needs: what it refuses raises an UnsupportedTorchError instead."""

OPTIONAL: Final[Sequence[PrivateName]] = (
    *_rows(
        "to see whether dicts and tensors have changed; without them calls compare each entry",
        "torch._C._dynamo.guards",
        "TensorGuards",
        "dict_version",
    ),
    *_rows(
        "to see whether DTensors that a body refers to need gradients",
        "torch._C",
        "_disabled_torch_function_impl",
    ),
    *_rows(
        "to keep Dynamo from the boundary of calls, and from what handles the operations of a "
        "check; without them it traces the one, and torch wraps the other, at 3 us an operation",
        "torch._C._dynamo.eval_frame",
        "_FrameAction",
        "_FrameExecStrategy",
        "set_code_exec_strategy",
        "set_eval_frame",
    ),
    *_rows(
        "overlap in symmetric memory; without them kernels use other transports",
        "torch.distributed._symmetric_memory",
        "get_symm_mem_workspace",
    ),
    *_rows(
        "overlap in symmetric memory; without them kernels use other transports",
        "torch._C",
        "_dispatch_has_kernel_for_dispatch_key",
    ),
    *_rows(
        "to keep warnings of vmap from who has written none",
        "torch._C._functorch",
        "_set_vmap_fallback_warning_enabled",
    ),
    *_rows(
        "first checks without Dynamo; without it they import that, in a second",
        "torch",
        "_disable_dynamo",
    ),
    *_rows(
        "first checks without Dynamo; without it they import that, in a second",
        "torch._subclasses.fake_tensor",
        "FakeTensorMode._dispatch_impl",
    ),
    *_rows("AdamW in one pass; without it, it takes some ten", "torch", "_fused_adamw_"),
    *_rows(
        "to refuse DTensors sharded in strides by name; without it they are refused as unknown",
        "torch.distributed.tensor.placement_types",
        "_StridedShard",
    ),
)
"""Names whose lack turns a feature off, as `serves` says."""


def unsupported(names: Sequence[PrivateName]) -> UnsupportedTorchError:
    """Makes the error that lists which of the names this torch lacks, and what needs them."""
    missing = [name for name in names if name.is_missing]
    return UnsupportedTorchError(
        f"shardmap_torch needs private names that torch {torch.__version__} does not have:\n"
        + "\n".join(f"  {name.path.replace(':', '.')}, for {name.serves}" for name in missing)
        + f"\nKnown to work: torch {KNOWN}. Install one of these, or a newer shardmap_torch."
    )


def demand(names: Sequence[PrivateName]) -> None:
    """Checks that this torch has the names.

    Raises:
        UnsupportedTorchError: it lacks some, all of which the error lists.
    """
    if any(name.is_missing for name in names):
        raise unsupported(names)
