"""Lines on stderr about checks and compilations that take long: where they are.

A thread of its own wakes up after two seconds and looks at the stack of the one that works, which
costs the work nothing. `SHARDMAP_PROGRESS=0` turns it off, and so does a level above WARNING of the
logger "shardmap_torch". Of several processes the first one tells.
"""

import logging
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic
from types import FrameType
from typing import Final

from shardmap_torch.core.source_location import is_own, site_of

VARIABLE: Final = "SHARDMAP_PROGRESS"
LOGGER: Final = logging.getLogger("shardmap_torch")

PATIENCE: Final = 2.0
"""Seconds after which it tells where the work is."""

_AGAIN: Final = 10.0  # seconds after which it tells so again

_STAGES: Final = {
    "find_repair": "trying repairs of what is refused",
    "by_numbers": "trying it with random numbers",
    "interpret_on_one_device": "recording the program of one device",
    "record_backward": "in the backward",
}
"""Functions of this package, and what it does while they run; the first one on the stack counts."""


@contextmanager
def telling(work: str, name: str) -> Iterator[None]:
    """Tells that work on a function goes on, if it takes long, and how long it has taken."""
    if os.environ.get(VARIABLE) == "0" or os.environ.get("RANK", "0") != "0":
        yield
        return
    watch = _Watch(work, name)
    watch.start()
    try:
        yield
    finally:
        watch.end()


class _Watch(threading.Thread):
    def __init__(self, work: str, name: str) -> None:
        super().__init__(name=f"shardmap {work}", daemon=True)
        self._what, self._began = f"{work} {name}", monotonic()
        self._worker, self._ended, self._has_told = threading.get_ident(), threading.Event(), False

    def run(self) -> None:
        patience = PATIENCE
        while not self._ended.wait(patience):
            self._has_told, patience = True, _AGAIN
            place = _place(sys._current_frames().get(self._worker))
            LOGGER.warning("%s: %.0f s so far%s", self._what, monotonic() - self._began, place)

    def end(self) -> None:
        self._ended.set()
        if self._has_told:
            LOGGER.warning("%s took %.1f s", self._what, monotonic() - self._began)


def _place(frame: FrameType | None) -> str:
    """Formats where the work is: its stage, and the line of the user's."""
    site, stage = site_of(frame), ""
    while frame is not None and not stage:
        stage = _STAGES.get(frame.f_code.co_name, "") if is_own(frame) else ""
        if stage and "error" in frame.f_locals:  # of what it is the consequence
            stage += " because " + str(frame.f_locals["error"]).partition("\n")[0].rstrip(".")
        frame = frame.f_back
    return "".join([f", {stage}" * bool(stage), f", at {site}" * (site is not None)])
