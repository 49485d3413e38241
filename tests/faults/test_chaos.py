"""The chaos run, briefly, with each kind of fault once; and its judgement of wrong batches."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from chaos.gaps import Gaps
from chaos.jobs import Job

TESTS = Path(__file__).parents[1]
KINDS = 21
STEPS = 5


def rows(epoch, step):
    """Return the rows of a stream of 14 samples in batches of three; the last batch has two."""
    first = 3 * step
    return [(sample, f"{epoch}-{sample}") for sample in range(first, min(first + 3, 14))]


def told(epoch, step, after, part=slice(None), **changes):
    """Return a trainer's report of a batch; ``after`` is the position in its state."""
    state = {"stream": "photos", "fingerprint": "f", "epoch": after[0], "step": after[1]}
    return {"epoch": epoch, "step": step, "rows": rows(epoch, step)[part], "state": state, **changes}


@pytest.fixture
def job():
    """Start a job of one rank."""
    return Job("job", "photos", STEPS, rows)


def chaos(seed, faults, pause_s):
    """Return the output of a run that has found no error."""
    options = {"--faults": faults, "--seconds": 3600, "--pause": pause_s, "--seed": seed}
    done = subprocess.run(
        [sys.executable, "-m", "chaos", *(str(word) for option in options.items() for word in option)],
        cwd=TESTS,
        env={**os.environ, "PYTHONPATH": str(TESTS)},
        capture_output=True,
        text=True,
        check=False,
    )
    print(done.stdout, done.stderr)  # noqa: T201  pytest shows it where the test fails
    assert done.returncode == 0
    assert "\n0 errors" in done.stdout
    return done.stdout


@pytest.mark.thorough
def test_a_short_chaos_run_finds_nothing_wrong():
    """Each kind of fault is injected once, in a random order."""
    said = chaos(seed=3, faults=KINDS, pause_s=0.3)
    (batches,) = re.findall(r"(\d+)  batches checked", said)
    assert int(batches) > 0
    if os.geteuid() == 0:
        counts = re.findall(r"^ +(\d+)  (?:(?:kill|stop|resume|fill) .*|reload.*)$", said, re.MULTILINE)
        assert counts == ["1"] * KINDS


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_a_longer_chaos_run_finds_nothing_wrong(seed):
    """Each seed gives another order of faults."""
    chaos(seed, faults=100, pause_s=0.75)


def test_a_job_that_reads_what_it_should_is_fine(job):
    """A correct job passes over several epochs."""
    for epoch in range(2):
        for step in range(STEPS):
            after = (epoch, step + 1) if step < STEPS - 1 else (epoch + 1, 0)
            assert job.heard(0, told(epoch, step, after)) == []
    assert (job.checkpoint()["epoch"], job.checkpoint()["step"]) == (2, 0)


def test_ranks_share_the_last_round(job):
    """The round has two whole batches and one that three ranks share: each row once, in order."""
    job.begin(3, {"epoch": 1, "step": 0})
    for rank in range(3):
        assert job.heard(rank, told(1, rank, (1, 3))) == []
    assert job.heard(2, told(1, 4, (2, 0))) == []
    assert job.heard(0, told(1, 3, (2, 0), slice(1))) == []
    assert (job.checkpoint()["epoch"], job.checkpoint()["step"]) == (1, 3)
    assert (job.state_of(0)["epoch"], job.state_of(0)["step"]) == (2, 0)
    assert job.heard(1, told(1, 3, (2, 0), slice(1, 3))) == []
    assert (job.checkpoint()["epoch"], job.checkpoint()["step"]) == (2, 0)


WRONG = {
    "a position is left out": told(0, 1, (0, 1)),
    "another epoch": told(1, 0, (0, 1)),
    "a state that is behind": told(0, 0, (0, 0)),
    "a row is missing": told(0, 0, (0, 1), slice(2)),
    "rows in another order": told(0, 0, (0, 1), slice(None, None, -1)),
    "a foreign row": told(0, 0, (0, 1), rows=[*rows(0, 0)[:2], (2, "1-2")]),
    "a row of another sample": told(0, 0, (0, 1), rows=[*rows(0, 0)[:2], (3, "0-3")]),
}


@pytest.mark.parametrize("batch", WRONG.values(), ids=WRONG)
def test_a_batch_that_is_wrong_is_noticed(job, batch):
    """Each case changes the place, the rows or the state after the batch."""
    assert len(job.heard(0, batch)) == 1


def test_a_batch_that_comes_twice_is_noticed(job):
    """The second time, another batch belongs at its place."""
    assert job.heard(0, told(0, 0, (0, 1))) == []
    assert len(job.heard(0, told(0, 0, (0, 2)))) == 1


@pytest.mark.parametrize("part", [slice(2), slice(2, 3)], ids=["a row twice", "a row never"])
def test_a_shared_round_that_does_not_add_up_is_noticed(job, part):
    job.begin(3, {"epoch": 0, "step": 3})
    assert job.heard(0, told(0, 3, (1, 0), slice(1) if part.start else slice(2))) == []
    assert job.heard(1, told(0, 3, (1, 0), part)) == []
    assert len(job.heard(2, told(0, 4, (1, 0)))) == 1


def test_a_gap_that_something_else_disturbs_is_not_counted():
    """One of two waiting trainers is killed."""
    gaps = Gaps("killed -> next")
    for who in (1, 2):
        gaps.begin(who, 10.0)
    gaps.forget(1)
    gaps.end(1, 12.0)
    gaps.end(2, 10.5)
    gaps.end(2, 11.0)
    assert gaps.taken_s == [0.5]
    assert gaps.row().split()[-4:] == ["0.500", "0.500", "0.500", "1"]
