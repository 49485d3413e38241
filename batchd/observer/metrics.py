"""The table of all metrics: name, type, where in the status the value is, and what it means. OBSERVER process.

The exposition, the page docs/metrics.md and the tests are made from it. A new number in the status
is one line here.

Invariant: a counter only grows while what its labels name lives, and ends in ``_total``; a name
says its unit. What a trainer's rows count ends with the trainer, so what has to last is counted by
the stream.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from batchd.observer import scopes
from batchd.observer.scopes import Labels, Scope
from batchd_wire.status import DaemonStatus

PREFIX = "batchd_"
COUNTER: Literal["counter"] = "counter"
GAUGE: Literal["gauge"] = "gauge"

Merge = Callable[[Iterable[float]], float]


@dataclass(frozen=True, slots=True)
class Metric:
    """``key`` is the value's in its scope, which becomes a number; text and None stand for whether there is one.

    ``merge`` makes one value of several with the same labels.
    """

    name: str
    kind: Literal["counter", "gauge"]
    scope: Scope
    key: str
    help: str
    merge: Merge = sum

    def values(self, status: DaemonStatus) -> Iterator[tuple[Labels, float]]:
        """The value for each set of labels; what is not known, as a position past the end of a course, has none.

        Nor has a counter of the others.
        """
        found: dict[Labels, list[float]] = {}
        for labels, row in self.scope.rows(status):
            value = getattr(row, self.key)
            if value is None and self.key in _NONE_IS_NOTHING:
                continue
            if self.kind == COUNTER and self.scope.is_others(labels):
                continue
            found.setdefault(labels, []).append(_number(value))
        for labels, numbers in found.items():
            yield labels, self.merge(numbers)


_NONE_IS_NOTHING = {"epoch", "step", "cpu_wait_s"}


def _number(value: object) -> float:
    return value if isinstance(value, (int, float)) else float(value is not None)


_C, _G, _S = COUNTER, GAUGE, scopes

METRICS: tuple[Metric, ...] = (
    Metric("info", _G, _S.INFO, "one", "Always 1; its labels say which version serves, and what it decodes with."),
    Metric("uptime_seconds", _G, _S.DAEMON, "uptime_s", "How long the daemon has been up."),
    Metric("slot_memory_bytes", _G, _S.DAEMON, "memory_bytes", "Shared memory of all slots."),
    Metric("draining", _G, _S.DAEMON, "draining", "1 while the daemon finishes work in progress and begins no other."),
    Metric("ending_slots", _G, _S.DAEMON, "ending_slots", "Slots of ended streams that trainers or workers still hold."),
    Metric("reload_failed", _G, _S.RELOAD, "failed", "1 if the last reload was refused or failed; none before the first."),
    Metric("reload_timestamp_seconds", _G, _S.RELOAD, "time_s", "When the last reload ended, of the Unix clock."),
    Metric("worker_deaths_total", _C, _S.DAEMON, "worker_deaths", "Workers that ended without being asked to."),
    Metric("workers", _G, _S.WORKER_COUNTS, "count", "Workers, by what they are doing."),
    Metric("trainers", _G, _S.TRAINER_COUNTS, "count", "Trainers that are connected, by the way their batches go."),
    Metric("tcp_connections", _G, _S.TCP, "connections", "Connections over TCP, with or without a session."),
    Metric("tcp_strangers", _G, _S.TCP, "strangers", "Connections over TCP without a session."),
    Metric("tcp_closed_total", _C, _S.TCP, "closed", "Connections over TCP that the daemon closed by itself."),
    Metric("tcp_failed_handshakes_total", _C, _S.TCP, "failed_handshakes", "Peers over TCP that could not prove a key."),
    Metric("tcp_sent_bytes_total", _C, _S.TCP, "sent_bytes", "Bytes of batches sent over TCP, to all trainers ever."),
    # --- workers
    Metric("worker_orders", _G, _S.WORKER, "orders", "Orders that the worker has in hand or in its socket."),
    Metric("worker_chunks_total", _C, _S.WORKER, "chunks", "Chunks that the worker has filled."),
    Metric("worker_samples_total", _C, _S.WORKER, "samples", "Samples that the worker has filled in."),
    Metric("worker_busy_seconds_total", _C, _S.WORKER, "busy_s", "Time that the worker has spent on chunks."),
    # --- streams
    Metric("stream_samples", _G, _S.STREAM, "samples", "Samples of one epoch."),
    Metric("stream_batch_size", _G, _S.STREAM, "batch_size", "Samples of a whole batch."),
    Metric("stream_steps", _G, _S.STREAM, "steps", "Batches of one epoch."),
    Metric("stream_slots", _G, _S.STREAM, "slots", "Slots of the ring now."),
    Metric("stream_slots_max", _G, _S.STREAM, "slots_max", "Slots of the ring that its memory suffices for."),
    Metric("stream_ready_slots", _G, _S.STREAM, "ready_slots", "Slots with a whole batch."),
    Metric("stream_leased_slots", _G, _S.STREAM, "leased_slots", "Slots that trainers read."),
    Metric("stream_decoded_batches_total", _C, _S.STREAM, "decoded_batches", "Batches that workers have filled."),
    Metric("stream_decoded_samples_total", _C, _S.STREAM, "decoded_samples", "Samples that workers have filled in."),
    Metric("stream_delivered_batches_total", _C, _S.STREAM, "delivered_batches", "Batches handed out, to all trainers ever."),
    Metric("stream_delivered_samples_total", _C, _S.STREAM, "delivered_samples", "Samples handed out, to all trainers ever."),
    Metric("stream_shared_batches_total", _C, _S.STREAM, "shared_batches", "Batches decoded once and read by two or more."),
    Metric("stream_mismatched_batches_total", _C, _S.STREAM, "mismatched_batches", "Batches that did not match their checksums."),
    Metric("stream_bad_rows_total", _C, _S.STREAM, "bad_rows", "Rows whose sample was bad, each occurrence."),
    Metric("stream_bad_samples", _G, _S.STREAM, "bad_samples", "Different samples found bad so far."),
    Metric("stream_quarantined_samples", _G, _S.STREAM, "quarantined_samples", "Samples no longer touched: they crash workers."),
    Metric("stream_sample_seconds", _G, _S.STREAM, "sample_s", "Time of a worker that one sample takes just now."),
    Metric("stream_stopped", _G, _S.STREAM, "stopped", "1 if the stream has stopped; `batchd status` says why."),
    # --- the workers' time for a stream
    Metric("stream_busy_seconds_total", _C, _S.WORK, "busy_s", "Time that workers spent on its samples."),
    Metric("stream_cpu_seconds_total", _C, _S.WORK, "cpu_s", "Of that, time in which they had a CPU."),
    Metric("stream_cpu_wait_seconds_total", _C, _S.WORK, "cpu_wait_s", "Seconds in which workers were runnable and had no CPU."),
    Metric("stream_read_cpu_seconds_total", _C, _S.WORK, "read_cpu_s", "Of the time with a CPU, that of reading."),
    Metric("stream_fetch_seconds_total", _C, _S.WORK, "waited_s", "Time of workers waiting for a server of files, beside that."),
    Metric("stream_read_bytes_total", _C, _S.WORK, "read_bytes", "Bytes of encoded samples that were read."),
    Metric("stream_usual_sample_seconds", _G, _S.WORK, "usual_sample_s", "Half of the samples take less than that."),
    Metric("stream_slow_rows_total", _C, _S.WORK, "slow_rows", "Rows whose sample took several times as long."),
    Metric("stream_slow_seconds_total", _C, _S.WORK, "slow_s", "Time of workers with these."),
    Metric("stream_part_seconds_total", _C, _S.PART, "busy_s", "Time of workers with one part of it, as read or a step."),
    # --- caches of samples
    Metric("stream_cache_hits_total", _C, _S.WORK, "cache_hits", "Samples that were in the stream's cache."),
    Metric("stream_cache_misses_total", _C, _S.WORK, "cache_misses", "Samples that were not in the stream's cache."),
    Metric("cache_held_samples", _G, _S.CACHE, "held_samples", "Samples in the cache; streams that share one all show it."),
    Metric("cache_used_bytes", _G, _S.CACHE, "used_bytes", "Memory, or space on disk, that the cache takes."),
    Metric("cache_budget_bytes", _G, _S.CACHE, "budget_bytes", "Memory, or space on disk, that the cache may take at most."),
    Metric("cache_spoilt_samples_total", _C, _S.CACHE, "spoilt_samples", "Records of a cache on disk that were damaged."),
    # --- live streams
    Metric("mailbox_places", _G, _S.MAILBOX, "capacity", "Places of a live stream's mailbox."),
    Metric("mailbox_producers", _G, _S.MAILBOX, "producers", "Producers that are connected."),
    Metric("mailbox_waiting_producers", _G, _S.MAILBOX, "waiting_producers", "Producers that wait for a place."),
    Metric("mailbox_queued_samples", _G, _S.MAILBOX, "queued_samples", "Samples that wait for a batch."),
    Metric("mailbox_bound_samples", _G, _S.MAILBOX, "bound_samples", "Samples of batches that no trainer has yet."),
    Metric("mailbox_lent_places", _G, _S.MAILBOX, "lent_places", "Places that producers are filling."),
    Metric("mailbox_pushed_samples_total", _C, _S.MAILBOX, "pushed_samples", "Samples that producers have pushed."),
    Metric("mailbox_dropped_oldest_total", _C, _S.MAILBOX, "dropped_oldest", "Samples dropped for newer ones."),
    Metric("mailbox_dropped_newest_total", _C, _S.MAILBOX, "dropped_newest", "Samples dropped on arrival."),
    Metric("mailbox_refused_pushes_total", _C, _S.MAILBOX, "refused_pushes", "Pushes from places that were not the producer's."),
    Metric("mailbox_lost_batches_total", _C, _S.MAILBOX, "lost_batches", "Batches that not all trainers got that wanted them."),
    # --- trainers
    Metric("trainer_consumed_batches_total", _C, _S.TRAINER, "consumed_batches", "Batches that the trainer is done with."),
    Metric("trainer_delivered_samples_total", _C, _S.TRAINER, "delivered_samples", "Samples handed to the trainer."),
    Metric("trainer_wait_seconds_total", _C, _S.TRAINER, "wait_s", "Time that the trainer has waited for batches."),
    Metric("trainer_short_of_memory_seconds_total", _C, _S.TRAINER, "short_of_memory_s", "Time with too little room."),
    Metric("trainer_waiting", _G, _S.TRAINER, "waiting", "1 while the trainer waits; of several, how many do."),
    Metric("trainer_held_slots", _G, _S.TRAINER, "held_slots", "Slots that the trainer holds."),
    Metric("trainer_ready_ahead", _G, _S.TRAINER, "ready_ahead", "Batches that lie ready ahead of the trainer."),
    Metric("trainer_window", _G, _S.TRAINER, "window", "Batches that the trainer wants ready ahead of it."),
    Metric("trainer_epoch", _G, _S.TRAINER, "epoch", "Epoch of its next batch; none past its end; of several, the last.", max),
    Metric("trainer_step", _G, _S.TRAINER, "step", "Step of its next batch; none past its end; of several, the last.", max),
    Metric("trainer_wait_cause_seconds_total", _C, _S.WAIT, "waited_s", "Time that the trainer has waited, by what for."),
    Metric("trainer_sent_bytes_total", _C, _S.REMOTE, "sent_bytes", "Bytes of batches sent to a trainer over TCP."),
    Metric("trainer_connections", _G, _S.REMOTE, "connections", "Connections of a trainer over TCP."),
)  # fmt: skip

OWN: tuple[tuple[str, str], ...] = (
    ("up", "1 while the daemon's loop answers the observer, 0 where it does not (then all others are its last words)."),
    ("status_age_seconds", "How old the daemon's last answer is, from which all others are."),
)
"""Gauges that the observer makes itself; without labels."""
