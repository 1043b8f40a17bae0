"""Warns where a function that is checked by default, locally, is not that of one device."""

import re
import warnings
from collections.abc import Callable
from typing import Any, Final

import torch

from shardmap_torch.boundary.call import Call
from shardmap_torch.checker.ir.repairs import rejection_of
from shardmap_torch.core.ambient import SILENT, silently
from shardmap_torch.core.functorch import can_receive_gradient
from shardmap_torch.core.source_location import definition_of, warn_at
from shardmap_torch.errors import OneDeviceWarning, ShardTypeError


class OneDevice:
    """Asks of one function what global strictness would say, of calls that are accepted.

    Only what numbers refute is told, not what nobody can decide: most of what means something per
    rank has no counterpart on one device. It is asked for the first call, and again for the first
    through which gradients flow.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._asked: set[bool] = set()  # Dynamo cannot call a type of one

    def ask(self, call: Call, verify: Callable[[], object]) -> None:
        """Checks a call globally, and warns; on processes the first one does.

        Not where such warnings are ignored, nor of one rank.
        """
        flows = any(can_receive_gradient(call.leaves[at]) for at in call.crossing)
        if flows in self._asked or call.mesh.size == 1 or call.mesh.rank != 0:
            return
        if SILENT.get() or _are_ignored() or torch.compiler.is_compiling():
            return
        self._asked.add(flows)
        error = _refused(verify)
        if error is not None and rejection_of(error).refuted:
            self._asked = {False, True}
            _warn(self._name, call.function, error)


def _refused(verify: Callable[[], object]) -> ShardTypeError | None:
    try:
        with silently():
            verify()
    except ShardTypeError as error:
        return error.with_traceback(None)  # whose frames have all values of the check
    except Exception:  # of the body, which nobody has asked to run on one device
        return None
    return None


def _are_ignored() -> bool:
    """Returns whether no warning of the kind would be seen, so that none has to be found."""
    for action, message, category, module, line in warnings.filters:
        if issubclass(OneDeviceWarning, category) and message is module is None and not line:
            return action == "ignore"
    return False


_SEEN: Final[dict[Any, Any]] = {}
"""The registry of what Python has warned of: a function that is mapped anew warns once."""

_PLACE: Final = re.compile(r"\bat \S+:\d+")


def _warn(name: str, function: Callable[..., object], error: ShardTypeError) -> None:
    head, _, step = f"{error}".partition("check='global': ")
    step, _, rest = step.partition("\n")
    at = None if _PLACE.search(step) else _PLACE.search(head) or _PLACE.search(rest)
    step = step.rstrip(".:") + ("" if at is None else f", {at[0]}")
    warn_at(
        definition_of(function),
        f"{name} is not the same as on one device: {step}; {rejection_of(error).refuted}. "
        "Say check='local' if that is meant; check='global' makes it an error, with a repair.",
        OneDeviceWarning,
        _SEEN,
    )
