"""A functional `shard_map` for PyTorch with typed, differentiable collectives."""

from importlib import import_module
from typing import TYPE_CHECKING

from shardmap_torch import ops
from shardmap_torch.autodiff.gradients import grad, value_and_grad, vjp
from shardmap_torch.checker import api
from shardmap_torch.checker.api import ShapeDtype, check_program, explain, trace
from shardmap_torch.checker.explanation import Explanation
from shardmap_torch.checker.guards.state import assume_constant
from shardmap_torch.checker.queries import assert_type, typeof
from shardmap_torch.checker.region import local_region
from shardmap_torch.checker.rules.registry import register_decomposition, register_rule
from shardmap_torch.checker.rules.rule import Row
from shardmap_torch.checkpoint import checkpoint, save_results
from shardmap_torch.contracts import export
from shardmap_torch.errors import (
    CheckpointError,
    CollectiveError,
    CollectiveMismatchError,
    CommunicationError,
    KernelError,
    LayerError,
    MeshError,
    OneDeviceWarning,
    OptimizerError,
    PostmortemError,
    ShardMapError,
    ShardTypeError,
    SpecError,
    TransformError,
    UnsupportedTorchError,
)
from shardmap_torch.function import Function
from shardmap_torch.mesh import Mesh, current_mesh, make_mesh, use_mesh
from shardmap_torch.ops import *  # noqa: F403 - its `__all__` says which
from shardmap_torch.placing import device_put, from_local, full
from shardmap_torch.spec import P
from shardmap_torch.transform import check_rank_program, shard_map
from shardmap_torch.types import I, Partial, R, S, V

if TYPE_CHECKING:
    from shardmap_torch import kernels as kernels
    from shardmap_torch import lax as lax
    from shardmap_torch import nn as nn
    from shardmap_torch import optim as optim
    from shardmap_torch import planning as planning
    from shardmap_torch import random as random
    from shardmap_torch import saving as saving
    from shardmap_torch.automatic import (
        Redistribution,
        Redistributions,
        auto,
        mark_sharding,
        redistributions,
    )
    from shardmap_torch.debug import debug_print
    from shardmap_torch.divergence import Divergence, find_divergence
    from shardmap_torch.parallel import (
        ColwiseParallel,
        LocalAttributes,
        PackedColwiseParallel,
        ParallelStyle,
        PrepareModuleInput,
        PrepareModuleInputOutput,
        PrepareModuleOutput,
        RowwiseParallel,
        SequenceParallel,
        loss_parallel,
        parallelize,
    )
    from shardmap_torch.parallel import functional as functional
    from shardmap_torch.spec_patterns import match_specs
    from shardmap_torch.validate import Validation, validate_rule
    from shardmap_torch.visualize import Sharding, visualize_sharding
else:
    # Imported when first asked for, so that `import shardmap_torch` takes a fraction of a second:
    # modules by their name, functions and classes by the module that has them.
    _MODULES = frozenset(
        ["kernels", "lax", "nn", "optim", "parallel", "planning", "random", "saving"]
    )
    _NAMES = {
        "automatic": "Redistribution Redistributions auto mark_sharding redistributions",
        "debug": "debug_print",
        "divergence": "Divergence find_divergence",
        "parallel": "ColwiseParallel LocalAttributes PackedColwiseParallel ParallelStyle "
        "PrepareModuleInput PrepareModuleInputOutput PrepareModuleOutput RowwiseParallel "
        "SequenceParallel functional loss_parallel parallelize",
        "spec_patterns": "match_specs",
        "validate": "Validation validate_rule",
        "visualize": "Sharding visualize_sharding",
    }
    _LAZY = {name: module for module, names in _NAMES.items() for name in names.split()}

    def __getattr__(name):
        if name in _MODULES:
            return import_module(f"shardmap_torch.{name}")
        if name in _LAZY:
            module = import_module(f"shardmap_torch.{_LAZY[name]}")
            export(vars(module), [name], SpecError)
            return getattr(module, name)
        raise AttributeError(f"module 'shardmap_torch' has no attribute {name!r}")


def __dir__() -> list[str]:
    """Lists the public names, those that are not loaded yet among them."""
    return sorted(__all__)


__version__ = "0.1.0"

# Without what `import *` would replace: `torch.nn`, `torch.nn.functional`, the standard `random`.
__all__ = [
    "CheckpointError",
    "CollectiveError",
    "CollectiveMismatchError",
    "ColwiseParallel",
    "CommunicationError",
    "Divergence",
    "Explanation",
    "Function",
    "I",
    "KernelError",
    "LayerError",
    "LocalAttributes",
    "Mesh",
    "MeshError",
    "OptimizerError",
    "P",
    "PackedColwiseParallel",
    "ParallelStyle",
    "Partial",
    "PostmortemError",
    "PrepareModuleInput",
    "PrepareModuleInputOutput",
    "PrepareModuleOutput",
    "R",
    "Redistribution",
    "Redistributions",
    "Row",
    "RowwiseParallel",
    "S",
    "SequenceParallel",
    "ShapeDtype",
    "ShardMapError",
    "OneDeviceWarning",
    "ShardTypeError",
    "Sharding",
    "SpecError",
    "TransformError",
    "UnsupportedTorchError",
    "V",
    "Validation",
    "assert_type",
    "assume_constant",
    "auto",
    "check_program",
    "check_rank_program",
    "checkpoint",
    "current_mesh",
    "debug_print",
    "device_put",
    "explain",
    "find_divergence",
    "from_local",
    "full",
    "grad",
    "local_region",
    "loss_parallel",
    "make_mesh",
    "mark_sharding",
    "match_specs",
    "parallelize",
    "redistributions",
    "register_decomposition",
    "register_rule",
    "save_results",
    "shard_map",
    "trace",
    "typeof",
    "use_mesh",
    "validate_rule",
    "value_and_grad",
    "visualize_sharding",
    "vjp",
    *ops.__all__,
]

export(globals(), ["Mesh"], MeshError)
export(vars(ops.groups), ["AxisGroup"], CollectiveError)
export(vars(api), ["Program", "Verdict"], SpecError)
export(vars(ops), ["axis_group"], SpecError)  # collectives read their arguments themselves
export(globals(), sorted({*__all__} - {*ops.__all__} | {"axis_group"}), SpecError)
