"""What can be wrong with reading one sample. Raised in a worker, which reports it as data and lives on."""

import errno

OUR_OWN_FAULTS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})
"""What the system says where this process has too little of something: no sample is bad for that."""


class SampleUnreadable(ValueError):  # noqa: N818  names what is wrong
    """A sample cannot be read; the text is the reason, short, without the sample's name, which whoever catches it knows."""
