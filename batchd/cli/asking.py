"""Sessions of the commands with a daemon of this host. Runs in the user's shell.

Invariant: every error is a ``BatchdError`` with the exit code of its kind.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import click
from click.shell_completion import CompletionItem

from batchd.cli.options import argument, completions
from batchd.errors import BatchdError, DaemonUnreachable
from batchd_client import errors
from batchd_client.asking import ANSWER_TIMEOUT_S, ask_status, asking
from batchd_client.lifeline import SessionLost
from batchd_client.opening import ENDED, first_line
from batchd_client.session import Session
from batchd_wire.runtime import ADDRESS_VARIABLE

TAB_TIMEOUT_S = 1.0
"""For a completion: the user cannot type meanwhile."""
STUCK = "its machine is overloaded or it is stuck: look at its log"


@contextmanager
def running_daemon(address: str | None, timeout_s: float = ANSWER_TIMEOUT_S) -> Iterator[Session]:
    """Open a session with the daemon at ``address``, or with the first that answers.

    Raises ``DaemonUnreachable`` if none answers, and ``BatchdError`` with the daemon's refusals,
    here and in the context.
    """
    try:
        with asking(address, timeout_s) as session, client_errors():
            yield session
    except errors.DaemonNotFound as error:
        why = "`batchd logs` shows the end of the last one; " if ENDED in str(error) else ""
        remedy = f"start one with `batchd serve`, or name its address with --address or {ADDRESS_VARIABLE}"
        raise DaemonUnreachable(f"{first_line(error)}; {why}{remedy}") from None
    except errors.ConnectTimeout as error:
        raise DaemonUnreachable(f"{first_line(error)}; {STUCK}") from None
    except (errors.PermissionDenied, errors.AddressInvalid) as error:
        raise DaemonUnreachable(str(error).removeprefix("connect(): ")) from None
    except errors.BatchdClientError as error:
        raise BatchdError(str(error)) from None


@contextmanager
def client_errors() -> Iterator[None]:
    """Translate errors of an open session into those of the commands."""
    try:
        yield
    except SessionLost as lost:
        raise DaemonUnreachable(f"the daemon ended before it answered: {lost}") from None
    except errors.ConnectTimeout as error:
        raise DaemonUnreachable(f"{first_line(error)}; {STUCK}") from None
    except errors.ReconnectTimeout as error:
        raise DaemonUnreachable(first_line(error)) from None
    except errors.BatchdClientError as error:
        raise BatchdError(first_line(error).removeprefix("the daemon says: ")) from None


def running_streams(context: click.Context, _argument: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Offer the names of the daemon's streams after Tab; after an error nothing, silently."""
    try:
        with running_daemon(context.params.get("address"), TAB_TIMEOUT_S) as session:
            streams = ask_status(session, TAB_TIMEOUT_S).streams
    except BatchdError:
        return []
    return completions([stream.name for stream in streams], incomplete)


RunningStream = Annotated[str, argument(shell_complete=running_streams)]
