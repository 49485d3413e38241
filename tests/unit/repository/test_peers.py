"""How ``make bench-peers`` evaluates its measurements.

The tests cover ratios by round, the order of the tables, and the targets.
"""

import ctypes
import importlib
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
MODULES = ("common", "environments", "sides", "tables", "foreign", "harness", "pool_peers")


@pytest.fixture
def peers(monkeypatch):
    """Import the benchmark's modules, which are in one folder and in no package."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.syspath_prepend(str(BENCHMARKS / "peers"))
    yield SimpleNamespace(**{name: importlib.import_module(name) for name in MODULES})
    for name in MODULES:
        sys.modules.pop(name, None)


PR_SET_CHILD_SUBREAPER = 36
PID_OF_NO_PROCESS = 1 << 30


def rounds(peers, *rates, cpu_s=2.0, pss_mb=100, first_batch_s=1.0):
    """Make rounds of one second with these images/s."""
    return {
        number: peers.tables.Measurement(rate, 1.0, cpu_s, pss_mb * 1_000_000, first_batch_s)
        for number, rate in enumerate(rates)
    }


def test_a_ratio_is_of_measurements_of_the_same_round(peers):
    """A round with a failed side gives no ratio, and slow rounds of both sides cancel out."""
    ours, theirs = rounds(peers, 1000, 500, 900), rounds(peers, 500, 250, 300)
    del theirs[2]

    assert peers.tables.ratios(ours, theirs) == [2.0, 2.0]


def test_figures_say_what_is_reached_and_what_is_short(peers):
    """Each target is a line; a target whose peer cannot be installed is named instead."""
    table = {"batchd": rounds(peers, 1400), "tf-data": rounds(peers, 1000), "dali": rounds(peers, 1000)}

    found, missing = peers.tables.figures({peers.sides.PHOTOGRAPHS: table})

    lines = [figure.line for figure in found]
    assert "BENCH vs-tfdata 1.40 >= 1.35 ok" in lines
    assert "BENCH vs-dali 1.40 >= 1.9 short" in lines
    assert "vs-ffcv-resized" in missing
    assert {figure.name for figure in found}.isdisjoint(missing)
    assert len(found) + len(missing) == len(peers.sides.TARGETS) + len(peers.sides.LEAST_TARGETS)


def test_memory_and_first_batch_are_compared_with_the_lowest_named_peer(peers):
    """Threads of the trainer count for themselves, not among the peers with processes."""
    table = {
        "batchd": rounds(peers, 1, pss_mb=200, first_batch_s=1.0),
        "spdl-region": rounds(peers, 1, pss_mb=100, first_batch_s=0.5),
        "queue": rounds(peers, 1, pss_mb=300, first_batch_s=4.0),
        "grain-cv2": rounds(peers, 1, pss_mb=400, first_batch_s=2.0),
    }

    found, _missing = peers.tables.figures({peers.sides.PHOTOGRAPHS: table})

    lines = [figure.line for figure in found]
    assert "BENCH pss-vs-spdl-same-decoder 2.00 <= 1.5 short" in lines
    assert "BENCH first-batch-vs-spdl-same-decoder 2.00 <= 1.1 short" in lines
    assert "BENCH first-batch-vs-loader-processes 0.50 <= 0.8 ok" in lines


def test_each_target_names_sides_of_its_table(peers):
    """A renamed side would turn its target into one that is never measured."""
    names = {table: {side.name for side in sides} for table, sides in peers.sides.TABLES.items()}
    for target in peers.sides.TARGETS:
        assert {target.side, *target.ours} <= names[target.table]
    for least in peers.sides.LEAST_TARGETS:
        assert set(least.sides) <= names[peers.sides.PHOTOGRAPHS]


def test_resized_pictures_count_by_the_fastest_of_our_variants(peers):
    """The target allows batchd to read the same files or shards made from them."""
    table = {
        "batchd": rounds(peers, 2000),
        "batchd-shards": rounds(peers, 3000),
        "tf-data": rounds(peers, 1000),
    }

    found, _missing = peers.tables.figures({peers.sides.RESIZED: table})

    assert [figure.value for figure in found if figure.name == "vs-tfdata-resized"] == [3.0]


def test_a_table_has_a_row_for_each_measured_side_the_fastest_first(peers):
    """A row has the median, smallest and largest; a side that failed every round has no row."""
    sides = peers.sides.TABLES[peers.sides.PHOTOGRAPHS]
    table = {
        "tf-data": rounds(peers, 500, 600, 550, cpu_s=1.1, pss_mb=684, first_batch_s=3.5),
        "batchd": rounds(peers, 1100, 1200, 1100),
        "batchd-shards": rounds(peers, 2200, 2400, 2200),
        "dali": {},
    }

    lines = peers.tables.markdown(sides, table, ["batchd"]).splitlines()

    assert lines[0].endswith("| batchd ÷ it |")
    assert [line.split(" | ")[0] for line in lines[3:]] == ["| batchd", "| tf.data (decode_and_crop_jpeg)"]
    assert lines[4].endswith("| 550 (500 to 600) | 2.00 | 684 | 3.50 | 2.00 (2.00 to 2.20) |")


def test_the_sharing_table_has_a_column_for_each_number_of_trainers(peers):
    """Images/s are those of one trainer, and a missing measurement is marked as such."""
    sides = peers.sides.TABLES[peers.sides.SHARING]
    table = {
        "batchd-1": rounds(peers, 1500),
        "batchd-2": rounds(peers, 1400),
        "batchd-4": rounds(peers, 1200),
        "torch-cv2-4": rounds(peers, 300),
    }

    text = peers.tables.sharing_markdown(sides, table)

    assert "| batchd | 1500 (1500 to 1500) | 1400 (1400 to 1400) | 1200 (1200 to 1200) |  |" in text
    assert "| torch DataLoader, cv2 | not measured | not measured | 300 (300 to 300) | 4.00 (4.00 to 4.00) |" in text
    assert "TensorSocket" not in text


def test_every_number_to_reach_is_of_sides_that_are_in_its_table(peers):
    """Every side has its script and its environment."""
    for target in peers.sides.TARGETS:
        names = {side.name for side in peers.sides.TABLES[target.table]}
        assert {*target.ours, target.side} <= names
    for side in (side for sides in peers.sides.TABLES.values() for side in sides):
        assert (BENCHMARKS / "peers" / side.script).exists()
        assert side.environment in {*peers.environments.ENVIRONMENTS, peers.environments.OURS}


def test_worker_hosts_are_compared_with_sides_that_exist(peers):
    """Each side has its script and environment, and each target names a peer in that table."""
    for comparison in peers.pool_peers.COMPARISONS:
        ours, *others = comparison.sides
        assert ours.environment == peers.environments.OURS
        assert comparison.targets.keys() <= {side.name for side in others}
        for side in comparison.sides:
            assert (BENCHMARKS / "peers" / side.script).exists()
            assert side.environment in {*peers.environments.ENVIRONMENTS, peers.environments.OURS}


def test_ray_has_a_network_of_its_own(peers):
    """Ray listens on every address, so it gets its own loopback, and ends with its namespaces."""
    assert {"--net", "--pid", "--kill-child"} <= set(peers.environments.command("ray"))
    assert peers.environments.command("torch") == [peers.environments.python("torch")]


def windows(peers, *others):
    """Make a measurement that numbers its windows while other programs use these cores."""
    numbered = iter(enumerate(others, 1))

    def measure():
        number, cores = next(numbered)
        return peers.foreign.Window(number, peers.foreign.Beside(cores, 0.0, 1.0))

    return measure


def test_a_window_beside_other_programs_is_measured_again(peers, capsys):
    """The line names the difference, and CPU time taken by the host counts as well."""
    assert peers.foreign.quiet("one", windows(peers, 0.0, 2.0)).found == 1
    assert capsys.readouterr().out == ""

    assert peers.foreign.quiet("side", windows(peers, 1.5, 0.11, 0.09, 0.0)).found == 3
    assert capsys.readouterr().out.splitlines() == [
        "  side: rejected, others used 1.50 cores, the host took 0.00",
        "  side: rejected, others used 0.11 cores, the host took 0.00",
    ]
    assert not peers.foreign.Beside(0.06, 0.06, 1.0).is_quiet


def test_a_machine_that_is_never_quiet_gives_figures_that_say_so(peers, monkeypatch, capsys, tmp_path):
    """The last try is kept; figures of later windows, and of a later part, have no mark."""
    bench = peers.harness.Bench(tmp_path, tmp_path, rounds=1)
    beside = iter([*[2.0] * peers.foreign.TRIES, 0.0, *[2.0] * peers.foreign.TRIES])
    monkeypatch.setattr(
        peers.harness, "_beside", lambda measure: windows(peers, next(beside))()._replace(found=measure())
    )
    figure = peers.harness.Figure("rate", 3.0, ">=", 2)

    for answer in ("loud", "quiet"):
        assert bench.measure("side", lambda answer=answer: answer) == answer
        bench.report(figure)
        bench.report(figure)
    bench.measure("side", str)
    bench.begin()
    bench.report(figure)

    assert "side: kept after 4 tries, others used 2.00 cores" in capsys.readouterr().out
    marked = "BENCH rate 3.00 >= 2 ok (1 window beside other programs)"
    assert [one.line for one in bench.figures] == [marked] * 2 + ["BENCH rate 3.00 >= 2 ok"] * 3


def test_a_figure_beside_a_peer_that_is_not_installed_is_named(peers, capsys, tmp_path):
    """A ratio is of one round and of the fastest peer in it; without a peer there is no figure."""
    bench = peers.harness.Bench(tmp_path, tmp_path, rounds=2)
    rates = [{"ours": 6.0, "this": 2.0, "that": 4.0}, {"ours": 3.0, "this": 1.0, "that": 0.5}]

    bench.compare("rows", rates, "ours", ("this", "that"), 2)
    bench.compare("rows-to-third", rates, "ours", ("this", "third"), 2)

    assert [figure.line for figure in bench.figures] == ["BENCH rows 2.25 >= 2 ok"]
    assert "rows-to-third: not measured, as not installed here: third" in capsys.readouterr().out


@pytest.fixture
def adopting():
    """Undo what ``Foreign`` does to the process that measures."""
    yield
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 0)


@pytest.mark.thorough(after_first=True)
@pytest.mark.usefixtures("adopting")
@pytest.mark.parametrize("waits", [True, False])
def test_what_descendants_compute_is_ours_and_what_others_do_is_not(peers, waits):
    """Waited for or not. For a tree without processes, all CPU time is that of other programs."""
    burn = "import time\nwhile time.process_time() < 0.3: pass"
    script = f"import subprocess, sys; child = subprocess.Popen([sys.executable, '-c', {burn!r}], stdout=2); print(child.pid)"
    ours, theirs = peers.foreign.Foreign(os.getpid()), peers.foreign.Foreign(PID_OF_NO_PROCESS)
    waiting = "; child.wait()" if waits else ""
    orphan = int(subprocess.run([sys.executable, "-c", script + waiting], check=True, stdout=subprocess.PIPE).stdout)
    if not waits:
        os.waitid(os.P_PID, orphan, os.WEXITED | os.WNOWAIT)  # it ends, and stays as a zombie

    assert ours.beside().own_s >= 0.25
    assert theirs.beside().own_s == 0.0
    assert theirs.beside().others > 0
    if not waits:
        os.waitpid(orphan, 0)


def test_a_tree_has_the_children_of_children(peers):
    """A process of a side may start the side's workers."""
    script = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'print(1, flush=True); input()'])"
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        child.stdout.readline()

        found = peers.common.tree(child.pid)

        assert len(found) == 2
        assert all(peers.common.started(pid) and peers.common.pss_bytes(pid) > 0 for pid in found)
        child.stdin.close()


def test_a_random_box_lies_in_the_image(peers):
    """This holds also if no box with these proportions fits."""
    for height, width in ((375, 500), (10, 1000), (1000, 10), (1, 1)):
        for _ in range(200):
            top, left, down, across = peers.common.random_box(height, width)
            assert 0 <= top <= top + down <= height
            assert 0 <= left <= left + across <= width
            assert down > 0
            assert across > 0
