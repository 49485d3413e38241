"""Programs that are forked from the launcher find what a new process finds."""

import json
import os
import signal

import pytest

from batchd.runtime import children
from batchd.runtime.children import PIPE
from support.daemon_process import clean_environment
from support.launcher import Program, start_program
from support.waiting import PATIENCE_S

pytestmark = pytest.mark.usefixtures("_launcher")
TELL = """
import json, os, signal, sys
fds = [fd for fd in sorted(os.listdir("/proc/self/fd")) if os.path.exists("/proc/self/fd/" + fd)]
told = sys.argv[1:], os.getcwd(), dict(os.environ), os.getppid(), os.getpid() == os.getpgid(0), fds, sys.stdin.read()
print(json.dumps([*told, signal.getsignal(signal.SIGHUP) == signal.SIG_DFL, __name__]))
sys.exit(7)
"""


@pytest.mark.parametrize("is_new", [False, True], ids=["fork", "new process"])
def test_a_program_finds_its_arguments_folder_environment_and_parent(tmp_path, is_new):
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "tell.py").write_text(TELL)
    environment = {**clean_environment(), "ONLY_HERE": "1", "PYTHONPATH": str(tmp_path / "modules")}

    program = start_program(["tell", "a", "b"], environment=environment, folder=tmp_path, has_input=True, is_new=is_new)
    program.stdin.write(b"words")
    program.stdin.close()
    told = json.loads(program.stdout.read())

    assert program.wait(PATIENCE_S) == 7
    program.stdout.close()
    assert told[:2] == [["a", "b"], str(tmp_path)]
    assert told[2].items() >= environment.items()
    assert told[3:] == [os.getpid(), True, ["0", "1", "2"], "words", True, "__main__"]
    assert isinstance(program, Program) != is_new


def test_a_signal_ends_a_forked_program(tmp_path):
    (tmp_path / "waits.py").write_text("import signal\nprint('here', flush=True)\nsignal.pause()\n")
    program = start_program(["waits"], environment=clean_environment(), folder=tmp_path)
    program.stdout.readline()
    assert program.poll() is None
    program.send_signal(signal.SIGTERM)
    assert program.wait(PATIENCE_S) == -signal.SIGTERM
    program.stdout.close()


@pytest.mark.parametrize("fixtures", [[], ["forked_children"]], ids=["new process", "fork"])
def test_a_child_reads_what_it_is_given_and_its_output_is_read(request, fixtures):
    for fixture in fixtures:
        request.getfixturevalue(fixture)
    with children.start("json.tool", "--compact", given=b'{"a": [1, 2]}', stdout=PIPE) as child:
        assert child.read(PATIENCE_S, 100) == b'{"a":[1,2]}\n'
        assert child.reap() == 0
        assert isinstance(child._popen, Program) == bool(fixtures)
