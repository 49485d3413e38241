"""Whose share a trainer has, and under which name what it has is counted."""

import grp
import os
import pwd

import pytest

from batchd.config.tree import DaemonConfig, TenantShare
from batchd.daemon.identity import Identity, Tenancy, unknown_names, weights_of

SELF = pwd.getpwuid(os.geteuid()).pw_name
GROUP = grp.getgrgid(os.getegid()).gr_name
NO_USER = 1 << 30


@pytest.fixture
def tenancy() -> Tenancy:
    return Tenancy(
        {
            "keys": TenantShare(keys=("team-a",)),
            "person": TenantShare(users=(SELF, "4711")),
            "group": TenantShare(groups=(GROUP, "4712"), users=(SELF,)),
            "default": TenantShare(weight=2.0),
        }
    )


@pytest.mark.parametrize(
    ("identity", "tenant", "owner"),
    [
        (Identity(key="team-a", host="10.0.0.3"), "keys", "key:team-a"),
        (Identity(key="team-b", host="10.0.0.3"), "default", "key:team-b"),
        (Identity(host="10.0.0.3"), "default", "host:10.0.0.3"),
        (Identity(os.geteuid(), (os.getegid(),)), "person", f"user:{SELF}"),
        (Identity(4711), "person", "user:4711"),
        (Identity(NO_USER, (4712,)), "group", f"user:{NO_USER}"),
        (Identity(NO_USER, (os.getegid(), 4712)), "group", f"user:{NO_USER}"),
        (Identity(NO_USER, (4713,)), "default", f"user:{NO_USER}"),
    ],
    ids=["key", "another key", "no key", "user", "number", "group", "groups", "nobody's"],
)
def test_the_first_share_that_names_a_trainer_has_it(tenancy, identity, tenant, owner):
    """Its user counts before its groups."""
    assert (tenancy.tenant(identity), identity.owner) == (tenant, owner)


def test_a_key_is_no_user_of_the_same_name(tenancy):
    """The name of a key is the operator's, and that of a user the machine's."""
    assert tenancy.tenant(Identity(key=SELF)) == "default"


def test_weights_are_those_of_the_file():
    """Those that it does not name have 1 in the core."""
    daemon = DaemonConfig.model_validate({"shares": {"a": {"weight": 3.0}, "b": {}}})
    assert weights_of(daemon) == (("a", 3.0), ("b", 1.0))


def test_users_and_groups_that_this_machine_lacks_are_named():
    """Numbers are taken as they are."""
    shares = {
        "a": TenantShare(users=("nobody-of-that-name", "4711")),
        "b": TenantShare(groups=(GROUP, "no-such-group")),
    }
    assert list(unknown_names(shares)) == [
        (("a", "users"), "this machine has no user 'nobody-of-that-name'"),
        (("b", "groups"), "this machine has no group 'no-such-group'"),
    ]
    assert Tenancy(shares).tenant(Identity(4711)) == "a"
