"""The share that a process reads, according to its launcher."""

import pytest

from batchd_client.errors import RankInvalid
from batchd_client.loader import find_share

SRUN = {"SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8", "SLURM_NTASKS": "8"}


@pytest.mark.parametrize(
    ("environment", "share"),
    [
        ({}, (0, 1)),
        ({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}, (3, 4)),
        (SRUN, (5, 8)),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}, (1, 2)),
        (SRUN | {"RANK": "0", "WORLD_SIZE": "2"}, (0, 2)),
    ],
    ids=["no launcher", "torchrun", "srun", "mpirun", "torchrun within srun"],
)
def test_the_launcher_determines_the_share(environment, share):
    """The innermost launcher counts."""
    assert find_share(environment) == share


def test_a_batch_script_of_slurm_reads_everything():
    """Its job has tasks, but it is none of them: with an eighth, the rest would be lost."""
    assert find_share({"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "7"}) == (0, 1)


def test_arguments_override_the_launcher():
    """Both arguments are given, or neither."""
    assert find_share(SRUN, 1, 2) == (1, 2)
    for given in ((1, None), (None, 2)):
        with pytest.raises(RankInvalid, match="both, or neither"):
            find_share(SRUN, *given)


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"RANK": "1"}, "RANK=1 is set, and WORLD_SIZE is not"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2 is set, and RANK is not"),
        ({"RANK": "one", "WORLD_SIZE": "2"}, "RANK=one and WORLD_SIZE=2: these are not numbers"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2 and WORLD_SIZE=2: there is no such share"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "there is no such share"),
        ({"RANK": "", "WORLD_SIZE": ""}, "these are not numbers"),
    ],
)
def test_a_rank_is_never_guessed(environment, message):
    """Two ranks with the same share would stay unnoticed."""
    with pytest.raises(RankInvalid, match=message):
        find_share(environment)


@pytest.mark.parametrize("given", [(2, 2), (-1, 2), (0, 0)])
def test_an_invalid_share_is_refused(given):
    """The error is that of the daemon."""
    with pytest.raises(RankInvalid, match="there is no such share"):
        find_share({}, *given)
