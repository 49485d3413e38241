"""Divide the workers' time and memory among tenants by weight, and account for it. Pure code.

    owner (a user, or a key) --the operator's shares--> tenant --order--> worker time / weight

Stride scheduling: rows are ordered for the tenant that has had the least worker time for its
weight, of those that want rows (C. Waldspurger, W. Weihl, "Stride Scheduling: Deterministic
Proportional-Share Resource Management", MIT/LCS/TM-528, 1995). An order is charged with the time
that it is expected to take, and with the difference when it is done or its worker dies. A tenant
that wants nothing saves nothing up: the others have its time at once, and it gets its share again
with the next order.

Invariant: of tenants that want rows all the time, the times for their weights differ by no more
than the workers' orders take.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from batchd.core.work import Work
from batchd_wire.status import UsageStatistics

Weights: TypeAlias = tuple[tuple[str, float], ...]
"""Of tenants, by name."""
EVERYBODY = "default"
"""The tenant of all to whom the operator gives no share of their own."""
ACCOUNTS_MAX = 1_024
"""Kept at a time. Of more, the oldest without a trainer count as one."""
OTHERS = "(others)"


class Demand(NamedTuple):
    """One claim to a part of a quantity: ``least`` to ``most``, in proportion to ``weight``."""

    weight: float
    least: int
    most: int

    def at(self, level: float) -> int:
        """What it gets where each has ``level`` for a weight of 1."""
        return max(self.least, min(self.most, int(level * self.weight)))


def divide(total: int, demands: Sequence[Demand]) -> list[int]:
    """Divide ``total`` by weight; what one does not want goes to the others.

    The parts are more than ``total`` together only where ``least`` of all is.
    """
    low, high = 0.0, max((one.most / one.weight for one in demands), default=0.0) + 1
    if sum(one.at(high) for one in demands) <= total:
        return [one.most for one in demands]
    while (level := (low + high) / 2) not in {low, high}:
        if sum(one.at(level) for one in demands) <= total:
            low = level
        else:
            high = level
    return [one.at(low) for one in demands]


def divide_by_tenant(total: int, demands: Sequence[tuple[str, Demand]], weights: Weights) -> list[int]:
    """Divide ``total`` among tenants, and what each gets among its demands; see ``divide``."""
    by_name = dict(weights)
    own: dict[str, list[int]] = {}
    for number, (tenant, _demand) in enumerate(demands):
        own.setdefault(tenant, []).append(number)
    wholes = []
    for tenant, numbers in own.items():
        weight, least, most = zip(*(demands[number][1] for number in numbers), strict=True)
        wholes.append(Demand(by_name.get(tenant, 1.0) * max(weight), sum(least), sum(most)))
    parts = [0] * len(demands)
    for numbers, amount in zip(own.values(), divide(total, wholes), strict=True):
        for number, part in zip(numbers, divide(amount, [demands[number][1] for number in numbers]), strict=True):
            parts[number] = part
    return parts


def part_of(total: int, tenant: str, weights: Weights) -> int:
    """The part of a tenant while all others want theirs; the whole, without weights."""
    every = {EVERYBODY: 1.0} | dict(weights)
    return int(total * every.get(tenant, 1.0) / sum(every.values())) if weights else total


@dataclass(slots=True, eq=False)
class Tenant:
    """Owners with one share. ``turn_s``: worker time that it was charged with, by its weight."""

    name: str
    weight: float = 1.0
    turn_s: float = 0.0
    served_s: float = 0.0
    """Worker time of its subscription that was served last, before its order; only grows."""

    def charge(self, work_s: float) -> None:
        """Charge it with an order, or with the difference to what it took."""
        self.turn_s += work_s / self.weight


@dataclass(slots=True, eq=False)
class Account:
    """What the trainers of one owner have had of one stream since ``since_s``."""

    owner: str
    tenant: Tenant
    stream: str
    since_s: float
    subscriptions: int = 0
    held_bytes: int = 0
    work_us: int = 0
    cpu_us: int = 0
    read_bytes: int = 0
    made_samples: int = 0
    delivered_samples: int = 0
    delivered_bytes: int = 0

    def settle(self, work: Work, rows: int, of_rows: int, expected_s: float) -> None:
        """Count ``rows`` of work that made ``of_rows``, and was charged as ``expected_s``."""
        part = rows / of_rows
        taken_us = round((work.busy_us + work.waited_us) * part)
        self.tenant.charge(taken_us / 1e6 - expected_s)
        self.work_us += taken_us
        self.cpu_us += round(work.cpu_us * part)
        self.read_bytes += round(work.read_bytes * part)
        self.made_samples += rows

    def lost(self, taken_s: float, expected_s: float) -> None:
        """Count an order that took so long, was charged as ``expected_s``, and made nothing."""
        self.tenant.charge(taken_s - expected_s)
        self.work_us += round(taken_s * 1e6)

    def absorb(self, other: "Account") -> None:
        """Count what another one has counted, too."""
        self.since_s = min(self.since_s, other.since_s)
        for name in ("work_us", "cpu_us", "read_bytes", "made_samples", "delivered_samples", "delivered_bytes"):
            setattr(self, name, getattr(self, name) + getattr(other, name))


class Tenants:
    """All tenants and accounts. A tenant without a weight has 1."""

    def __init__(self, weights: Weights) -> None:
        self.least_s = 0.0
        """The turn of the tenant that was served last, before its order; only grows."""
        self._tenants: dict[str, Tenant] = {}
        self._accounts: dict[tuple[str, str], Account] = {}
        self.weigh(weights)

    def weigh(self, weights: Weights) -> None:
        """Set the weights from now on."""
        for tenant in self._tenants.values():
            tenant.weight = 1.0
        for name, weight in weights:
            self._tenant(name).weight = weight

    def account(self, owner: str, tenant: str, stream: str, now_s: float) -> Account:
        """The account of an owner for a stream; ``tenant``: whose share the owner has now."""
        account = self._accounts.get((owner, stream))
        if account is None:
            self._fold(now_s)
            account = self._accounts[owner, stream] = Account(owner, self._tenant(tenant), stream, now_s)
        account.tenant = self._tenant(tenant)
        return account

    def usage(self, now_s: float) -> Iterator[UsageStatistics]:
        """The accounts, as they are now."""
        for account in self._accounts.values():
            yield UsageStatistics(
                owner=account.owner,
                stream=account.stream,
                tenant=account.tenant.name,
                weight=account.tenant.weight,
                age_s=now_s - account.since_s,
                subscriptions=account.subscriptions,
                held_bytes=account.held_bytes,
                work_s=account.work_us / 1e6,
                cpu_s=account.cpu_us / 1e6,
                read_bytes=account.read_bytes,
                made_samples=account.made_samples,
                delivered_samples=account.delivered_samples,
                delivered_bytes=account.delivered_bytes,
            )

    def _tenant(self, name: str) -> Tenant:
        tenant = self._tenants.get(name)
        if tenant is None:
            tenant = self._tenants[name] = Tenant(name)
        return tenant

    def _fold(self, now_s: float) -> None:
        """Make room: count the oldest account without a trainer among the others."""
        if len(self._accounts) < ACCOUNTS_MAX:
            return
        oldest = next((key for key, one in self._accounts.items() if not one.subscriptions and key[0] != OTHERS), None)
        if oldest is not None:
            folded = self._accounts.pop(oldest)
            key = OTHERS, OTHERS
            if key not in self._accounts:
                self._accounts[key] = Account(OTHERS, self._tenant(EVERYBODY), OTHERS, now_s)
            self._accounts[key].absorb(folded)
