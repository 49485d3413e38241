#!/bin/sh
# One daemon for a job on a node: daemon.sh run CONFIG | wait | stop | address     (docs/slurm.md)
#
#   run CONFIG   serve until SIGTERM; in a step of its own, or in the background of a prolog
#   wait         until it serves; fails with its last words where it does not
#   stop         drain and end it, and leave nothing; in the end of a job, or in an epilog
#   address      what trainers need as BATCHD_ADDRESS
#
# All lies in a directory of the job's own, so that two jobs on a node never meet. Its path is short, as a socket's has to be.
set -eu
umask 077

JOB=${SLURM_JOB_ID:?is not set: this runs in a job of Slurm, or in its prolog or epilog}
DIRECTORY=${BATCHD_JOB_DIRECTORY:-/tmp/batchd-$JOB}
READY_S=${BATCHD_READY_S:-300}
DRAIN_S=15

is_running() { [ -f "$DIRECTORY/pid" ] && kill -0 "$(cat "$DIRECTORY/pid")" 2>/dev/null; }

run() {
    mkdir "$DIRECTORY" # fails where one is there: somebody else's, or that of a daemon that runs already
    echo $$ >"$DIRECTORY/pid"
    exec env BATCHD_RUNTIME_DIR="$DIRECTORY" batchd serve --config "$1" >"$DIRECTORY/log" 2>&1 </dev/null
}

wait_until_ready() {
    left=$READY_S
    until batchd status --address "$DIRECTORY" >/dev/null 2>&1; do
        left=$((left - 1))
        if [ $left -le 0 ] || { [ -f "$DIRECTORY/pid" ] && ! is_running; }; then
            echo "batchd does not serve on $(uname -n) after $((READY_S - left)) s; its last words:" >&2
            tail -n 20 "$DIRECTORY/log" >&2
            exit 1
        fi
        sleep 1
    done
}

stop() {
    [ -d "$DIRECTORY" ] || return 0
    left=$DRAIN_S
    if is_running; then kill "$(cat "$DIRECTORY/pid")"; fi
    while is_running && [ $left -gt 0 ]; do
        left=$((left - 1))
        sleep 1
    done
    if is_running; then kill -KILL "$(cat "$DIRECTORY/pid")"; fi
    rm -rf "$DIRECTORY"
}

case ${1:-}-$# in
run-2) run "$2" ;;
wait-1) wait_until_ready ;;
stop-1) stop ;;
address-1) echo "ipc://$DIRECTORY" ;;
*)
    echo "usage: daemon.sh run CONFIG | wait | stop | address" >&2
    exit 2
    ;;
esac
