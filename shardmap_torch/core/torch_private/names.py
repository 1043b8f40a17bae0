"""Table of the private names of torch that the library uses, and what needs them."""

from collections.abc import Iterator, Sequence
from pkgutil import resolve_name
from typing import Final, NamedTuple

import torch

from shardmap_torch.errors import UnsupportedTorchError

KNOWN: Final = "2.13 and 2.14"
"""Releases of torch that have every name below; docs/versions.md says what was run on each."""


class PrivateName(NamedTuple):
    """One private name of torch.

    Attributes:
        path: its module, a colon, and its name there.
        serves: what the library needs it for.
    """

    path: str
    serves: str

    @property
    def is_missing(self) -> bool:
        """Returns whether this torch lacks it."""
        try:
            resolve_name(self.path)
        except (ImportError, AttributeError):
            return True
        return False


def read_names(table: str) -> Sequence[PrivateName]:
    """Reads a table: lines of a module, a colon and names there, below what these serve."""
    return list(_rows(table.splitlines()))


def _rows(lines: Sequence[str]) -> Iterator[PrivateName]:
    serves = module = ""
    for line in filter(None, lines):
        if not line.startswith(" "):
            serves = line
            continue
        start, colon, names = line.strip().rpartition(":")
        module = start if colon else module
        for name in names.split():
            yield PrivateName(f"{module}:{name}", serves)


ENGINE: Final = read_names("""
interpretation under torch's modes
  torch: Tensor._is_zerotensor Tensor._make_subclass Tensor._use_count
  torch._C: DisableTorchFunction _DisableTorchDispatch _set_grad_enabled
    _disabled_torch_function_impl _dispatch_has_kernel_for_dispatch_key
    _len_torch_function_stack _set_throw_on_mutable_data_ptr
  torch._ops: HigherOrderOperator OpOverload OpOverloadPacket
  torch._subclasses.fake_tensor: DataDependentOutputException DynamicOutputShapeException
    FakeTensor UnsupportedOperatorException in_kernel_invocation_manager
    torch_decomp_decompositions
  torch._decomp: decomposition_table meta_table
  torch._subclasses.fake_impls: has_meta op_implementations_checks
  torch.utils._python_dispatch: TorchDispatchMode _disable_current_modes
    _get_current_dispatch_mode_stack
collectives and checks in a backward
  torch._C: _current_autograd_node _current_graph_task_id
  torch._C._autograd: _get_sequence_nr _pop_saved_tensors_default_hooks
    _push_saved_tensors_default_hooks _top_saved_tensors_default_hooks
torch.func transforms in and around a body
  torch._C: DispatchKey.FuncTorchBatched DispatchKeySet _ExcludeDispatchKeyGuard
    _are_functorch_transforms_active _vmapmode_decrement_nesting _vmapmode_increment_nesting
  torch._C._functorch: TransformType get_dynamic_layer_stack_depth get_interpreter_stack
    get_unwrapped is_batchedtensor is_functorch_wrapped_tensor is_gradtrackingtensor
    maybe_current_level maybe_get_bdim maybe_get_level peek_interpreter_stack
    _set_vmap_fallback_warning_enabled
  torch._functorch.eager_transforms: _autograd_grad
  torch._functorch.pyfunctorch: GradInterpreter GradInterpreter._cptr GradInterpreter.lower
    retrieve_all_functorch_interpreters temporarily_clear_interpreter_stack
  torch._functorch.utils: enable_single_level_autograd_function
  torch._functorch.vmap: restore_vmap
  torch.autograd.forward_ad: _current_level _set_fwd_grad_enabled
autograd Functions of the user's
  torch._functorch.autograd_function: CtxWithSavedTensors custom_function_call
  torch.autograd.function: _SingleLevelFunction
meshes of processes
  torch._C._distributed_c10d: AllgatherOptions AllreduceOptions FakeWork ProcessGroup.unbox
    ReduceScatterOptions Store Work.boxed
  torch.distributed.distributed_c10d: _get_default_store _new_process_group_helper
    _set_pg_timeout _world
bodies that call torch.distributed.nn.functional
  torch.distributed.nn.functional: _AllGather _AllReduce _AlltoAll _AlltoAllSingle _Reduce_Scatter
arguments of any pytree that torch knows
  torch.utils._pytree: SUPPORTED_NODES
comparisons of what a body refers to with what it was checked with
  torch._C._dynamo.guards: TensorGuards dict_version
code that Dynamo leaves alone
  torch._C._dynamo.eval_frame: _FrameAction _FrameExecStrategy set_code_exec_strategy set_eval_frame
first checks without Dynamo
  torch._refs: native_layer_norm
  torch._subclasses.fake_tensor: FakeTensorMode.dispatch
one verdict for many sizes
  torch._guards: Source
trackers of modules, as CommDebugMode has one
  torch.nn.modules.module: _global_backward_pre_hooks _global_forward_hooks
    _global_forward_pre_hooks
events of profilers
  torch.autograd.profiler: _is_profiler_enabled
AdamW in one pass
  torch: _fused_adamw_
""")
"""Names without which nothing works: `import shardmap_torch` raises an error that lists them."""

DTENSOR: Final = read_names("""
DTensors as arguments and results
  torch.distributed._functional_collectives: AsyncCollectiveTensor
  torch.distributed.tensor._dtensor_spec: DTensorSpec TensorMeta
  torch.distributed.tensor.placement_types: _StridedShard
checkpoints of packed parameters
  torch.distributed._state_dict_utils: _distribute_tensors
  torch.distributed.tensor: DTensor.__create_chunk_list__ DTensor.__create_write_items__
    DTensor.__get_tensor_shard__
check='global'
  torch.distributed.tensor._op_schema: OpSchema
  torch.distributed.tensor: DTensor._op_dispatcher.sharding_propagator.op_to_schema_info
    DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding_non_cached
""")
"""Names that DTensors and global strictness need: the first use of either raises the error."""

DYNAMO: Final = read_names("""
errors while torch.compile traces
  torch._dynamo.exc: Unsupported
torch.utils.checkpoint beside parallelized modules
  torch._dynamo: disable
""")
"""Names that torch.compile needs: what it refuses raises an UnsupportedTorchError instead."""


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
