"""The manual of the log: what each event means, and what to do. CLI and documentation.

Invariant: it has every event that the server logs, at its level, and no other; each warning and
error says what to do.
"""

from typing import NamedTuple


class LogEvent(NamedTuple):
    """Level, meaning and remedy of an event, in Markdown."""

    level: str
    meaning: str
    remedy: str = ""


EVENTS: dict[str, dict[str, LogEvent]] = {
    "The daemon": {
        "serving": LogEvent("info", "trainers can connect to `address`"),
        "ready": LogEvent("info", "every worker has started"),
        "waiting for memory": LogEvent(
            "warning",
            "other processes (`held_by`), usually of a killed daemon, hold memory that the start needs; the daemon "
            "waits for `up_to_s`",
            "end or continue these processes, or set `memory =` to less",
        ),
        "memory reserved": LogEvent("info", 'with `reserve = "start"`: all rings have their memory, `bytes` in all'),
        "observing": LogEvent("info", "the observer answers HTTP at `http` ([metrics.md](metrics.md))"),
        "configuration reloaded": LogEvent("info", "the new configuration is in force, with these changes"),
        "configuration not reloaded": LogEvent(
            "error", "the file is wrong; the old configuration stays", "`batchd check`, then reload again"
        ),
        "reloading process cannot be killed": LogEvent(
            "error",
            "it hangs while the daemon ends; usually a file server is gone",
            "bring the storage back; look at `/proc/PID/stack`",
        ),
        "deriving process cannot be killed": LogEvent(
            "error",
            "the process of derived streams hangs while the daemon ends; usually a file server is gone",
            "bring the storage back; look at `/proc/PID/stack`",
        ),
        "unknown user or group": LogEvent(
            "warning",
            "`[daemon.shares]` or `who` of `[daemon.define]` has a `name` that this machine does not know at the start",
            "once the directory of users answers, `batchd reload`",
        ),
        "restart needed": LogEvent(
            "warning", "these reloaded `keys` need a restart", "restart the daemon when it suits; trainers continue"
        ),
        "HTTP disabled": LogEvent(
            "warning",
            "the default port of `http` is taken; the daemon listens there once it is free",
            'set `http` to another address, or to `"off"`',
        ),
        "observer not started": LogEvent(
            "warning",
            "the system refuses a process for HTTP; the daemon retries",
            "raise `TasksMax=`, `ulimit -u` or `LimitNOFILE=`",
        ),
        "observer ended": LogEvent(
            "warning",
            "the process that answers HTTP has died; another one starts in `again_in_s`",
            "if it repeats: check `dmesg` for the OOM killer",
        ),
        "unknown variable": LogEvent(
            "warning",
            "nothing reads the environment variable `variable`",
            "the `advice`, such as *did you mean BATCHD_WORKERS?*",
        ),
        "draining": LogEvent(
            "info",
            "after a first signal, the daemon finishes work in progress and begins no other",
            "a second signal ends it at once",
        ),
        "stopping at once": LogEvent("info", "a second signal arrived"),
        "stopped": LogEvent("info", "the daemon has ended; `drained`: whether all work was finished"),
        "descriptors may run out": LogEvent(
            "warning",
            "the limit of open files is below the possible need of all streams and trainers",
            "raise `LimitNOFILE=`, or lower `sessions_max`",
        ),
        "log lines left out": LogEvent(
            "warning",
            "too many lines in a minute `about` one peer, stream or kind; `left_out` counts them",
            "look for programs that reconnect, or bad samples: `batchd status`, `batchd bad`",
        ),
    },
    "Workers": {
        "fork server ended": LogEvent(
            "warning",
            "the process that forks workers has died, and its workers with it; others start and repeat the work",
            "check `dmesg` for the OOM killer",
        ),
        "fork server killed": LogEvent(
            "warning", "the daemon has killed it", "`batchd doctor`: is the storage of the Python environment slow?"
        ),
        "output of a child process": LogEvent(
            "info",
            "`text` is a line of standard error of a process (`pid`, `worker`): prints of users' functions, "
            "warnings of libraries, the last words of a crash. `/dev/stderr` cannot be opened there. At most 480 a "
            "minute, the rest is counted",
        ),
        "daemon not started": LogEvent("error", "`serve --detach` could not start one", "see `reason`"),
        "daemon ended": LogEvent(
            "error",
            "the daemon of `serve --detach` was killed; `how` is the signal",
            "after SIGKILL: check `dmesg` for the OOM killer",
        ),
        "worker ended": LogEvent(
            "warning",
            "a worker has died, and another does its work; `how` is its signal or exit status, `said` its last "
            "words. (At info after a reload dismissed it)",
            "if it repeats: check `dmesg` for the OOM killer, then `memory =`, then the named sample",
        ),
        "worker started": LogEvent("info", "a new worker replaces a dead one"),
        "workers may reach what this user may": LogEvent(
            "info", "they are not [in a sandbox](../SECURITY.md#the-sandbox-of-workers)", "set what `key` names"
        ),
        "decoding": LogEvent(
            "info",
            "the workers' decoders, in order of preference",
            'without "decodes crops alone" every JPEG is decoded whole: [install.md](install.md#decoding-of-crops)',
        ),
        "worker killed": LogEvent(
            "warning",
            "usually, a sample took longer than `sample_timeout_s`",
            "look at the file, or at the storage; raise `sample_timeout_s`",
        ),
        "worker not started": LogEvent(
            "error",
            "the system refuses a process, memory or a descriptor; `reason` names the limit; the daemon retries",
            "raise what `reason` names: `TasksMax=`, `ulimit -u`, `LimitNOFILE=`, `LimitFSIZE=`",
        ),
        "worker cannot be killed": LogEvent(
            "error",
            "a worker hangs in a system call; usually a file server is gone",
            "bring the storage back; look at `/proc/PID/stack`",
        ),
    },
    "Streams and samples": {
        "bad sample": LogEvent(
            "warning",
            "a sample could not be used; `treatment` is the stream's `on_error`. Once for each sample, and once a "
            "minute for each reason",
            "repair or remove the file; `batchd bad STREAM` lists all",
        ),
        "sample quarantined": LogEvent(
            "error",
            "a sample has killed more than one worker, and is not tried again",
            "inspect the file with care: it crashes the decoder",
        ),
        "stream stopped": LogEvent(
            "error",
            "the stream cannot continue; its trainers get an error, other streams continue",
            "remove the cause, then `batchd reload`",
        ),
        "storage away": LogEvent(
            "warning",
            "the storage of a stream's source is gone; the stream waits for it, up to `up_to_s` (`storage_away_s`)",
            "bring it back: the stream goes on by itself",
        ),
        "storage back": LogEvent("info", "it is back; the stream goes on at the same positions"),
        "no memory for a slot": LogEvent(
            "warning",
            "the system gave less memory than `memory =`; the ring stays smaller",
            "set `memory =` to less, or give more; `batchd doctor`",
        ),
        "batch did not match its checksums": LogEvent(
            "warning",
            "a trainer got other bytes than were written (`verify = true`), and asked again",
            "test the memory of both hosts, and the network",
        ),
        "bad samples are missing in their file": LogEvent(
            "warning",
            "`file` in `cache_dir`, for streams with more than 100, lacks `missing` of them",
            "make room, or repair the files; `batchd bad` has the first ones",
        ),
        "samples in no row": LogEvent(
            "warning",
            'with `pack`: how many samples are bad, empty, or longer than a row with `too_long = "drop"`, and one '
            "of them",
            "repair or remove the files",
        ),
        "samples without a size": LogEvent(
            "warning",
            "with `bucket`: how many samples are bad or empty, so that they count as the smallest, and one of them",
            "repair or remove the files",
        ),
        "a kept index cannot be used, so the source is scanned": LogEvent(
            "warning", "a file in `cache_dir` is damaged or cannot be read", "none, or remove the named file"
        ),
        "the index is not kept for the next start": LogEvent(
            "warning", "`cache_dir` cannot be written, or is full", "free space, or set `cache_dir`"
        ),
        "no index is kept or used: others may write into the folder": LogEvent(
            "warning",
            "`cache_dir` belongs to another user, or its mode lets others write",
            "`chown` it to the daemon's user, `chmod 700`",
        ),
        "note on a source": LogEvent(
            "warning",
            "what the scan leaves out or takes for granted: `note`; once at each start",
            "if it is not meant: mend the data, or the source's keys "
            "([sources.md](sources.md#what-a-source-leaves-out))",
        ),
        "keys of a cache not used": LogEvent(
            "warning",
            'a stream has keys for a cache that `cache = "auto"` does not use',
            "say which `cache` you want, or leave the keys out",
        ),
        "cache on disk opened": LogEvent(
            "info", "the file of a cache, with the number of samples in it ([cache.md](cache.md#on-disk))"
        ),
        "unused cache files": LogEvent(
            "info",
            "a `cache_dir` has caches that this daemon does not use, usually of changed sources",
            "remove them; the line has the command",
        ),
        "a record of a cache on disk is damaged": LogEvent(
            "warning",
            "the checksum is wrong, so the sample is read from its source; expected after a crash of the machine",
            "none, or check the disk",
        ),
        "a cache on disk cannot be used at present": LogEvent(
            "warning", "the disk is full, or fails; samples are read from their source", "free space, or check the disk"
        ),
        "a cache on disk is damaged and starts empty": LogEvent(
            "warning", "the file's header is not one of this version", "none"
        ),
        "the journal begins again: its batches had other fields": LogEvent(
            "warning",
            "fields or batch size of a push stream have changed, so `file` loses its older batches",
            "none; copy the file first, if you still need it",
        ),
        "a batch is missing in the journal": LogEvent(
            "error",
            "a record could not be written; trainers got the batch; `missing` counts them",
            "check the disk of `cache_dir`",
        ),
    },
    "Trainers and producers on this host": {
        "trainer subscribed": LogEvent("info", "a trainer reads a stream, from `epoch` and `step` on, as `rank`"),
        "trainer left": LogEvent("info", "a trainer has ended its subscription; its slots are free again"),
        "stream derived": LogEvent("info", "a trainer asked for other `settings`, and gets `stream`"),
        "derived stream ended": LogEvent(
            "info", "the last trainer of a derived stream has left, or another one needed its place"
        ),
        "stream defined": LogEvent("info", "a trainer has defined `stream`, which is `owner`'s"),
        "defined stream ended": LogEvent(
            "info",
            "nobody has read it for as long as `owner` wanted, another of his needed its place, or his key is revoked",
        ),
        "report refused": LogEvent(
            "warning", "a trainer reported an impossible loss", "correct what the program passes to `report`"
        ),
        "producer connected": LogEvent("info", "a program pushes samples into a live stream"),
        "producer left": LogEvent("info", "a producer has left; its pushed samples stay"),
        "trainer refused": LogEvent(
            "warning",
            "a process may not connect, or there are too many sessions",
            "let its user join the group of the runtime directory, or raise `sessions_max`",
        ),
        "trainer disconnected": LogEvent(
            "warning",
            "a trainer violates the protocol, or does not read its messages",
            "look at that process: an old client, or a stopped one",
        ),
        "message rejected": LogEvent("warning", "a local peer sent an unexpected message", "look at that process"),
        "cannot accept a trainer": LogEvent(
            "error", "out of file descriptors or memory; new trainers have to wait", "raise `LimitNOFILE=`"
        ),
        "local connections closed": LogEvent(
            "warning",
            "local connections without a session were closed",
            "look for a process that connects and stays silent",
        ),
        "local peer not understood": LogEvent(
            "debug", "a peer at `batchd.sock` does not speak ZeroMQ 3 or later", "it is not a trainer"
        ),
        "slot shared read-only, though writable_slots is set": LogEvent(
            "warning",
            "slots cannot be opened for writing, so GPUs need one more copy",
            "check that /proc is mounted, and readable for the daemon",
        ),
        "out of a resource": LogEvent(
            "debug", "the daemon's stack when it ran out of descriptors, memory, processes or space, and ended"
        ),
        "sockets are gone from the runtime directory": LogEvent(
            "error",
            "the directory or its sockets were removed or replaced; new trainers cannot connect",
            "restart the daemon, and exclude the directory from cleaning programs",
        ),
        "socket is not open to the directory's group": LogEvent(
            "warning",
            "trainers of the runtime directory's group cannot connect",
            "put the daemon's user into that group, or `chmod g+s` the directory",
        ),
    },
    "Trainers on other hosts": {
        "remote trainer": LogEvent("info", "a trainer on another host has a session, with its `key`"),
        "remote trainer gone": LogEvent("info", "its connection has ended, or the daemon closed it"),
        "peer refused": LogEvent(
            "warning",
            "a peer without a valid key, with a key of another role, or one that connects too often",
            "`batchd keys list`; make a key with `batchd keys new` (`--role worker` for a worker host)",
        ),
        "cannot check a peer's key": LogEvent(
            "error",
            "the keys cannot be read, so every peer is refused",
            "repair `keys_dir`; `batchd keys list` says what is wrong",
        ),
        "keys cannot be read": LogEvent("error", "the same, for a peer that was already admitted", "repair `keys_dir`"),
        "key file is invalid": LogEvent(
            "error",
            "a key file is damaged, or other users may write it",
            "`batchd keys list`, then remove it or correct its mode",
        ),
        "remote handshake failed": LogEvent(
            "warning",
            "a connection ended in the handshake: a key for another daemon, or none",
            "compare the key of the trainer or worker host with `batchd keys list`",
        ),
        "remote message rejected": LogEvent(
            "warning", "a remote peer sent an unexpected message, exceeds a limit, or has lost its key", "read `reason`"
        ),
        "remote peer not understood": LogEvent("warning", "a peer speaks a very old ZeroMQ", "it is not a trainer"),
        "remote connection closed": LogEvent(
            "warning", "the daemon closed a connection that became no session, or sent too much", "look at that host"
        ),
    },
    "Worker hosts": {
        "listening for worker hosts": LogEvent(
            "info", "the gateway of this number listens on `port`; 0 is the one at `worker_address`"
        ),
        "worker host connected": LogEvent("info", "a worker host has registered, under the number `link`"),
        "worker host fills a stream": LogEvent(
            "info", "its rows equalled those of a local worker (`pool_accept`), so it takes orders"
        ),
        "worker host leaving": LogEvent("info", "it was told to end, and finishes its orders"),
        "worker host disconnected": LogEvent(
            "info", "its link has ended; others get its orders", "if it should be there: its own log says why it ended"
        ),
        "worker host sent away": LogEvent(
            "warning",
            "the daemon has ended its link: it makes other bytes, or finds samples bad that are good here",
            "compare files, processors and libraries, as the reason names them",
        ),
        "worker host cannot fill a stream": LogEvent(
            "warning",
            "it lacks what the stream needs, as `reason` says; its other streams go on",
            "mount the files there, use `batchd worker --map FROM=TO`, or give it credentials",
        ),
        "gateway not started": LogEvent(
            "warning",
            "the process for worker hosts could not be started; tried again in `again_in_s`",
            "`batchd doctor` looks at limits of processes and memory",
        ),
        "gateway cannot listen": LogEvent(
            "error",
            "another process has `worker_address`, or a port after it (`pool_gateways`), or it is no address of "
            "this machine",
            "free the address",
        ),
        "gateway ended": LogEvent(
            "warning",
            "the process for worker hosts has died; another one starts in `again_in_s`, and worker hosts return",
            "if it repeats: check `dmesg` for the OOM killer",
        ),
        "gateway killed": LogEvent(
            "warning", "the daemon has killed it; another one starts", "if it repeats: report it"
        ),
        "worker host refused": LogEvent(
            "warning",
            "a worker host of `host` cannot register",
            "the reason names both sides' values: install the same batchd, make a key, or raise the limit",
        ),
    },
    "`batchd worker`": {
        "connected to the gateway": LogEvent(
            "info", "the daemon has admitted this worker host, under the number `link`"
        ),
        "connection to the gateway ended": LogEvent(
            "warning",
            "workers, indexes and caches stay, and the host reconnects for up to `--give-up` seconds",
            "if it repeats: look at the daemon's log, and at the network",
        ),
        "gateway does not admit this host": LogEvent(
            "warning",
            "the gateway cannot be reached, or refuses this host for now; it tries again for `tries_for_s` seconds",
            "what the reason says",
        ),
        "another gateway does not admit this host": LogEvent(
            "warning",
            "another of the `pool_gateways` cannot be reached or refuses it; it returns to the first one",
            "open the ports of all gateways in the firewall",
        ),
        "index arriving": LogEvent("info", "the index of a source is on its way"),
        "stream opened": LogEvent("info", "workers take orders for `stream`; `cache` is the one on this host"),
        "stream cannot be filled here": LogEvent(
            "error",
            "data, a module or a library is missing or another than the daemon's, or no sample can be read",
            "mount the data, give `--map`, install the library, or give credentials; then start it again",
        ),
        "no cache for a stream": LogEvent(
            "warning",
            "its samples are read from their source each time",
            "give more with `--cache-memory` or `--cache-size`; each worker host needs a `--cache-dir` of its own",
        ),
        "a kept index cannot be used, so it is received again": LogEvent(
            "warning", "a file in `--index-dir` is damaged or cannot be read", "none; if it repeats, look at the disk"
        ),
        "leaving": LogEvent(
            "info",
            "a first signal arrived: orders in progress are finished and sent, within `within_s`",
            "a second signal ends it at once",
        ),
        "worker host stopped": LogEvent("info", "it has ended, and its workers too"),
    },
    "`batchd ray`": {
        "keeping worker hosts": LogEvent(
            "info",
            "their number follows the demand of the daemon at `address`, from `min` to `max`; `found` were there",
        ),
        "number of worker hosts changed": LogEvent(
            "info", "there shall be `hosts`, because the daemon wants `wanted_workers`"
        ),
        "worker host asked for": LogEvent("info", "an actor with `cpus` is pending until a node has room"),
        "worker host started": LogEvent("info", "the actor runs on `node`"),
        "worker host ended": LogEvent(
            "warning",
            "`batchd worker` has ended and is started again: `how`, and the last line that it `said`",
            "follow what it said",
        ),
        "worker host lost": LogEvent(
            "warning", "the actor or its node is gone; Ray starts it again", "if it stays pending: look at `ray status`"
        ),
        "worker host told to leave": LogEvent("info", "it finishes its work: it is not needed, or its options are old"),
        "worker host removed": LogEvent("info", "the actor is gone for good"),
        "daemon not asked": LogEvent(
            "warning",
            "the daemon does not say how many workers it wants; the number of worker hosts stays",
            "start the daemon",
        ),
        "daemon is back": LogEvent("info", "the daemon answers again"),
        "worker hosts left to themselves": LogEvent(
            "info", "`batchd ray` ends, and `hosts` worker hosts go on", "`batchd ray down` ends them"
        ),
        "pool taken down": LogEvent(
            "info", "another program, usually `batchd ray down`, has ended a worker host, so `batchd ray` ends"
        ),
    },
}
"""By the part of batchd that an event is about."""
