"""What can be wrong with the bytes of one sample. Raised in a worker, which reports it as data and lives on."""


class SampleUndecodable(ValueError):  # noqa: N818  the tree of errors names things by what is wrong with them
    """The bytes of a sample are no whole image that the pipeline may decode.

    The text is the reason, in one short line, without the sample's name: whoever catches it knows which sample it was.
    """
