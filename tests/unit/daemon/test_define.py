"""Who may define streams, and what becomes of one whose rights the daemon cannot take."""

import grp
import os
import pwd

import pytest

from batchd.config.tree import DefineConfig
from batchd.daemon import identity as identities
from batchd.daemon.derive import define
from batchd.daemon.identity import Identity
from batchd.errors import BatchdError

USER, GROUP = pwd.getpwuid(os.geteuid()).pw_name, grp.getgrgid(os.getegid()).gr_name
ANNA = Identity(51_234, (51_234, 51_300))


@pytest.mark.parametrize(
    ("who", "identity", "may"),
    [
        (f"user:{USER}", Identity(os.geteuid(), (0,)), True),
        ("user:51234", ANNA, True),
        (f"group:{GROUP}", Identity(51_234, (51_234, os.getegid())), True),
        ("group:51300", ANNA, True),
        ("group:51234", Identity(51_235, (51_235,)), False),
        ("user:no-such-user", ANNA, False),
        ("group:no-such-group", ANNA, False),
        ("key:team", Identity(key="team", public="p"), True),
        ("key:team", Identity(key="other", public="p"), False),
        (f"user:{USER}", Identity(key=USER, public="p"), False),
        ("key:team", Identity(host="10.0.0.3"), False),
        ("key:team", Identity(51_234, (51_234,), is_operator=True), True),
    ],
)
def test_who_is_meant_is_told_by_the_kernel_or_a_key(who: str, identity: Identity, may: bool) -> None:
    """Names are those of this host; an operator may always, and a host without a key never."""
    assert define.may_define(DefineConfig(who=(who,), roots=("/data",)), identity) is may
    assert not define.may_define(None, identity)


def test_a_user_that_is_not_mapped_here_is_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several users look like one then, so it is none of those that are named."""
    monkeypatch.setattr(identities, "unmapped_id", lambda _kind: 65_534)
    nobody = Identity(65_534, (65_534,))

    assert not nobody.is_proved
    assert not define.may_define(DefineConfig(who=("user:65534", "group:65534"), roots=("/data",)), nobody)


def test_a_daemon_that_cannot_take_the_rights_of_who_asks_says_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads nothing for him then; its own user, and keys, need none."""
    monkeypatch.setattr(define, "lacking", lambda: ["CAP_KILL"])

    with pytest.raises(
        BatchdError, match=r"without CAP_KILL, and cannot read .* the rights of user:51234: .* as root, or .*CAP_SETUID"
    ):
        define._take_user(ANNA)
    for identity in (Identity(os.geteuid(), (0,), is_operator=True), Identity(key="team", public="p")):
        define._take_user(identity)


@pytest.mark.parametrize(
    ("text", "root", "is_below"),
    [
        ("/data", "/data/", True),
        ("/database", "/data", False),
        ("/data/../etc", "/data", False),
        ("s3://bucket/sets", "s3://bucket/sets/", True),
        ("s3://bucket/sets2", "s3://bucket/sets/", False),
        ("s3://bucket2/x", "s3://bucket", False),
        ("https://host/data/x", "https://host/data", True),
        ("https://host/data/../x", "https://host/data", False),
        ("https://host:8443/data/x", "https://host/data", False),
        ("https://host@other/data/x", "https://host", False),
        ("file:///data/x", "/data", False),
    ],
)
def test_a_path_or_url_is_below_a_root_by_whole_names(text: str, root: str, is_below: bool) -> None:
    """A slash behind either changes nothing."""
    rules = DefineConfig(who=("key:team",), roots=(root,))

    assert define._root_of(text, rules) == define._root_of(f"{text}/", rules) == (root if is_below else "")
