"""A machine with a real systemd, booted once for all tests here by ``make test-systemd``."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from support.machine import CONFIG, CONFIG_FILE, Machine, MachineUnavailable, build_root, why_unavailable
from support.trainer_process import TrainerProcess


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip these tests unless requested, as each run boots a machine."""
    asked = "systemd" in (config.option.markexpr or "")
    for item in items:
        if "tests/systemd" not in str(item.path):
            continue
        item.add_marker(pytest.mark.systemd)
        if not asked:
            item.add_marker(pytest.mark.skip(reason="boots a machine; `make test-systemd` runs it"))


@pytest.fixture(scope="session")
def booted() -> Iterator[Machine]:
    """Boot the machine while tests run, or give the reason why none is possible."""
    reason = why_unavailable()
    if reason is not None:
        pytest.skip(reason)
    machine = Machine(build_root())
    try:
        try:
            yield machine.boot()
        except MachineUnavailable as error:
            pytest.skip(str(error))
    finally:
        machine.close()


@pytest.fixture
def machine(booted: Machine) -> Iterator[Machine]:
    """Return the machine with the usual configuration, no drop-ins, and no daemon."""
    booted.write(CONFIG_FILE, CONFIG)
    yield booted
    booted.run("systemctl", "stop", "batchd", "batchd@*")
    booted.run(
        "rm", "-rf", "/run/systemd/system/batchd.service.d", "/etc/batchd/keys/daemon.key", "/etc/batchd/keys/trainers"
    )
    booted.run("systemctl", "daemon-reload")
    booted.run("systemctl", "reset-failed", "batchd", "batchd@*", check=False)


@pytest.fixture
def drop_in(machine: Machine) -> Callable[[str], None]:
    """Install a drop-in for the unit."""

    def drop_in(text: str) -> None:
        machine.write("/run/systemd/system/batchd.service.d/test.conf", text)
        machine.run("systemctl", "daemon-reload")

    return drop_in


@pytest.fixture
def started(machine: Machine) -> Machine:
    """Return the machine with the daemon active."""
    machine.run("systemctl", "start", "batchd")
    return machine


@pytest.fixture
def train(machine: Machine) -> Iterator[Callable[..., TrainerProcess]]:
    """Start trainers; they end with the test."""
    with ExitStack() as stack:

        def train(*arguments: str, **options: str) -> TrainerProcess:
            trainer = machine.trainer(*arguments, **options)
            stack.callback(trainer.close)
            return trainer.ready()

        yield train
