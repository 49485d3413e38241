"""``batchd ray``: worker hosts on a Ray cluster. Runs in the user's shell, on the daemon's machine.

Invariant: the end of this process ends no worker host; `batchd ray down` does.
Invariant: the key of a pool is in the daemon's directory of keys only as its public part.
"""

import re
import signal
import threading
import tomllib
from contextlib import suppress
from importlib import import_module
from ipaddress import ip_address
from pathlib import Path
from types import ModuleType
from typing import Annotated

import click
import structlog

from batchd.cli import terminal
from batchd.cli.asking import running_daemon
from batchd.cli.keys import KeysConfig, KeysDirectory, named_keys
from batchd.cli.log_lines import set_up_logs
from batchd.cli.options import CommandGroup, LogFormat, LogLevel, argument, as_command, option, worker_address
from batchd.cli.tables import fitted
from batchd.errors import ArgumentInvalid, BatchdError
from batchd.pool.ray.actor import ActorOptions, ActorReport
from batchd.pool.ray.scaling import Limits
from batchd.runtime.keys import KeyDirectory
from batchd.runtime.suggestions import pip_command
from batchd_client.asking import ask_status
from batchd_wire.keys import Role, connection_file_text
from batchd_wire.runtime import TcpAddress
from batchd_wire.status import PoolStatistics

HOSTS_MAX = 4_096
CPUS_MAX = 1_024
UP = "up"
QUIET = "warning"
"""Level of the log of commands that print their result."""

_log = structlog.get_logger()


class _UpByDefault(CommandGroup):
    """A group that calls ``default`` where no command is named."""

    default = UP

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Put ``default`` in front of arguments that begin with no command and ask for no help."""
        if not args or args[0] not in {*self.commands, *ctx.help_option_names}:
            args = [self.default, *args]
        return super().parse_args(ctx, args)


Cluster = Annotated[
    str,
    option(
        "Address of the Ray cluster, such as 10.0.0.5:6379. auto: $RAY_ADDRESS, then the cluster of this machine.",
        "--address",
        metavar="ADDRESS",
        default="auto",
    ),
]


@click.group("ray", cls=_UpByDefault)
def command() -> None:
    """Run as many worker hosts on a Ray cluster as the daemon needs.

    Without a command it is `batchd ray up`. ADDRESS is the daemon's worker_address as the nodes of
    the cluster reach it, such as tcp://gpu1:7072.
    """


@as_command(UP, command)
def _up(
    *,
    words: Annotated[tuple[str, ...], argument(metavar="[ADDRESS] [-- WORKER_OPTIONS]")],
    cluster: Cluster,
    least: Annotated[
        int, option("Minimum number of worker hosts, even without demand.", "--min", limits=(0, HOSTS_MAX))
    ] = 0,
    most: Annotated[int, option("Maximum number of worker hosts.", "--max", limits=(1, HOSTS_MAX))] = 64,
    cpus: Annotated[
        int,
        option("CPUs that each worker host requests from Ray, and its number of workers.", limits=(1, CPUS_MAX)),
    ] = 8,
    daemon: Annotated[
        str | None,
        option(
            "Address of the daemon, which reports how many workers it needs, such as ipc:///run/batchd. Default: "
            "$BATCHD_ADDRESS, then the usual places.",
            metavar="ADDRESS",
        ),
    ],
    key_on_nodes: Annotated[
        Path | None,
        option("Path of a worker host's connection file on the nodes. Default: make a key for this pool."),
    ],
    keys_dir: KeysDirectory,
    config_file: KeysConfig,
    log_level: LogLevel,
    log_format: LogFormat,
) -> None:
    """Adjust the number of worker hosts to the daemon's demand, until SIGTERM or Ctrl-C.

    Each worker host is an actor that runs `batchd worker ADDRESS WORKER_OPTIONS`. The default
    ADDRESS is the daemon's own, at this machine's address in the cluster. The worker hosts stay
    when this command ends: restart it, or take them down. Run it as the daemon's user.
    """
    if least > most:
        raise click.UsageError(f"--min {least} is more than --max {most}")
    where = worker_address(words[0]) if words and not words[0].startswith("-") else None
    on_ray = _on_ray()
    set_up_logs(log_level, log_format)
    keys = None if key_on_nodes else named_keys(keys_dir, config_file)
    wanted = WorkerDemand(daemon)
    listens_at = wanted.pool().address
    with on_ray.cluster(cluster):
        end = threading.Event()
        for number in (signal.SIGINT, signal.SIGTERM):  # after Ray has set its own
            signal.signal(number, lambda *_: end.set())
        arguments = words if where is None else words[1:]
        where = where or reached_at(listens_at, on_ray.this_node())
        pool = on_ray.Pool(where.address)
        pool.look(on_ray.ANSWER_TIMEOUT_S)
        key = None if keys is None else pool_key(keys, where, pool.key)
        key_path = None if key_on_nodes is None else str(key_on_nodes)
        options = ActorOptions(where.address, cpus, key, key_path, arguments)
        _log.info("keeping worker hosts", address=where.address, found=len(pool.hosts), min=least, max=most)
        on_ray.keep(pool, Limits(least, most, cpus), options, wanted, end)
        if pool.is_taken_down:
            _log.info("pool taken down")
        else:
            _log.info("worker hosts left to themselves", hosts=len(pool.hosts))
            if keys is not None and not pool.hosts:
                _revoke(keys, where)


@as_command("status", command)
def _status(*, cluster: Cluster) -> None:
    """List the worker hosts of all pools on the cluster."""
    on_ray = _on_ray()
    set_up_logs(QUIET)
    with on_ray.cluster(cluster):
        rows = []
        for address in on_ray.pools():
            pool = on_ray.Pool(address)
            pool.look(on_ray.ANSWER_TIMEOUT_S)
            rows += [[address, str(number), *_cells(pool.hosts[number].report)] for number in sorted(pool.hosts)]
    if not rows:
        terminal.say("no worker hosts; `batchd ray ADDRESS` starts some")
        return
    titles = ["pool", "host", "state", "node", "workers", "starts", "printed last"]
    terminal.say(*fitted([titles, *rows], terminal.columns()))


def _cells(report: ActorReport | None) -> list[str]:
    if report is None:
        return ["pending", "", "", "", ""]
    state = "running" if report["pid"] else report["ended"] or "starting"
    return [state, report["node"], str(report["options"]["workers"]), str(report["starts"]), report["last_line"]]


@as_command("down", command)
def _down(
    *, address: Annotated[str | None, argument()], cluster: Cluster, keys_dir: KeysDirectory, config_file: KeysConfig
) -> None:
    """Let all worker hosts of the daemon at ADDRESS finish their work and leave; revoke their key.

    ADDRESS is optional if the cluster has worker hosts of one daemon only. The `batchd ray up` that
    keeps them ends, too.
    """
    on_ray = _on_ray()
    set_up_logs(QUIET)
    keys = named_keys(keys_dir, config_file)
    with on_ray.cluster(cluster):
        pools = [address] if address else on_ray.pools()
        if len(pools) != 1:
            raise ArgumentInvalid(f"name one ADDRESS; there are worker hosts of: {', '.join(pools) or 'no daemon'}")
        where = worker_address(pools[0])
        if not on_ray.Pool(where.address).hosts:
            raise BatchdError(f"{where.address} has no worker hosts on this cluster; `batchd ray up` ends at Ctrl-C")
        # a running `up` may have asked for another one meanwhile
        while (pool := on_ray.Pool(where.address)).hosts:
            pool.take_down()
    _revoke(keys, where)
    terminal.say(f"the worker hosts of {where.address} have left")


class WorkerDemand:
    """Asks a daemon how many workers it needs, and logs when it goes away and returns."""

    def __init__(self, daemon: str | None) -> None:
        self._daemon = daemon
        self._is_away = False

    def __call__(self) -> int | None:
        """Return the number, or None while the daemon is away."""
        try:
            wanted = self.pool().wanted
        except BatchdError as error:
            if not self._is_away:
                _log.warning("daemon not asked", reason=str(error))
            self._is_away = True
            return None
        if self._is_away:
            _log.info("daemon is back", wanted_workers=wanted)
        self._is_away = False
        return wanted

    def pool(self) -> PoolStatistics:
        """Ask for the statistics of the daemon's worker hosts. Raises ``BatchdError``."""
        with running_daemon(self._daemon) as session:
            pool = ask_status(session).pool
        if pool is None:
            raise BatchdError(
                "the daemon admits no worker hosts: set worker_address in [daemon], such as "
                "`batchd serve --set daemon.worker_address=0.0.0.0:7072`"
            )
        return pool


def pool_key(keys: KeyDirectory, address: TcpAddress, former: str | None) -> str:
    """The text of a pool's connection file: ``former`` if still accepted, or a new one."""
    name = _key_name(address)
    if former is not None and keys.workers.holds(name, str(tomllib.loads(former).get("public"))):
        return former
    _revoke(keys, address)  # its secret was lost with its pool
    return connection_file_text(keys.new(name, role=Role.WORKER))


def _revoke(keys: KeyDirectory, address: TcpAddress) -> None:
    """Revoke the key that was made for a pool, if there is one."""
    if any(key.name == _key_name(address) for key in keys.workers.accepted()):
        keys.revoke(_key_name(address))


def _key_name(address: TcpAddress) -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "-", f"ray-{address.host}-{address.port}")[:64]


def reached_at(listens_at: str, node: str) -> TcpAddress:
    """The address of a daemon on this machine, which the cluster knows as ``node``."""
    address = worker_address(listens_at)
    with suppress(ValueError):
        if not ip_address(address.host).is_unspecified:
            return address
    return TcpAddress(node, address.port)


def _on_ray() -> ModuleType:
    """Import the Ray driver. Raises ``BatchdError`` if Ray is not installed."""
    try:
        return import_module("batchd.pool.ray.pool")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "ray":
            raise
        raise BatchdError(f"Ray is not installed here: {pip_command('batchd[ray]')}") from None
