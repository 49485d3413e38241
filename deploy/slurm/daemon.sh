#!/bin/sh
# One daemon for a job on a node: daemon.sh run CONFIG | wait | stop | address     (docs/slurm.md)
#
#   run CONFIG   serve until SIGTERM; in a step of its own, or in the background of a prolog. What a killed daemon of the same
#                job left here, a requeued job takes over
#   wait         until it serves; fails with its last words where it does not
#   stop         drain and end it, and leave nothing; in the end of a job, or in an epilog
#   address      what trainers need as BATCHD_ADDRESS
#
# All lies in a directory of the job's own, so that two jobs on a node never meet. Its path is short, as a socket's has to be.
# Anybody may make a directory of that name in /tmp, so nothing in it is read, run or spoken with unless it is ours.
set -eu
umask 077

JOB=${SLURM_JOB_ID:?is not set: this runs in a job of Slurm, or in its prolog or epilog}
DIRECTORY=${BATCHD_JOB_DIRECTORY:-/tmp/batchd-$JOB}
READY_S=${BATCHD_READY_S:-300}
DRAIN_S=15
DEAD_S=5 # so long a daemon that was killed before the job was requeued may be there still, before `run` clears it away

fail() {
    printf 'batchd: %s\n' "$*" >&2
    exit 1
}

exists() { [ -e "$DIRECTORY" ] || [ -L "$DIRECTORY" ]; }

is_ours() { [ -d "$DIRECTORY" ] && [ ! -L "$DIRECTORY" ] && [ -O "$DIRECTORY" ]; }

require_ours() { # whoever has the directory could serve anything, and have us kill any process of ours
    if exists && ! is_ours; then
        what="is no directory"
        if [ -L "$DIRECTORY" ]; then what="is a link"; elif [ -d "$DIRECTORY" ]; then what="is a directory"; fi
        fail "$DIRECTORY on $(uname -n) $what of user $(stat -c %U "$DIRECTORY"), not a directory of $(id -un):" \
            "ask that user, or set BATCHD_JOB_DIRECTORY to a place of your own"
    fi
}

is_running() { [ -f "$DIRECTORY/pid" ] && kill -0 "$(cat "$DIRECTORY/pid")" 2>/dev/null; }

run() {
    require_ours
    if [ -f "$DIRECTORY/pid" ] && ! is_running; then rm -rf "$DIRECTORY"; fi
    mkdir "$DIRECTORY" # fails where one is there: that of a daemon that runs already, or is about to
    echo $$ >"$DIRECTORY/pid"
    exec env BATCHD_RUNTIME_DIR="$DIRECTORY" batchd serve --config "$1" >"$DIRECTORY/log" 2>&1 </dev/null
}

wait_until_ready() {
    left=$READY_S
    dead=0
    until require_ours && is_ours && batchd status --address "$DIRECTORY" >/dev/null 2>&1; do
        left=$((left - 1))
        if [ -f "$DIRECTORY/pid" ] && ! is_running; then dead=$((dead + 1)); else dead=0; fi
        if [ $left -le 0 ] || [ $dead -ge $DEAD_S ]; then
            echo "batchd does not serve on $(uname -n) after $((READY_S - left)) s; its last words:" >&2
            tail -n 20 "$DIRECTORY/log" >&2
            exit 1
        fi
        sleep 1
    done
}

stop() {
    exists || return 0
    require_ours
    left=$DRAIN_S
    if is_running; then kill "$(cat "$DIRECTORY/pid")"; fi
    while is_running && [ $left -gt 0 ]; do
        left=$((left - 1))
        sleep 1
    done
    if is_running; then kill -KILL "$(cat "$DIRECTORY/pid")"; fi
    rm -rf "$DIRECTORY"
}

address() {
    exists || fail "there is no $DIRECTORY on $(uname -n): no daemon of job $JOB was started here"
    require_ours
    echo "ipc://$DIRECTORY"
}

case ${1:-}-$# in
run-2) run "$2" ;;
wait-1) wait_until_ready ;;
stop-1) stop ;;
address-1) address ;;
*)
    echo "usage: daemon.sh run CONFIG | wait | stop | address" >&2
    exit 2
    ;;
esac
