"""What a process that has to do with strangers gives up for good: by Landlock and seccomp.

Workers, processes that scan, and the observer.

    files     reading below ``Access.read``, below Python's own folders, and its own /proc;
              writing, creating, linking, running: nothing but /dev/null
    TCP       connections to ``Access.ports``; listening: nothing
    sockets   new ones of the Internet if there are ports; new ones of this host: none
    others    no signal, no memory, no limit and no abstract socket of another process
    kernel    no mount, namespace, key, BPF, io_uring, userfaultfd, module, clock, ...
    rights    no capability but to read as others: ``rights.READING``

Descriptors that it was given stay usable: its channel, its note, memories of slots. A process
encloses itself while it has one thread, and cannot undo it; nor can what it forks.

Sources: landlock(7), Linux' Documentation/userspace-api/landlock.rst and seccomp_filter.rst.
"""

import ctypes
import errno
import os
import platform
import stat
import struct
import sys
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from functools import cache
from typing import NamedTuple

from batchd.runtime.failpoints import LEDGER_VARIABLE
from batchd.runtime.rights import READING, keep_capabilities, libc

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # on each architecture
_ASK_VERSION = 1
_PATH_BENEATH, _NET_PORT = 1, 2
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = (1 << bit for bit in range(4))
_MAKE_FILE, _TRUNCATE = 1 << 8, 1 << 14
_FILE_RIGHTS = {1: (1 << 13) - 1, 2: 1 << 13, 3: _TRUNCATE, 5: 1 << 15}
"""The rights over files that each version of Landlock added."""
_TCP_VERSION, _BIND_TCP, _CONNECT_TCP = 4, 1, 2
_SCOPES_VERSION, _ABSTRACT_SOCKETS, _SIGNALS = 6, 1, 2

_NO_NEW_PRIVILEGES, _SECCOMP, _SECCOMP_FILTER = 38, 22, 2  # of prctl(2)
_LOAD, _EQUAL, _AT_LEAST, _AND, _RETURN = 0x20, 0x15, 0x35, 0x54, 0x06
_ALLOW, _REFUSE, _UNKNOWN = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS
_NUMBER_AT, _MACHINE_AT, _ARGUMENTS_AT = 0, 4, 16
_X32 = 0x40000000
_DATAGRAM, _TYPE_MASK = 2, 0xF
_UNIX = 1
_INTERNET = (2, 10, 16)  # AF_INET, AF_INET6, and AF_NETLINK, by which the C library finds addresses

_MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_SOCKET = {"x86_64": (41, 53), "aarch64": (198, 199)}
"""The numbers of socket(2) and socketpair(2)."""
_CLONE = {"x86_64": 56, "aarch64": 220}
_CLONE3 = 435
"""Its flags are in memory, which a filter cannot read; the C library uses clone(2) without it."""
_NEW_NAMESPACES = 0x7E020000
_IOCTL = {"x86_64": 16, "aarch64": 29}
_CHANGE_ATTRIBUTES = (0x40086602, 0x401C5820)  # FS_IOC_SETFLAGS, FS_IOC_FSSETXATTR
_OF_ITSELF = {"x86_64": (302, 203, 142, 314), "aarch64": (261, 122, 118, 274)}
"""prlimit64, sched_setaffinity, sched_setparam, sched_setattr: for 0 alone."""
_SET_SCHEDULER = {"x86_64": 144, "aarch64": 119}
"""For 0 alone; or to SCHED_OTHER or SCHED_BATCH, as clients have ZeroMQ do to its threads."""
_NO_USUAL_POLICY = 0xFFFFFFFC
_SET_PRIORITY = {"x86_64": 141, "aarch64": 140}
_NEW_CALLS = (
    *(425, 426, 427),  # io_uring_setup, io_uring_enter, io_uring_register
    # open_tree, move_mount, fsopen, fsconfig, fsmount, mount_setattr
    *(428, 429, 430, 431, 432, 442),
    438,  # pidfd_getfd
    # fchmodat2, setxattrat, removexattrat, open_tree_attr, file_setattr
    *(452, 463, 466, 467, 469),
)
"""Refused calls that have the same number everywhere."""
_RUNS = 2
"""Number of the first ones of these, which run a program."""
_REFUSED_CALLS = {
    "x86_64": (
        *(59, 322, 101, 310, 311),  # execve, execveat, ptrace, process_vm_readv, process_vm_writev
        # mount, umount2, pivot_root, chroot, unshare, setns, open_by_handle_at
        *(165, 166, 155, 161, 272, 308, 304),
        *(321, 298, 323),  # bpf, perf_event_open, userfaultfd
        *(248, 249, 250),  # add_key, request_key, keyctl
        # init_module, finit_module, delete_module, kexec_load, kexec_file_load
        *(175, 313, 176, 246, 320),
        # reboot, swapon, swapoff, acct, quotactl, settimeofday, clock_settime
        *(169, 167, 168, 163, 179, 164, 227),
        # fchmod, fchmodat, fchown, fchownat, utimensat: Landlock lets them pass
        *(91, 268, 93, 260, 280),
        # setxattr, lsetxattr, fsetxattr, removexattr, lremovexattr, fremovexattr
        *(188, 189, 190, 197, 198, 199),
        # shmget, shmat, shmctl, semget, semop, semctl, semtimedop, msgget, msgsnd, msgrcv, msgctl
        *(29, 30, 31, 64, 65, 66, 220, 68, 69, 70, 71),
        *(240, 241, 251, 300),  # mq_open, mq_unlink, ioprio_set, fanotify_init
        # chmod, chown, lchown, utime, utimes, futimesat, which are old
        *(90, 92, 94, 132, 235, 261),
    ),
    "aarch64": (
        *(221, 281, 117, 270, 271),
        *(40, 39, 41, 51, 97, 268, 265),
        *(280, 241, 282),
        *(217, 218, 219),
        *(105, 273, 106, 104, 294),
        *(142, 224, 225, 89, 60, 170, 112),
        *(52, 53, 55, 54, 88),
        *(5, 6, 7, 14, 15, 16),
        *(194, 196, 195, 190, 193, 191, 192, 186, 189, 188, 187),
        *(180, 181, 30, 262),
    ),
}
"""The same calls for each machine, in one order; some have no old ones."""

_SYSTEM = (
    *("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/etc/ld.so.cache"),
    *("/usr/share/zoneinfo", "/etc/localtime", "/usr/share/locale", "/etc/locale.alias"),
    *("/proc/cpuinfo", "/proc/meminfo", "/proc/stat", "/proc/sys/vm", "/sys/devices/system"),
    *("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random"),
)
_NETWORK = (
    *("/etc/resolv.conf", "/etc/hosts", "/etc/host.conf", "/etc/nsswitch.conf", "/etc/gai.conf", "/etc/services"),
    *("/etc/ssl", "/etc/pki", "/etc/ca-certificates", "/usr/share/ca-certificates", "/run/systemd/resolve"),
)
_CREDENTIALS = (
    *("AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", "GOOGLE_APPLICATION_CREDENTIALS"),
    *("GOOGLE_SERVICE_ACCOUNT", "GOOGLE_SERVICE_ACCOUNT_PATH", "SSL_CERT_FILE", "SSL_CERT_DIR"),
)
"""Variables that name files with which a process proves to a store who it is, and vice versa."""


_INSTRUCTION = struct.Struct("=HBBI")


class Access(NamedTuple):
    """What an enclosed process may reach.

    ``read``: files, and folders with all below them. ``ports``: TCP ports that it may connect to,
    on any host; ``any_port``: all are. ``write``: folders in which it may make files, and write.
    """

    read: list[str]
    ports: list[int]
    any_port: bool
    write: list[str]

    @property
    def has_network(self) -> bool:
        """Whether it may connect to anything."""
        return bool(self.ports or self.any_port)

    def joined(self, other: "Access") -> "Access":
        """What either allows, each place once, in order."""
        read, write = (
            _without_inner({*ours, *theirs}) for ours, theirs in ((self.read, other.read), (self.write, other.write))
        )
        return Access(read, sorted({*self.ports, *other.ports}), self.any_port or other.any_port, write)


NOTHING = Access([], [], any_port=False, write=[])


def joined(all_of: Iterable[Access | None]) -> Access | None:
    """What a worker of all these has to reach; None if nobody knows."""
    whole = NOTHING
    for access in all_of:
        if access is None:
            return None
        whole = whole.joined(access)
    return whole


def version() -> int:
    """The version of Landlock that this process can use: 1 since Linux 5.13; 0 without."""
    if platform.machine() not in _MACHINES:
        return 0
    found: int = libc().syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), _ASK_VERSION)
    return max(0, found)


def prepare() -> None:
    """Work out what all processes need that this one forks, so that none of them has to."""
    version()
    _own_code()
    for has_network in (False, True):
        _filter(has_network=has_network, runs_own=False)


def rules_of(access: Access, pid: int, *, runs_own: bool = False) -> int:
    """The descriptor of rules by which the process ``pid`` is enclosed; the caller closes it.

    A process that has just been forked copies each page that it writes to, so others are four times
    as fast. Raises ``OSError``.
    """
    known, own = version(), f"/proc/{pid}"
    files = sum(rights for since, rights in _FILE_RIGHTS.items() if since <= known)
    tcp = _BIND_TCP | (0 if access.any_port else _CONNECT_TCP) if known >= _TCP_VERSION else 0
    scopes = _ABSTRACT_SOCKETS | _SIGNALS if known >= _SCOPES_VERSION else 0
    attributes = struct.pack("=QQQ", files, tcp, scopes)
    with ExitStack() as where_it_fails:
        rules = _call(_CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), 0)
        where_it_fails.callback(os.close, rules)
        network = [*_NETWORK, *filter(None, map(os.environ.get, _CREDENTIALS))] if access.has_network else ()
        for place in (*access.read, own, *_SYSTEM, *_own_code(), *network):
            _allow(rules, place, _READ_FILE | _READ_DIR)
        for place in (own, *_SYSTEM, *_own_code()) if runs_own else ():
            _allow(rules, place, _READ_FILE | _READ_DIR | _EXECUTE)
        _allow(rules, os.devnull, _READ_FILE | _WRITE_FILE)
        ledger = filter(None, [os.environ.get(LEDGER_VARIABLE)])  # of tests
        for place in (*access.write, *ledger):
            _allow(rules, place, files & (_WRITE_FILE | _MAKE_FILE | _TRUNCATE))
        for port in access.ports if tcp & _CONNECT_TCP else ():
            _call(_ADD_RULE, rules, _NET_PORT, struct.pack("=QQ", _CONNECT_TCP, port), 0)
        where_it_fails.pop_all()
    return rules


def enter(rules: int, *, has_network: bool, runs_own: bool = False) -> None:
    """Give up all but what ``rules`` allow, and close them; see ``enclose``."""
    try:
        _prctl(_NO_NEW_PRIVILEGES, 1)
        _call(_RESTRICT_SELF, rules, 0)
    finally:
        os.close(rules)
    keep_capabilities(READING)
    _prctl(_SECCOMP, _SECCOMP_FILTER, _filter(has_network=has_network, runs_own=runs_own)[0])


def enclose(access: Access, *, runs_own: bool = False) -> None:
    """Give up all but ``access``, now and for good. Raises ``OSError``; then nothing is sure.

    ``runs_own``: this process starts others of Python's folders, which are enclosed as well; all
    may make sockets of this host, and those others do not read their own /proc.
    """
    enter(rules_of(access, os.getpid(), runs_own=runs_own), has_network=access.has_network, runs_own=runs_own)


def unreadable_code() -> str:
    """A folder that this process imports from, and may not read; "" if there is none."""
    return next((place for place in _own_code() if not os.access(place, os.R_OK | os.X_OK, effective_ids=True)), "")


@cache
def _own_code() -> list[str]:
    """The folders that modules come from, and may come from: not the current one."""
    packages = {name.partition(".")[0] for name in sys.modules}
    files = filter(None, (getattr(sys.modules.get(name), "__file__", None) for name in packages))
    installed = filter(lambda folder: folder.endswith("-packages"), sys.path)
    folders = {sys.prefix, sys.base_prefix, sys.exec_prefix, *installed, *map(os.path.dirname, files)}
    return _without_inner({folder for folder in folders if folder.startswith("/")})


def _allow(ruleset: int, place: str, rights: int) -> None:
    """Allow ``rights`` for a file, or below a folder, if it is there."""
    with suppress(FileNotFoundError, NotADirectoryError, PermissionError):
        found = os.open(place, os.O_PATH | os.O_CLOEXEC)
        try:
            if not stat.S_ISDIR(os.fstat(found).st_mode):
                rights &= _READ_FILE | _WRITE_FILE | _EXECUTE
            _call(_ADD_RULE, ruleset, _PATH_BENEATH, struct.pack("=Qi", rights, found), 0)
        finally:
            os.close(found)


@cache
def _filter(*, has_network: bool, runs_own: bool) -> tuple[bytes, object]:
    """The program as prctl(2) takes it, and the memory that it is in."""
    program = _program(has_network=has_network, runs_own=runs_own)
    code = ctypes.create_string_buffer(program, len(program))
    return struct.pack("@HP", len(program) // _INSTRUCTION.size, ctypes.addressof(code)), code


def _program(*, has_network: bool, runs_own: bool) -> bytes:
    """The program, of classic BPF, by which the kernel refuses calls with EPERM.

    A line: the operation, how many lines are skipped if it holds and if it does not, the value.
    """
    machine = platform.machine()
    socket, socketpair = _SOCKET[machine]
    domains = (*(_INTERNET if has_network else ()), *((_UNIX,) if runs_own else ()))
    program = [(_LOAD, 0, 0, _MACHINE_AT), (_EQUAL, 1, 0, _MACHINES[machine]), (_RETURN, 0, 0, _REFUSE)]
    program += [(_LOAD, 0, 0, _NUMBER_AT), (_AT_LEAST, 0, 1, _X32), (_RETURN, 0, 0, _REFUSE)]
    for number in (*_REFUSED_CALLS[machine][_RUNS if runs_own else 0 :], *_NEW_CALLS):
        program += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _REFUSE)]
    program += [(_EQUAL, 0, 1, _CLONE3), (_RETURN, 0, 0, _UNKNOWN)]
    is_zero = [(_EQUAL, 0, 1, 0), (_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _REFUSE)]
    first = (_LOAD, 0, 0, _ARGUMENTS_AT)
    program += [(_EQUAL, 0, 5, _CLONE[machine]), first, (_AND, 0, 0, _NEW_NAMESPACES), *is_zero]
    nicer = [_SET_PRIORITY[machine]] if runs_own else []  # what it starts may be
    for number in (*_OF_ITSELF[machine], *nicer):
        program += [(_EQUAL, 0, 4, number), first, *is_zero]
    who = policy = (_LOAD, 0, 0, _ARGUMENTS_AT + 8)
    program += [(_EQUAL, 0, 7, _SET_SCHEDULER[machine]), first, (_EQUAL, 3, 0, 0)]
    program += [policy, (_AND, 0, 0, _NO_USUAL_POLICY), *is_zero]
    program += [(_EQUAL, 0, 6, _SET_PRIORITY[machine]), first, (_EQUAL, 0, 3, 0), who, *is_zero]
    program += [(_EQUAL, 0, 2 + 2 * len(_CHANGE_ATTRIBUTES), _IOCTL[machine]), (_LOAD, 0, 0, _ARGUMENTS_AT + 8)]
    for request in _CHANGE_ATTRIBUTES:
        program += [(_EQUAL, 0, 1, request), (_RETURN, 0, 0, _REFUSE)]
    program += [(_RETURN, 0, 0, _ALLOW)]
    program += [(_EQUAL, 0, 2 + 2 * len(domains), socket), (_LOAD, 0, 0, _ARGUMENTS_AT)]
    for domain in domains:
        program += [(_EQUAL, 0, 1, domain), (_RETURN, 0, 0, _ALLOW)]
    program += [(_RETURN, 0, 0, _REFUSE)]
    program += [(_EQUAL, 0, 4, socketpair), (_LOAD, 0, 0, _ARGUMENTS_AT + 8), (_AND, 0, 0, _TYPE_MASK)]
    program += [(_EQUAL, 0, 1, _DATAGRAM), (_RETURN, 0, 0, _REFUSE), (_RETURN, 0, 0, _ALLOW)]
    return b"".join(_INSTRUCTION.pack(*line) for line in program)


def _is_below(place: str, folders: Iterable[str]) -> bool:
    return any(folder in {place, "/"} or place.startswith(folder + "/") for folder in folders)


def _without_inner(places: set[str]) -> list[str]:
    return sorted(place for place in places if not _is_below(place, places - {place}))


def _call(*arguments: object) -> int:
    done: int = libc().syscall(*arguments)
    if done < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"the sandbox cannot be made: {os.strerror(number)}")
    return done


def _prctl(option: int, *values: object) -> None:
    given = [ctypes.c_ulong(value) if isinstance(value, int) else value for value in (*values, 0, 0, 0, 0)][:4]
    if libc().prctl(option, *given) < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"the sandbox cannot be made: {os.strerror(number)}")
