"""``batchd doctor``: is this machine fit for batchd, and what would make it so? Runs in the user's shell; needs no daemon.

    machine   what /proc, /sys and the limits of this process say   -> memory, processors, limits, kernel, clock, libraries
    probes    what has to be tried: read files, decode, make memfds  -> storage, decoding, kernel

Each check is a pure function from readings to findings, so that a test makes a machine of its own
as a folder.

Invariant: nothing is changed, and a reading that cannot be had is said or left out, never taken for
good or bad.
"""
