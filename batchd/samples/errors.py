"""What can be wrong with reading one sample. Raised in a worker, which reports it as data and lives on.

What can be wrong with the bytes of one sample. Raised in a worker, which reports it as data and
lives on.
"""

import errno

OUR_OWN_FAULTS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})
"""What the system says where this process has too little of something: no sample is bad for that."""


class SampleUnreadable(ValueError):  # noqa: N818  names what is wrong
    """A sample cannot be read; the text is the reason, short, without the sample's name, which whoever catches it knows."""


class SampleUndecodable(ValueError):  # noqa: N818  the tree of errors names things by what is wrong with them
    """The bytes of a sample are no whole image that the pipeline may decode.

    The text is the reason, in one short line, without the sample's name: whoever catches it knows
    which sample it was.
    """
