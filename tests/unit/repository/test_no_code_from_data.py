"""batchd's source has no pickle, marshal, eval or the like, so no socket or file can reach one.

The libraries that batchd uses are another matter:
``tests/faults/test_nothing_runs_from_data.py`` checks a daemon under attack.
"""

import ast
from pathlib import Path

import pytest

import batchd
import batchd_client
import batchd_wire
from support.forbidden import forbidden_in

ALLOWED = {
    ("batchd.runtime.children", "ctypes"): "Python has no other way to call prctl(2)",
    (
        "batchd.runtime.children",
        "ctypes.CDLL",
    ): "it opens the C library that is already loaded, and passes two numbers without a cast",
    (
        "batchd.runtime.children",
        "ctypes.memmove",
    ): "it writes a forked process's name over its arguments, between the bounds that the kernel gives",
    ("batchd.runtime.children", "ctypes.string_at"): "it reads the environment between such bounds",
    ("batchd.runtime.children", "ctypes.memset"): "it clears variables of the service manager there",
    (
        "batchd.runtime.mapped_files",
        "ctypes",
    ): "it calls madvise(2) on mapped files, and the module mmap does so only for its own",
    ("batchd.runtime.mapped_files", "ctypes.CDLL"): "it opens the C library that is already loaded",
    ("batchd.runtime.mapped_files", "ctypes.c_void_p"): "it passes an address from the kernel's list of mappings",
    ("batchd.runtime.mapped_files", "ctypes.c_size_t"): "it passes a length from that list",
    ("batchd.runtime.mapped_files", "ctypes.c_int"): "it passes the advice, which is constant",
    ("batchd.runtime.numa", "ctypes"): "Python has no other way to call set_mempolicy(2)",
    ("batchd.runtime.numa", "ctypes.CDLL"): "it opens the C library that is already loaded",
    ("batchd.runtime.numa", "ctypes.c_ulong"): "it passes the bits of a node, and how many there are",
    ("batchd.runtime.rights", "ctypes"): "Python has no other way to call capget(2) and capset(2)",
    ("batchd.runtime.rights", "ctypes.CDLL"): "it opens the C library that is already loaded",
    ("batchd.runtime.rights", "ctypes.get_errno"): "it says why a call was refused",
    ("batchd.runtime.rights", "ctypes.create_string_buffer"): "it holds what capget(2) says",
    ("batchd.runtime.sandbox", "ctypes"): "Python has no other way to call landlock_*(2) and seccomp(2)",
    ("batchd.runtime.sandbox", "ctypes.get_errno"): "it says why a call was refused",
    ("batchd.runtime.sandbox", "ctypes.c_size_t"): "it passes a length that it made",
    ("batchd.runtime.sandbox", "ctypes.c_ulong"): "it passes an option of prctl(2)",
    ("batchd.runtime.sandbox", "ctypes.create_string_buffer"): "it holds the filter that it made",
    ("batchd.runtime.sandbox", "ctypes.addressof"): "it tells the kernel where that filter is",
    ("batchd.runtime.compiled", "importlib.util.find_spec"): "it looks for batchd's extensions without loading them",
    (
        "batchd.runtime.suggestions",
        "importlib.util.find_spec",
    ): "it looks for pip, for a message that names the command",
    (
        "batchd.cli.main",
        "importlib.import_module",
    ): "it imports a command's module; the name is a key of COMMANDS, and is looked up first",
    (
        "batchd.cli.daemon",
        "importlib.import_module",
    ): "it imports one of two modules of the standard library, named there, at its first use",
    (
        "batchd.data.functions.load",
        "importlib.import_module",
    ): "workers import the functions of the configuration; its author may run code anyway",
    (
        "batchd.data.functions.find",
        "importlib.machinery.PathFinder",
    ): "it looks for a module in folders, and imports nothing",
    ("batchd.data.functions.find", "importlib.machinery.PathFinder.find_spec"): "the same",
    ("batchd.data.functions.find", "importlib.machinery.PathFinder.invalidate_caches"): "the same",
    (
        "batchd.data.sources.interface",
        "importlib.import_module",
    ): "it imports the scan or reader of a source kind, beside the class of its options",
    ("batchd.data.sources.interface", "importlib.util.find_spec"): "it looks for a library that a kind of source needs",
    (
        "batchd.data.pipeline.options",
        "importlib.import_module",
    ): "it imports the effects and stages of each family of steps",
    (
        "batchd.data.samples.kinds",
        "importlib.import_module",
    ): "it imports the options of each folder of sources and of steps",
    ("batchd_client", "importlib.import_module"): "it imports one of its own modules, from a table there",
    (
        "batchd_client.extensions",
        "importlib.import_module",
    ): "it imports a module of the client that an extension names",
    (
        "batchd.commands.doctor.examine",
        "importlib.util.find_spec",
    ): "it looks for batchd's extension without loading it",
}
"""The allowed names by module, each with its reason."""
READERS_OF_MSGPACK = {"batchd_wire.codec", "batchd.data.sources.lmdb.reader", "batchd.data.sources.cache.record"}
"""The codec of messages, the reader of LMDB records, and the cache shared by the workers."""


def sources():
    """Return the text of every module of the three packages by its name, without an import."""
    found = {}
    for package in (batchd, batchd_wire, batchd_client):
        (root,) = map(Path, package.__path__)
        for file in sorted(root.rglob("*.py")):
            parts = [package.__name__, *file.relative_to(root).with_suffix("").parts]
            found[".".join(parts).removesuffix(".__init__")] = file.read_text()
    return found


SOURCES = sources()


@pytest.mark.thorough
def test_no_module_has_a_way_to_make_code_from_data():
    """Shells, pickling queues and pointers are forbidden; an exception needs a reason and a use."""
    found = [(module, *finding) for module, source in SOURCES.items() for finding in forbidden_in(source)]

    assert not [one for one in found if one[:2] not in ALLOWED]
    assert not ALLOWED.keys() - {one[:2] for one in found}


def test_all_modules_are_looked_at():
    """The check covers all modules of the three packages, also those in folders."""
    assert {
        "batchd.worker.__main__",
        "batchd.worker.fork_server",
        "batchd.data.pipeline.image.decode",
        "batchd_wire",
        "batchd_client.memory",
    } <= SOURCES.keys()


def test_the_codec_alone_reads_messages():
    """Only the listed modules import msgpack, so no bytes become a message without checks."""
    readers = {
        module
        for module, source in SOURCES.items()
        if "msgpack" in source
        for node in ast.walk(ast.parse(source))
        if (isinstance(node, ast.Import) and any(alias.name.startswith("msgpack") for alias in node.names))
        or (isinstance(node, ast.ImportFrom) and (node.module or "").startswith("msgpack"))
    }
    assert readers == READERS_OF_MSGPACK


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("import pickle", "pickle"),
        ("import os, pickle as harmless", "pickle"),
        ("from pickle import loads", "pickle.loads"),
        ("def late():\n    import marshal", "marshal"),
        ("try:\n    import cloudpickle\nexcept ImportError:\n    pass", "cloudpickle"),
        ("import dill", "dill"),
        ("import shelve", "shelve"),
        ("import multiprocessing", "multiprocessing"),
        ("import multiprocessing.shared_memory", "multiprocessing.shared_memory"),
        ("from multiprocessing import Queue", "multiprocessing.Queue"),
        ("from concurrent.futures import ProcessPoolExecutor", "concurrent.futures.ProcessPoolExecutor"),
        (
            "import concurrent.futures\nconcurrent.futures.ProcessPoolExecutor()",
            "concurrent.futures.ProcessPoolExecutor",
        ),
        ("value = eval('1')", "eval"),
        ("exec(text)", "exec"),
        ("code = compile(text, 'x', 'eval')", "compile"),
        ("handlers = {'run': exec}", "exec"),
        ("import builtins\nbuiltins.exec(text)", "builtins.exec"),
        ("__builtins__['ev' + 'al']('1')", "__builtins__"),
        ("__import__(name)", "__import__"),
        ("import importlib\nimportlib.import_module(name)", "importlib.import_module"),
        ("from importlib import import_module as load\nload(f'steps.{name}')", "importlib.import_module"),
        ("from importlib import import_module\nimport_module('pickle')", "pickle"),
        ("from importlib import import_module\nlist(map(import_module, names))", "importlib.import_module"),
        ("import importlib\nload = importlib.import_module", "importlib.import_module"),
        ("from importlib.util import spec_from_file_location", "importlib.util.spec_from_file_location"),
        ("import yaml as y\ny.load(text)", "yaml.load"),
        ("from yaml import unsafe_load", "yaml.unsafe_load"),
        ("import numpy as np\nnp.load(file)", "numpy.load without allow_pickle=False"),
        ("import numpy as np\nnp.load(file, allow_pickle=True)", "numpy.load without allow_pickle=False"),
        ("import numpy as np\nnp.load(file, allow_pickle=trusted)", "allow_pickle"),
        ("from numpy import load\nload(file)", "numpy.load without allow_pickle=False"),
        ("import subprocess\nsubprocess.run(line, shell=True)", "shell"),
        ("import subprocess\nsubprocess.run(line, **options)", "subprocess.run with keywords that do not stand there"),
        ("import os\nos.system(line)", "os.system"),
        ("from os import popen", "os.popen"),
        ("import os\ngetattr(os, 'system')(line)", "getattr system"),
        ("import ctypes\nctypes.cast(1, ctypes.c_void_p)", "ctypes.cast"),
        ("from ctypes import string_at", "ctypes.string_at"),
        ("view = kind.from_address(address)", "from_address"),
        ("socket.recv_pyobj()", "recv_pyobj"),
        ("import logging.config", "logging.config"),
        ("from os import *", "from os import *"),
        ("from .near import loads", "from .near import loads"),
    ],
    ids=lambda value: value.replace("\n", "; ") if " " in value or "(" in value else value,
)
def test_each_way_is_found_in_made_up_text(source, name):
    """The check finds each form of the code, and the test above relies on that."""
    assert name in {finding.name for finding in forbidden_in(source)}


@pytest.mark.parametrize(
    "source",
    [
        "import re\npattern = re.compile('x')",
        "import numpy as np\nnp.load(file, allow_pickle=False)",
        "import numpy as np\nnp.frombuffer(data, np.uint8)",
        "import subprocess\nsubprocess.Popen(['true'], shell=False)",
        "from importlib import import_module\nimport_module('batchd.cli.serve')",
        "from importlib.metadata import version",
        "import yaml\nyaml.safe_load(text)",
        "import tomllib\ntomllib.load(file)",
        "def evaluate(text):\n    'No eval here, nor pickle.'",
    ],
)
def test_what_only_looks_like_it_is_let_pass(source):
    """Code with similar names is harmless and passes the check."""
    assert forbidden_in(source) == []
