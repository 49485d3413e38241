"""``batchd doctor``: checks of this machine. Runs in the user's shell; needs no daemon.

    machine   readings of /proc, /sys and the limits of this process -> checks
    probes    trials: read files, decode, make memfds                -> storage, decoding, checks

Each check is a pure function from readings to findings, so a test can describe a machine by a
folder.

Invariant: nothing is changed, and an unknown reading is reported or left out, never taken for good
or bad.
"""
