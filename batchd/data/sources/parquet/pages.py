"""Count the values of a column chunk by the headers of its pages, which are in Thrift. Daemon.

    column chunk   | header | page | header | page | ...       header: bytes of the page, its values

pyarrow gives the numbers of the footer only, and a few bytes of footer may announce any number of
rows. No page is decoded.

Invariant: every loop reads at least one byte of the header, whatever is in it.
"""

from typing import BinaryIO, Final

PAGE_BYTES, DATA_PAGE, DATA_PAGE_2 = 3, 5, 8
"""Numbers of the fields of a page header."""
VALUES = 1
"""Number of a field of a data page's header."""
HEADER_BYTES = 256
HEADER_BYTES_MAX = 1 << 20
"""A header may hold the smallest and the largest value of its page."""
_TRUE, _FALSE, _BYTE, _I64, _DOUBLE, _BINARY, _LIST, _SET, _STRUCT = 1, 2, 3, 6, 7, 8, 9, 10, 12
_LONG: Final = 15
"""In place of the length of a list that has more elements than this."""
_SHIFT_MAX = 63

Header = dict[int, object]


def count_values(stream: BinaryIO, start: int, end: int) -> int:
    """The values of the pages from one byte of a file to another. Raises ``ValueError``."""
    found = 0
    while start < end:
        header, size = _header_at(stream, start, end)
        page_bytes = header.get(PAGE_BYTES)
        if not isinstance(page_bytes, int) or page_bytes < 0:
            raise ValueError(f"the header of a page at byte {start} is damaged")
        for kind in (DATA_PAGE, DATA_PAGE_2):
            data_page = header.get(kind)
            values = data_page.get(VALUES) if isinstance(data_page, dict) else None
            found += values if isinstance(values, int) else 0
        start += size + page_bytes
    return found


def _header_at(stream: BinaryIO, start: int, end: int) -> tuple[Header, int]:
    """The header of a page, and its bytes. Raises ``ValueError``."""
    window = HEADER_BYTES
    while True:
        stream.seek(start)
        data = stream.read(min(window, end - start))
        try:
            return _struct(data, 0)
        except (IndexError, RecursionError):
            window *= 16
            if window > HEADER_BYTES_MAX or len(data) == end - start:
                raise ValueError(f"the header of a page at byte {start} is damaged") from None


def _struct(data: bytes, place: int) -> tuple[Header, int]:
    """The fields of a struct, and the byte behind it. Raises ``IndexError`` at the end of data."""
    found: Header = {}
    number = 0
    while head := data[place]:
        place += 1
        kind = head & 15
        if head >> 4:
            number += head >> 4
        else:
            number, place = _signed(data, place)
        found[number], place = _value(data, place, kind)
    return found, place + 1


def _value(data: bytes, place: int, kind: int) -> tuple[object, int]:
    if kind in (_TRUE, _FALSE):
        return kind == _TRUE, place
    if kind == _BYTE:
        return data[place], place + 1
    if _BYTE < kind <= _I64:
        return _signed(data, place)
    if kind == _DOUBLE:
        return None, place + 8
    if kind == _BINARY:
        length, place = _unsigned(data, place)
        return None, place + length
    if kind in (_LIST, _SET):
        return None, _behind_list(data, place)
    if kind == _STRUCT:
        return _struct(data, place)
    raise ValueError(f"a page has a field of the unknown type {kind}")


def _behind_list(data: bytes, place: int) -> int:
    count, kind = data[place] >> 4, data[place] & 15
    place += 1
    if count == _LONG:
        count, place = _unsigned(data, place)
    for _element in range(count):
        _, place = _value(data, place, _BYTE if kind in (_TRUE, _FALSE) else kind)
        data[place - 1]  # elements end with the data
    return place


def _unsigned(data: bytes, place: int) -> tuple[int, int]:
    number = shift = 0
    while True:
        byte = data[place]
        place += 1
        number |= (byte & 127) << shift
        if byte < 128:  # noqa: PLR2004  the highest bit says that another byte follows
            return number, place
        shift += 7
        if shift > _SHIFT_MAX:
            raise ValueError("a page has a number of more than 64 bits")


def _signed(data: bytes, place: int) -> tuple[int, int]:
    number, place = _unsigned(data, place)
    return number >> 1 ^ -(number & 1), place
