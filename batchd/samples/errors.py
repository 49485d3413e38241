"""Errors of one sample. Raised in a worker, which reports them as data and continues."""

import errno

OUR_OWN_FAULTS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})
"""Errors of the system when this process lacks a resource: no sample is bad for that."""


class SampleUnreadable(ValueError):  # noqa: N818  names what is wrong
    """A sample cannot be read. The text is a short reason without the sample's name."""


class SampleUndecodable(ValueError):  # noqa: N818  the tree of errors names things by what is wrong with them
    """A sample is no whole image that the pipeline may decode. The text is a reason in one line."""
