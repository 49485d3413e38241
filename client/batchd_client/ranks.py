"""Which share of a stream this process reads, as its launcher says in the environment. Runs in the trainer.

    torchrun, accelerate, Lightning   RANK           WORLD_SIZE
    srun                              SLURM_PROCID   SLURM_STEP_NUM_TASKS
    mpirun (Open MPI)                 OMPI_COMM_WORLD_RANK   OMPI_COMM_WORLD_SIZE

The first pair that is there counts. Of Slurm's variables the ones of a step are read and not those
of the job: a script that runs under ``sbatch`` without ``srun`` has SLURM_NTASKS too, and is alone
nevertheless.

Invariant: a rank is never guessed: half a pair, or one that makes no sense, is an error.
"""

from collections.abc import Mapping
from typing import NamedTuple

from batchd_client.errors import RankInvalid

_LAUNCHERS = (
    ("RANK", "WORLD_SIZE"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
)


class RankShare(NamedTuple):
    """Share ``rank``, from 0, of ``world_size``."""

    rank: int
    world_size: int


ALONE = RankShare(0, 1)


def find_share(environment: Mapping[str, str], rank: int | None = None, world_size: int | None = None) -> RankShare:
    """Find the share of this process: what is given, else what the launcher says, else all of it. Raises ``RankInvalid``."""
    if (rank is None) != (world_size is None):
        raise RankInvalid("give rank and world_size both, or neither: then they come from the environment")
    if rank is not None and world_size is not None:
        return _checked(RankShare(rank, world_size), f"rank {rank!r} of {world_size!r}")
    for names in _LAUNCHERS:
        values = [environment.get(name) for name in names]
        if names[0] == "SLURM_PROCID" and values[1] is None:
            continue  # a job's process, and not one of several of a step
        if values == [None, None]:
            continue
        told = " and ".join(f"{name}={value}" for name, value in zip(names, values, strict=True) if value is not None)
        missing = [name for name, value in zip(names, values, strict=True) if value is None]
        if missing:
            raise RankInvalid(f"{told} is set, and {missing[0]} is not: set both, or give rank= and world_size=")
        try:
            share = RankShare(*(int(value or "") for value in values))
        except ValueError:
            raise RankInvalid(f"{told}: these are no numbers") from None
        return _checked(share, told)
    return ALONE


def _checked(share: RankShare, told: str) -> RankShare:
    if not 0 <= share.rank < share.world_size:
        raise RankInvalid(f"{told}: there is no such share")
    return share
