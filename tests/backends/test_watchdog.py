"""A process may end at any time, whatever its lookout does then."""

import subprocess
import sys

ENDS_WHILE_THE_LOOKOUT_LOOKS = """
import threading
from datetime import timedelta
from time import monotonic

import torch.distributed as dist

from shardmap_torch.backends import watchdog

store = dist.TCPStore("localhost", 0, 1, is_master=True)
looks = threading.Event()


def look_long(place):
    looks.set()
    end = monotonic() + 1
    while monotonic() < end:
        store.check(["a vote"])
    return False


class Peer:
    def wait(self):
        looks.wait()


watchdog.PATIENCE = timedelta(milliseconds=1)
watchdog.is_overtaken = look_long
watchdog.wait_for_peer(Peer())
print("ends")
"""


def test_a_process_ends_well_while_its_lookout_looks() -> None:
    # Without an end of the thread before the interpreter's: "terminate called" and SIGABRT.
    ended = subprocess.run(
        [sys.executable, "-c", ENDS_WHILE_THE_LOOKOUT_LOOKS], capture_output=True, text=True
    )
    assert (ended.stdout, ended.returncode) == ("ends\n", 0), ended.stderr
