"""The helpers of the configuration.

Lines of keys, amounts of memory, CPUs, the runtime directory.
"""

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchd.config.directories import choose_runtime_directory
from batchd.config.problems import Place, key_places
from batchd.config.tree import DaemonConfig
from batchd.errors import ConfigInvalid, KeyPath
from batchd.runtime.cpus import available_cpus
from batchd.runtime.sizes import format_bytes, parse_bytes, round_bytes
from support.toml_values import TREES, written


def paths_of(value: Any, path: KeyPath = ()) -> set[KeyPath]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return {path} | {found for name, item in items for found in paths_of(item, (*path, name))}


@given(TREES, st.sampled_from(["", " ", "\n", " # ] } ,\n\t"]))
def test_every_key_that_tomllib_reads_has_a_line(tree: dict[str, Any], separator: str) -> None:
    """Lines and values have the same keys, for all contents of strings and comments."""
    tables = {key: value for key, value in tree.items() if isinstance(value, dict)}
    plain = {key: value for key, value in tree.items() if key not in tables}
    text = "".join(f"{json.dumps(key)} = {written(value, separator)}\n" for key, value in plain.items())
    for key, table in tables.items():
        text += f"[ {json.dumps(key)} ] # [x]\n"
        text += "".join(f"{json.dumps(name)}.it = {written(value, separator)}\n" for name, value in table.items())

    assert set(key_places(text)) == paths_of(tomllib.loads(text)) - {()}


def test_lines_are_those_of_the_keys() -> None:
    """The text has multi-line strings, arrays of tables and dotted keys."""
    text = "a = \"\"\"\n[x]\n\"\"\"\nb.c = 1\n[[d]]\ne = [\n1,\n{ f = 2 }]\n[[d]]\n[d.g]\nh = '''\n'''\ni = 1979-05-27 07:32:00\n"

    assert {path: place.line for path, place in key_places(text).items()} == {
        ("a",): 1,
        ("b",): 4,
        ("b", "c"): 4,
        ("d",): 5,
        ("d", 0): 5,
        ("d", 0, "e"): 6,
        ("d", 0, "e", 0): 7,
        ("d", 0, "e", 1): 8,
        ("d", 0, "e", 1, "f"): 8,
        ("d", 1): 9,
        ("d", 1, "g"): 10,
        ("d", 1, "g", "h"): 11,
        ("d", 1, "g", "i"): 13,
    }


def test_places_are_columns_and_lengths_too() -> None:
    """They are those of written keys, with quotes, and of the first character of items."""
    text = '[a]\n"b c".d = 1\n  e = [\n1, """x\n""", { f = 2 }]\n'

    assert {path: place for path, place in key_places(text).items() if len(path) > 1} == {
        ("a", "b c"): Place(2, 1, 5),
        ("a", "b c", "d"): Place(2, 7, 1),
        ("a", "e"): Place(3, 3, 1),
        ("a", "e", 0): Place(4, 1, 1),
        ("a", "e", 1): Place(4, 4, 1),
        ("a", "e", 2): Place(5, 6, 1),
        ("a", "e", 2, "f"): Place(5, 8, 1),
    }


@pytest.mark.parametrize(
    ("text", "count"),
    [("4GiB", 4 << 30), ("512 mib", 512 << 20), ("1.5KiB", 1536), ("1GB", 10**9), ("100", 100), ("7 B", 7)],
)
def test_amounts_of_memory_are_read(text: str, count: int) -> None:
    """Units are binary or decimal; fractions are allowed if they give whole bytes."""
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "1e9", "4G", "1 GiB 2", "0.3B", "٤GiB"])
def test_text_that_is_no_amount_of_memory_is_refused(text: str) -> None:
    """The reader guesses nothing: "4G" could have two meanings."""
    with pytest.raises(ValueError, match=r"no amount|whole number"):
        parse_bytes(text)


@given(st.integers(0, 1 << 60))
def test_amounts_are_written_exactly(count: int) -> None:
    """A default that is printed reads back as the same value."""
    assert parse_bytes(format_bytes(count)) == count


def test_amounts_for_people_have_one_decimal() -> None:
    """Slots have about 38.5 MB, and no user counts their bytes."""
    assert [round_bytes(count) for count in (0, 1023, 1024, 38_543_360)] == ["0 B", "1023 B", "1.0 KiB", "36.8 MiB"]


def fake_cgroup(root: Path, mountinfo: str, cgroup: str, files: Mapping[str, str]) -> Path:
    for name, text in {"proc/self/mountinfo": mountinfo, "proc/self/cgroup": cgroup, **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


V2 = "40 30 0:38 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"
V1_FILES = {
    "sys/fs/cgroup/cpu,cpuacct/x/cpu.cfs_quota_us": "-1\n",
    "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "400000\n",
    "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
}
V1 = "32 31 0:29 /docker/1 /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"


@pytest.mark.parametrize(
    ("group", "cpus"),
    [
        ((V2, "0::/a/b\n", {"sys/fs/cgroup/a/b/cpu.max": "150000 100000\n"}), 2),
        ((V2, "0::/a/b\n", {"sys/fs/cgroup/a/cpu.max": "300000 100000", "sys/fs/cgroup/a/b/cpu.max": "max 100000"}), 3),
        ((V2, "0::/a\n", {"sys/fs/cgroup/a/cpu.max": "1000 100000"}), 1),
        ((V2, "0::/a\n", {"sys/fs/cgroup/a/cpu.max": "99900000 100000"}), 8),
        ((V2, "0::/a\n", {"sys/fs/cgroup/a/cpu.max": "odd"}), 8),
        ((V1, "4:cpu,cpuacct:/docker/1/x\n0::/\n", V1_FILES), 4),
        (("", "", {}), 8),
    ],
)
def test_cpus_are_affinity_and_quota_whichever_is_less(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group: tuple[str, str, dict[str, str]], cpus: int
) -> None:
    """The table has both versions of control groups, limits of parents, and partial containers."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _pid: set(range(8)))

    assert available_cpus(fake_cgroup(tmp_path, *group)) == cpus


def test_as_many_workers_as_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """The value "auto" is resolved on the daemon's machine, not where the file was written."""
    monkeypatch.setattr("batchd.config.tree.available_cpus", lambda: 5)

    assert DaemonConfig().worker_count() == 5
    assert DaemonConfig(workers=3).worker_count() == 3


def test_the_first_runtime_directory_that_is_usable_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may exist or not, but the daemon must be able to create sockets there."""
    blocked = tmp_path / "blocked"
    blocked.write_text("a file, so nothing can be made in it")
    monkeypatch.setattr("batchd_wire.runtime.SYSTEM_DIRECTORY", blocked / "batchd")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))

    assert choose_runtime_directory(None).path == tmp_path / "batchd"
    assert choose_runtime_directory(tmp_path / "mine").path == tmp_path / "mine"

    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "none"))
    with pytest.raises(ConfigInvalid, match="; set runtime_dir in"):
        choose_runtime_directory(None)
    with pytest.raises(ConfigInvalid, match="107"):
        choose_runtime_directory(tmp_path / ("x" * 100))
