"""Process groups of meshes: started, agreed on, limited in time, and never named twice."""

import atexit
import os
import zlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import count
from math import prod
from typing import Any, Final, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from shardmap_torch.control.start import current, init_process_group, start
from shardmap_torch.control.waiting import within
from shardmap_torch.core.torch_private.engine import (
    default_store,
    group_members,
    group_names,
    join_group,
)
from shardmap_torch.errors import CommunicationError, MeshError, show

TORCHRUN_VARIABLES: Final = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def start_process_group(device: torch.device | None, limit: timedelta | None) -> torch.device:
    """Starts torch's default group from torchrun's environment, unless one has been started.

    Returns the device of this process.

    Raises:
        MeshError: there is no torch.distributed, or no such environment.
    """
    if not dist.is_available():
        raise MeshError("A process_group mesh needs a torch built with torch.distributed.")
    if device is None:
        device = torch.device("cuda" if _default_to_cuda() else "cpu")
    if device.type == "cuda" and device.index is None:
        # torchrun numbers the processes of a host; one process, one GPU.
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        missing = [variable for variable in TORCHRUN_VARIABLES if variable not in os.environ]
        if missing:
            raise MeshError(
                "A process_group mesh needs torch.distributed, which nothing has started, and "
                f"torchrun's environment lacks {', '.join(missing)}. Start the script with "
                '`torchrun --nproc-per-node N script.py`, or use kind="simulated".'
            )
        backend = "nccl" if device.type == "cuda" else "gloo"
        init_process_group(backend, limit)
        atexit.register(_stop_process_group)
    return device


def _default_to_cuda() -> bool:
    if dist.is_initialized():
        return "nccl" in str(dist.get_backend())
    return torch.cuda.is_available()


def _stop_process_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _check_world(names: tuple[str, ...], sizes: tuple[int, ...]) -> None:
    world = dist.get_world_size()
    if prod(sizes) != world:
        product = f"{'*'.join(map(str, sizes))} = " * (len(sizes) > 1)
        raise MeshError(
            f"The mesh {dict(zip(names, sizes, strict=True))} has {product}{prod(sizes)} ranks, "
            f"but {world} processes were started.\nFix: torchrun --nproc-per-node {prod(sizes)} on "
            f"one host, or sizes whose product is {world}."
        )


def agree_on_layout(
    names: tuple[str, ...],
    sizes: tuple[int, ...],
    limit: timedelta | None,
    *,
    is_slice: bool = False,
) -> str:
    """Requires that all processes make the same mesh; otherwise making groups would hang.

    A slice has a part of the processes, and each process makes its own. Returns a name of the mesh
    which they have in common, for its groups.

    Raises:
        MeshError: the mesh has another number of ranks than there are processes.
        CollectiveMismatchError: the processes make different meshes.
    """
    world = dist.group.WORLD
    assert world is not None  # it has been initialised
    shortest = shortest_timeout([world])
    control = start(limit or shortest or dist.default_pg_timeout)
    problem: MeshError | None = None
    try:
        if not is_slice:
            _check_world(names, sizes)
    except MeshError as error:
        problem = error
    if control is not None:
        text = f"make_mesh({sizes}, {names}, timeout={limit})"
        control.begin_call("make_mesh")
        try:
            control.check(zlib.crc32(text.encode()), text, now=True, doing=text)
        finally:
            control.end_call()
    if problem is not None:
        raise problem
    return f"alone {next(_ALONE)}" if control is None else control.name_mesh()


_ALONE: Final = count(1)


def make_group(
    name: str, members: Sequence[int], limit: timedelta | None, what: str, *, on_thread: bool
) -> dist.ProcessGroup:
    """Makes a group within the deadline; a member that is late breaks the run for all.

    torch names a group by how many groups there are, and its members would not find one another
    where some of them have made more groups than others.

    Args:
        name: what its members alone call it.
        members: their numbers among all processes.
        limit: the deadline; None is torch's default.
        what: describes it for errors.
        on_thread: whether it may be made on another thread, which has another CUDA device.

    Raises:
        CommunicationError: not all members came in time.
    """

    def make() -> dist.ProcessGroup:
        world = dist.group.WORLD
        assert world is not None  # it has been initialised
        position = members.index(dist.get_rank())
        backend = dist.Backend(dist.get_backend())
        patience = default_pg_timeout if limit is None else limit
        options = {"timeout": patience, "device_id": world.bound_device_id, "group_desc": name}
        store = default_store()
        group, _ = join_group(len(members), position, members, backend, store, name, **options)
        group_members()[group] = {rank: at for at, rank in enumerate(members)}
        made: dist.ProcessGroup = group
        return made

    try:
        return within(limit, what, make, on_thread=on_thread)
    except CommunicationError as error:
        control = current()
        if control is not None:  # the other members may have the group, and wait in it
            control.fail_quietly(error)
        raise


class _Destroyed:
    """Stands for a destroyed group among torch's groups: one without a backend, nor work to end."""

    def shutdown(self) -> None:
        """Does nothing: `dist.destroy_process_group()` calls it of each group."""

    abort = shutdown

    def _get_backend(self, device: torch.device) -> NoReturn:
        raise RuntimeError(f"a destroyed group has no backend for {device}")


_UNUSED: Final[list[tuple[list[dist.ProcessGroup], Callable[[], object]]]] = []
"""Groups of meshes that are freed, and what returns None once their DeviceMesh is freed too."""


def bury_groups(groups: list[dist.ProcessGroup], device_mesh: Callable[[], object]) -> None:
    """Remembers the groups of a mesh that is freed; called by the garbage collector."""
    if groups:
        _UNUSED.append((groups, device_mesh))


def destroy_unused_groups() -> None:
    """Destroys the gloo groups of freed meshes.

    Called where all ranks have met, in no collective: nobody waits for a message of these groups.
    NCCL's stay, as destroying one of its communicators may wait for the other ranks.
    """
    for unused in list(_UNUSED):
        groups, device_mesh = unused
        if device_mesh() is None:
            _UNUSED.remove(unused)
            names = group_names()
            known = [group for group in groups if group in names]
            destroy_groups([each for each in known if dist.get_backend(each) == "gloo"])


def destroy_groups(groups: list[dist.ProcessGroup]) -> None:
    """Destroys groups, and empties the list."""
    while groups:
        group = groups.pop()
        name = group.group_name
        dist.destroy_process_group(group)
        _keep_name(name)


def _keep_name(name: str) -> None:
    """Keeps torch from using a group's name again.

    It names a group by its ranks and the number of groups that there are; a group of an old name
    would find the addresses of the old one in the store, where nobody listens any more.
    """
    names: Any = group_names()
    if dist.is_initialized():
        names[_Destroyed()] = name


def shortest_timeout(groups: Sequence[dist.ProcessGroup]) -> timedelta | None:
    """Returns the user's shortest timeout; None means torch's default of 30 minutes."""
    backends = [group._get_backend(device) for group in groups for device in group._device_types]
    options = [getattr(backend, "options", None) for backend in backends]
    return min((each._timeout for each in options if each is not None), default=None)


def read_timeout(timeout: float | timedelta | None) -> timedelta | None:
    """Reads a number of seconds, a timedelta, or None.

    Raises:
        MeshError: it is none of them, or not positive.
    """
    if isinstance(timeout, int | float) and timeout > 0:
        return timedelta(seconds=timeout)
    if timeout is not None and not (isinstance(timeout, timedelta) and timeout > timedelta(0)):
        raise MeshError(f"timeout must be a positive number of seconds, not {show(timeout)}.")
    return timeout
