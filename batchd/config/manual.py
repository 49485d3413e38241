"""The manual of the problems that ``batchd check`` prints, by their names. CLI and documentation.

``wrong`` and ``right`` are lines of batchd.toml, or a command. Lines of a stream stand in this one:

    [streams.photos]
    source = { type = "folder", path = "photos" }
    batch_size = 4
    pipeline = [{ op = "decode" }, { op = "resize", size = [224, 224] }]

Invariant: every kind of problem has an entry; ``wrong`` has that problem, and ``right`` none.
"""

from typing import NamedTuple

from batchd.errors import ProblemKind


class Entry(NamedTuple):
    """What a problem means and what to do; an example that has it, and one that does not."""

    text: str
    wrong: str = ""
    right: str = ""


_ENCLOSED = (
    "batchd check batchd.toml --set daemon.sandbox=on --set 'streams.photos.pipeline.1="
    """{op = "call", function = "augment:brighten", outputs = {image = "uint8[48,64,3]"}}'"""
)

MANUAL: dict[ProblemKind, Entry] = {
    ProblemKind.UNREADABLE_FILE: Entry(
        "The configuration itself cannot be read: there is no such file, this user may not read it, it is not UTF-8, or it "
        "is longer than 4 MiB. Without a name, commands read batchd.toml in the current folder; name another file with -c "
        "FILE. `batchd init PATH` writes a first one for your data.",
        "batchd check nothing.toml",
        "batchd check batchd.toml",
    ),
    ProblemKind.NOT_TOML: Entry(
        "The file is no TOML. The line is where reading ended, so the mistake is there or just before: a missing quote, "
        "bracket or value. Strings need quotes, true and false are small, and an inline table is on one line.",
        "batch_size = sixty",
        "batch_size = 60",
    ),
    ProblemKind.KEY_TWICE: Entry(
        "A key or a table is twice in the file, and TOML has no rule which one counts. Join the two tables, or remove "
        "one of the keys. Two streams need two names.",
        "batch_size = 4\nbatch_size = 8",
        "batch_size = 8",
    ),
    ProblemKind.UNKNOWN_KEY: Entry(
        "A table has a key that batchd does not know, often a slip, or the name that another tool has for it. Nothing is "
        "ignored: a key that did nothing would be noticed after the training. The help names the key that was probably "
        "meant, or all that are known there; `batchd config` explains each.",
        "batchsize = 64\nbatch_size = 64",
        "batch_size = 64",
    ),
    ProblemKind.MISSING_KEY: Entry(
        "A key without a default is not there. A stream needs at least a source and a batch_size, a source its path, and "
        "some steps a size. The note below the problem says what the key is for.",
        'pipeline = [{ op = "decode" }, { op = "random_crop" }]',
        'pipeline = [{ op = "decode" }, { op = "random_crop", size = [224, 224] }]',
    ),
    ProblemKind.UNKNOWN_KIND: Entry(
        "The op of a step, or the type of a source, is none that batchd has. The help has the nearest one. docs/steps.md and "
        'docs/sources.md list all; your own code is the step "call", or a source of the type "python".',
        'pipeline = [{ op = "decode" }, { op = "rezise", size = [224, 224] }]',
        'pipeline = [{ op = "decode" }, { op = "resize", size = [224, 224] }]',
    ),
    ProblemKind.MISSING_KIND: Entry(
        "A step does not say its op, or a source its type, so its other keys have no meaning. If another "
        "key has the word, as in other tools, the help says so.",
        'source = { kind = "folder", path = "photos" }',
        'source = { type = "folder", path = "photos" }',
    ),
    ProblemKind.WRONG_TYPE: Entry(
        "The value is of another type than the key takes: a string where a number belongs, a number where an array does. "
        "TOML tells them apart by how they are written, and batchd converts none.",
        'batch_size = "64"',
        "batch_size = 64",
    ),
    ProblemKind.WRONG_VALUE: Entry(
        "The value has the right type, and still cannot be: it is outside of the limits, an array has too few or too many "
        "items, or it contradicts another key of the same table. The problem names the limits or the other key.",
        "batch_size = 0",
        "batch_size = 1",
    ),
    ProblemKind.WRONG_OVERRIDE: Entry(
        "A value of --set, or of a variable BATCHD_…, cannot be put into the configuration: its path names no table, no item "
        "of a list, or a stream that the file does not have. Paths are written with points, items by their numbers from 0. "
        "Variables set keys of [daemon] only.",
        "batchd check --set streams.fotos.batch_size=8",
        "batchd check --set streams.photos.batch_size=8",
    ),
    ProblemKind.UNUSABLE_SOURCE: Entry(
        "The data cannot be read as the source says: a file or folder is not there or not readable for this user, a file is "
        "damaged, a library is not installed, fields do not fit. Relative paths are relative to the configuration. "
        "`batchd init PATH` looks at data and says what it is.",
        'source = { type = "folder", path = "fotos" }',
        'source = { type = "folder", path = "photos" }',
    ),
    ProblemKind.OWN_FUNCTION: Entry(
        "A function of yours cannot be found, or does not take what batchd gives it. Modules are looked for in the folders "
        "of python_path (by default the folder of the configuration), then where Python looks for them. The check reads the "
        "module without running it. Packages that it imports have to be installed for the interpreter that runs batchd.",
        'pipeline = [{ op = "decode" }, { op = "resize", size = [8, 8] }, { op = "call", function = "augment:brigthen" }]',
        'pipeline = [{ op = "decode" }, { op = "resize", size = [8, 8] }, { op = "call", function = "augment:brighten" }]',
    ),
    ProblemKind.NO_SANDBOX: Entry(
        'With sandbox = "on" each worker gives up all but what its streams need, before it reads data. That needs a kernel '
        "with Landlock (Linux 5.13), and for each stream with functions of yours what these read, beside the source: read, "
        'and network = true if they reach servers. Without that, "auto" lets workers reach what the daemon\'s user may.',
        f"{_ENCLOSED} --set streams.photos.network=true",
        f"{_ENCLOSED} --set streams.photos.read=[]",
    ),
    ProblemKind.STEP_MISFIT: Entry(
        "The steps do not fit the samples of the source, or one another: a step names a field that is not there, an image is "
        "not decoded yet, or a field has no one shape at the end, which a batch needs. The check follows the fields from the "
        "source through each step, without reading a sample.",
        'pipeline = [{ op = "decode" }, { op = "resize", size = [8, 8], field = "picture" }]',
        'pipeline = [{ op = "decode" }, { op = "resize", size = [8, 8], field = "image" }]',
    ),
    ProblemKind.UNUSABLE_CACHE: Entry(
        "The stream cannot have the cache, or the journal, that it asks for: its folder is not there or not writable, another "
        "daemon has the file, two streams over one file name two sizes, or the pipeline has nothing that this kind of cache "
        "could keep. docs/cache.md compares the kinds.",
        'pipeline = [{ op = "decode" }, { op = "resize", size = [8, 8] }]\ncache = "points"',
        'pipeline = [{ op = "decode" }, { op = "center_crop", size = [8, 8] }]\ncache = "points"',
    ),
    ProblemKind.NO_SAMPLE: Entry(
        "The check made a few samples of the stream, evenly spread, in a process of its own, and each of them was bad, or none "
        "could be made: files that the first step cannot decode, values that do not fit their types, a function that returns "
        "something else than it declares. A daemon would stop the stream at its first batch. With max_bad_fraction = 1 bad "
        "samples stop nothing.",
        'pipeline = [{ op = "decode", max_bytes = 100 }, { op = "resize", size = [8, 8] }]',
        'pipeline = [{ op = "decode", max_bytes = 100_000 }, { op = "resize", size = [8, 8] }]',
    ),
    ProblemKind.NO_BATCH: Entry(
        "An epoch has no batch: the source has fewer samples than batch_size, and drop_last = true drops a batch that is "
        "not whole.",
        "batch_size = 1000\ndrop_last = true",
        "batch_size = 2\ndrop_last = true",
    ),
    ProblemKind.MEMORY_TOO_SMALL: Entry(
        "The ring of a stream has no room for two batches, the streams' own memory is more than the daemon's, or the machine "
        "has less memory than all that together. The problem says how much is needed, and which key to set. Exit code 5.",
        '[daemon]\nmemory = "64KiB"',
        '[daemon]\nmemory = "64MiB"',
    ),
    ProblemKind.TOO_FEW_DESCRIPTORS: Entry(
        "The process may not open as many files as the streams need: two descriptors for each slot of a ring, two slots at "
        "least for each stream, and those of workers and trainers. Raise the limit (ulimit -n, LimitNOFILE= in the unit, "
        "--ulimit nofile= of docker). `batchd doctor` shows limit and need.",
    ),
    ProblemKind.FILES_TOO_SMALL: Entry(
        "The process may not make files as large as a slot of a ring: shared memory is a file, too, for the limit of file "
        "sizes. Raise it (ulimit -f unlimited, LimitFSIZE=infinity in the unit). `batchd doctor` shows limit and need.",
    ),
    ProblemKind.RUNTIME_DIRECTORY: Entry(
        "The daemon cannot have its sockets there: this user may not write to the directory, it is none, or its path is too "
        "long for a socket (some 100 bytes). Without the key it is /run/batchd, or batchd in $XDG_RUNTIME_DIR.",
        '[daemon]\nruntime_dir = "batchd.toml"',
        '[daemon]\nruntime_dir = "run"',
    ),
    ProblemKind.UNUSABLE_ADDRESS: Entry(
        "The daemon cannot listen at an address: it is none of this machine, another program has the port, or ports below "
        '1024 are not for this user. `ss -ltnp` shows who listens; "*" is all addresses of the machine.',
        '[daemon]\nhttp = "192.0.2.1:7071"',
        '[daemon]\nhttp = "off"',
    ),
    ProblemKind.MISSING_KEYS: Entry(
        "An address beyond loopback needs keys, so that no other program on the network reads the data: one of the daemon, and "
        "one for each trainer or worker host. `batchd keys new NAME` makes both, and prints the file for the other host.",
        '[daemon]\ntcp = "0.0.0.0:7070"\nkeys_dir = "keys"',
        '[daemon]\ntcp = "127.0.0.1:7070"\nkeys_dir = "keys"',
    ),
    ProblemKind.NOT_TO_PREPARE: Entry(
        "`batchd prepare` reads each sample once and writes shards, so it needs samples that can be read again after an "
        "interruption, as live samples cannot.",
    ),
}
assert MANUAL.keys() == set(ProblemKind), "each kind of problem has its entry"
