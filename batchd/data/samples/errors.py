"""Errors of one sample. Raised in a worker, which reports them as data and continues."""

import errno

OUR_OWN_FAULTS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})
"""Errors of the system when this process lacks a resource: no sample is bad for that."""


class SampleUnreadable(ValueError):  # noqa: N818  names what is wrong
    """A sample cannot be read. The text is a short reason without the sample's name."""


def check_bytes(size: int, max_bytes: int, what: str = "", remedy: str = "") -> None:
    """Raise ``SampleUnreadable`` if ``size`` is more; ``what``: has it, instead of the sample."""
    if size > max_bytes:
        raise SampleUnreadable(f"{what}has {size} bytes, more than max_bytes = {max_bytes}{remedy}")


class SampleUndecodable(ValueError):  # noqa: N818  the tree of errors names things by what is wrong with them
    """A sample is no whole image that the pipeline may decode. The text is a reason in one line."""
