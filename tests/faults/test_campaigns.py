"""Long campaigns of random faults: workers, daemon and trainers at once. Each seed is one order of events."""

import os
import random
import signal
from contextlib import suppress

import pytest

from support.expected import Expected
from support.settings import folder_stream
from support.trainer_process import TrainerProcess
from support.waiting import wait_until

EPOCHS = 40
ROUNDS = 60


def send(pid, number):
    """Send a signal to a process that may have ended meanwhile."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)


class Campaign:
    """One daemon, two mirror trainers and two ranks, and what chance does to them."""

    def __init__(self, daemon, seed):
        self.daemon = daemon
        self._chance = random.Random(seed)
        self._claims = [{}, {}, {"rank": 0, "world_size": 2}, {"rank": 1, "world_size": 2}]
        self.trainers = [self._start(claim) for claim in self._claims]
        self.seen = [[] for _ in self.trainers]
        self._stopped = set()

    def one_round(self):
        """Let everybody read a little, then do something to somebody."""
        for number, trainer in enumerate(self.trainers):
            if number not in self._stopped:
                self.seen[number] += trainer.take(self._chance.randrange(6))
        self._chance.choice(
            [
                self._kill_worker,
                self._kill_worker,
                self._stop_worker,
                self._kill_daemon,
                self._stop_or_go_on,
                self._replace,
            ]
        )()

    def finish(self):
        """Let everybody read to the end; what each has seen."""
        for number in self._stopped:
            self.trainers[number].go_on()
        for number, trainer in enumerate(self.trainers):
            self.seen[number] += trainer.take()
            trainer.quit()
        return self.seen

    def close(self):
        """End the trainers, whatever they do."""
        for trainer in self.trainers:
            trainer.close()

    def _start(self, claim, **more):
        return TrainerProcess(self.daemon.address, epochs=EPOCHS, **claim, **more).ready()

    def _kill_worker(self):
        pids = wait_until(lambda: sorted(self.daemon.worker_pids()), "a worker lives")
        send(self._chance.choice(pids), signal.SIGKILL)

    def _stop_worker(self):
        """One that is ready: those that start have a minute for it, which would be waited for."""
        ready = [worker["pid"] for worker in self.daemon.status()["workers"] if worker["state"] == "ready"]
        if ready:
            send(self._chance.choice(ready), signal.SIGSTOP)

    def _kill_daemon(self):
        self.daemon.restart()

    def _stop_or_go_on(self):
        number = self._chance.randrange(2)
        if number in self._stopped:
            self._stopped.remove(number)
            self.trainers[number].go_on()
        else:
            self._stopped.add(number)
            self.trainers[number].stop()

    def _replace(self):
        """Kill a trainer and start its successor from the state that it last wrote."""
        number = self._chance.randrange(4)
        if number in self._stopped:
            return
        state = self.trainers[number].state()
        self.trainers[number].kill()
        self.trainers[number] = self._start(self._claims[number], state=state)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_a_campaign_of_random_faults_loses_and_repeats_nothing(start_daemon, photos, seed):
    """Whatever happens to whom, every trainer reads exactly its positions, in their order, with their bytes."""
    daemon = start_daemon(
        {"photos": folder_stream(photos, batch_size=2 + seed % 3)}, sample_timeout_s=1.0, chunk_rows=1 + seed % 3
    )
    campaign = Campaign(daemon, seed)
    try:
        for _ in range(ROUNDS):
            campaign.one_round()
        seen = campaign.finish()
    finally:
        campaign.close()

    expected = Expected(daemon.config)
    everything = [one for epoch in range(EPOCHS) for one in expected.epoch(epoch)]
    assert seen[0] == seen[1] == everything
    assert [one.position for one in seen[2]] == [one.position for one in everything if one.step % 2 == 0]
    whole = {one.position: one for one in everything}
    assert all(
        whole[one.position] == one for part in seen[2:] for one in part if one.samples == whole[one.position].samples
    )
    assert daemon.stream_status()["quarantined_samples"] == 0
