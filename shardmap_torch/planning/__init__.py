"""Plans of jobs: memory and time of a checked program on hardware that one does not have yet."""

from shardmap_torch.contracts import export
from shardmap_torch.errors import SpecError
from shardmap_torch.planning.estimate import Estimate, estimate
from shardmap_torch.planning.hardware import A100, B200, H100, H200, Hardware, read_hardware
from shardmap_torch.planning.measured import this_machine
from shardmap_torch.planning.meshes import Candidate, Ranking, best_mesh

__all__ = [
    "A100",
    "B200",
    "H100",
    "H200",
    "Candidate",
    "Estimate",
    "Hardware",
    "Ranking",
    "best_mesh",
    "estimate",
    "read_hardware",
    "this_machine",
]

export(globals(), __all__, SpecError)
