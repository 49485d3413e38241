"""Whose share a trainer has, and under which name what it has is counted."""

import grp
import os
import pwd

import pytest

from batchd.config.tree import DaemonConfig, DefineConfig, TenantShare
from batchd.daemon import identity
from batchd.daemon.identity import Identity, Tenancy, look_up, named_in, unknown_names, weights_of

SELF = pwd.getpwuid(os.geteuid()).pw_name
GROUP = grp.getgrgid(os.getegid()).gr_name
NO_USER = 1 << 30


def tenancy_of(shares: dict[str, TenantShare]) -> Tenancy:
    return Tenancy(shares, look_up(name for _key, name in named_in(DaemonConfig(shares=shares))))


@pytest.fixture
def tenancy() -> Tenancy:
    return tenancy_of(
        {
            "keys": TenantShare(keys=("team-a",)),
            "person": TenantShare(users=(SELF, "4711")),
            "group": TenantShare(groups=(GROUP, "4712"), users=(SELF,)),
            "default": TenantShare(weight=2.0),
        }
    )


@pytest.mark.parametrize(
    ("trainer", "tenant", "owner"),
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
def test_the_first_share_that_names_a_trainer_has_it(tenancy, trainer, tenant, owner):
    """Its user counts before its groups."""
    assert (tenancy.tenant(trainer), trainer.owner) == (tenant, owner)


def test_names_are_those_of_the_machine_itself(tmp_path, monkeypatch):
    """A changed file is read again, and a damaged or missing one has no names."""
    file = tmp_path / "passwd"
    monkeypatch.setattr(identity, "PASSWD", file)
    assert Identity(7).owner == "user:7"
    for time_ns, text, owner in (
        (1, "anna:x:7:7::/:\nben:x:7:7::/:\n", "user:anna"),
        (2, "\n:x:7\nanna:x:no\nx", "user:7"),
    ):
        file.write_text(text)
        os.utime(file, ns=(time_ns, time_ns))
        assert Identity(7).owner == owner


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
        "b": TenantShare(groups=(GROUP, "no-such-group"), keys=("team", "other")),
    }
    who = ("group:no-such-group", f"group:{GROUP}", "user:no-such-user", "key:third")
    daemon = DaemonConfig(shares=shares, define=DefineConfig(who=who, roots=("/data",)))
    names = [
        (("define", "who", 0), "this machine has no group 'no-such-group'"),
        (("define", "who", 2), "this machine has no user 'no-such-user'"),
        (("shares", "a", "users", 0), "this machine has no user 'nobody-of-that-name'"),
        (("shares", "b", "groups", 1), "this machine has no group 'no-such-group'"),
    ]
    assert list(unknown_names(daemon, None)) == names
    keys = [path for path, text in unknown_names(daemon, ["team"]) if "there is no key" in text]
    assert keys == [("define", "who", 3), ("shares", "b", "keys", 1)]
    assert tenancy_of(shares).tenant(Identity(4711)) == "a"
