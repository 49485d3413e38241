"""The variables of the environment that batchd reads, and those that look like one. Daemon and CLI.

    BATCHD_WORKER=3     did you mean BATCHD_WORKERS?

Invariant: what is read from the environment under a name that begins with BATCHD_ is listed here.
"""

import re
from collections.abc import Mapping

from batchd.config.tree import DaemonConfig
from batchd.runtime.failpoints import LEDGER_VARIABLE, VARIABLE
from batchd.runtime.suggestions import probably_meant
from batchd_wire.keys import KEY_VARIABLE
from batchd_wire.runtime import ADDRESS_VARIABLE, CONNECTIONS_VARIABLE, NAME_VARIABLE, RECONNECT_VARIABLE

ENVIRONMENT_PREFIX = "BATCHD_"
DAEMON_VARIABLES: Mapping[str, str] = {key: ENVIRONMENT_PREFIX + key.upper() for key in DaemonConfig.model_fields}
"""By the key of [daemon], the variable that overrides it."""
CLIENT_VARIABLES = (ADDRESS_VARIABLE, KEY_VARIABLE, NAME_VARIABLE, CONNECTIONS_VARIABLE, RECONNECT_VARIABLE)
SCRIPT_VARIABLES = ("BATCHD_JOB_DIRECTORY", "BATCHD_READY_S")
"""Of ``deploy/slurm/daemon.sh``, which passes its environment on."""
KNOWN_VARIABLES = (*DAEMON_VARIABLES.values(), *CLIENT_VARIABLES, *SCRIPT_VARIABLES, VARIABLE, LEDGER_VARIABLE)
_OF_TESTS = "BATCHD_TEST_"
_OF_KUBERNETES = re.compile(r"BATCHD_(\w+_)?(SERVICE_(HOST|PORT(_\w+)?)|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)")
"""Set in each pod for a service of that name; also BATCHD_PORT, with a URL."""


def unknown_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """What helps with each variable that batchd does not read, though its name says so, by name."""
    words = [name.removeprefix(ENVIRONMENT_PREFIX) for name in KNOWN_VARIABLES]
    found = {}
    for name in sorted(environment):
        if _is_unknown(name, environment[name]):
            meant = probably_meant(name.removeprefix(ENVIRONMENT_PREFIX), words)
            found[name] = (
                f"did you mean {ENVIRONMENT_PREFIX}{meant}?"
                if meant is not None
                else "`batchd --help` and `batchd config` say which there are"
            )
    return found


def _is_unknown(name: str, value: str) -> bool:
    if not value or not name.startswith(ENVIRONMENT_PREFIX) or name in KNOWN_VARIABLES or name.startswith(_OF_TESTS):
        return False
    is_address = name.endswith("_PORT") and "://" in value
    return not is_address and _OF_KUBERNETES.fullmatch(name) is None
