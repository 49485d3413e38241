"""HTML of batches, streams and connections for notebooks. Runs in the user's program.

    batch    up to 16 embedded PNGs of at most 96 x 96 pixels; sounds of the first 4 samples; texts
             of tokens; a table of others
    stream   position and sizes; a table of the fields
    daemon   its streams, and their trainers

Imported when a notebook shows one of them. `batchd peek` draws the same pictures and cells
(``batchd_client.showing``); three channels are drawn as red, green, blue.

Invariant: every name and value is escaped (``escape``), and the text has at most some 1 MiB, most
of it pictures.
"""

import zlib
from base64 import b64encode
from collections.abc import Iterable, Sequence
from html import escape
from struct import pack

import numpy as np

from batchd_client import showing
from batchd_client.batch import Batch, Shown, html_of_batch
from batchd_client.daemon import html_of_daemon
from batchd_client.reader import ENDLESS_STEPS
from batchd_client.sounds import SoundField, sounds_in
from batchd_client.stream import FieldSchema, Stream, html_of_stream, position_text
from batchd_client.token_texts import CHARACTERS_MAX as CHARACTERS_OF_A_TEXT_MAX
from batchd_client.token_texts import TokenText, token_texts
from batchd_wire.fields import Overlay, length_texts
from batchd_wire.status import DaemonStatus
from batchd_wire.views import Array, row_views
from batchd_wire.wording import counted

PICTURES_MAX = 16
PICTURE_PIXELS = 96
SOUND_PIXELS = 80
PICTURE_FIELDS_MAX = 4
SAMPLES_MAX = 4
"""Number of samples in the table of a batch."""
ROWS_MAX = 40
"""Maximum number of rows of a table."""
CHARACTERS_MAX = 60
"""Maximum length of a cell."""
MASK_MAX = 63
"""uint8 images with one channel and no larger value are masks: they are brightened."""
_LEARNED = "background:#cdf0cd;color:#145f14"
_FIGURE = "display:inline-block;margin:0 8px 8px 0;vertical-align:top;text-align:center"


@html_of_batch.register
def batch_html(batch: Batch, stream: str, shown: Shown) -> str:
    """The first samples of ``batch`` as HTML: pictures with labels, and values of other fields."""
    samples = {name: _samples(batch, name) for name in batch}
    rooms = {name: batch.room(name) for name in samples.keys() - showing.of_objects(shown.overlays)}
    sounds = sounds_in(shown.overlays, samples)[:PICTURE_FIELDS_MAX]
    others = {sound.field for sound in sounds}
    pictured = [
        name
        for name in samples
        if name in rooms.keys() - others and showing.is_image(rooms[name].array.dtype, rooms[name].shape)
    ]
    pictured = pictured[:PICTURE_FIELDS_MAX]
    overlays = [one for one in map(Overlay._make, shown.overlays) if one.field in samples]
    drawn = [
        _drawn(
            name, batch, samples[name][: PICTURES_MAX // len(pictured)], [one for one in overlays if one.image == name]
        )
        for name in pictured
    ]
    figures = [
        f'<figure style="{_FIGURE}">{"".join(images)}'
        f"<figcaption>{_cell(showing.label_text(batch, shown.classes, row))}</figcaption></figure>"
        for row, images in enumerate(zip(*(images for images, _note in drawn), strict=True))
    ]
    kept = next((len(images) for images, _note in drawn), 0)
    more = f"; the first {kept} are shown" if 0 < kept < batch.samples else ""
    title = f"{stream}: epoch {batch.epoch}, step {batch.step}, {counted(batch.samples, 'sample')}{more}"
    rows = [
        [name, _type_text(batch, name), *(showing.cell_text(value) for value in samples[name][:SAMPLES_MAX])]
        for name in samples
        if name not in pictured and name not in others
    ]
    header = ["field", "type", *(f"sample {row}" for row in range(min(SAMPLES_MAX, batch.samples)))]
    notes = [f"<div>{escape(note)}</div>" for _images, note in drawn]
    texts = token_texts(list(map(Overlay._make, shown.overlays)), samples, samples.__getitem__)
    words = "".join(map(_text_html, texts))
    heard = "".join(
        _sound_html(sound, value, showing.label_text(batch, shown.classes, row))
        for sound in sounds
        for row, value in enumerate(samples[sound.field][:SAMPLES_MAX])
    )
    drawn_html = f"<div>{''.join(figures)}</div><div>{heard}</div>"
    return f"<div><p>{escape(title)}</p>{''.join(notes)}{drawn_html}{words}{_table(header, rows)}</div>"


def _sound_html(sound: SoundField, value: Array, label: str) -> str:
    """The picture of a sample's sound, with the text of its axes."""
    data = b64encode(png(sound.picture(value, SOUND_PIXELS, 3 * SOUND_PIXELS))).decode()
    text = f"{label} {sound.field}: {sound.time_text(value)}, {sound.range_text(value)}"
    image = f'<img alt="{_cell(sound.field)}" src="data:image/png;base64,{data}">'
    return f'<figure style="{_FIGURE}">{image}<figcaption>{_cell(text)}</figcaption></figure>'


def _text_html(text: TokenText) -> str:
    """A text of tokens: its title, and its words, on green where they are learned."""
    shown, left = "", CHARACTERS_OF_A_TEXT_MAX
    for run in text.runs:
        part = escape(run.text[: max(0, left)])
        left -= len(run.text)
        shown += f'<mark style="{_LEARNED}">{part}</mark>' if run.is_learned and part else part
    more = " …" if left < 0 else ""
    return f'<p style="white-space:pre-wrap"><b>{escape(text.title)}</b>\n{shown}{more}</p>'


@html_of_stream.register
def stream_html(stream: Stream) -> str:
    """A stream as HTML: its position, its sizes and its fields."""
    facts = [
        position_text(stream.epoch, stream.step, stream.steps),
        "endless" if stream.steps >= ENDLESS_STEPS else counted(stream.samples, "sample"),
        f"batch size {stream.batch_size}",
        f"rank {stream.rank} of {stream.world_size}",
    ]
    if stream.classes:
        facts.append(f"{len(stream.classes)} classes: {_shortened(', '.join(stream.classes[:PICTURES_MAX]))}")
    rows = [[name, str(field.dtype), _shape_text(field)] for name, field in stream.schema.items()]
    title = f"stream {stream.name}: {'; '.join(facts)}"
    return f"<div><p>{escape(title)}</p>{_table(['field', 'dtype', 'shape of a sample'], rows)}</div>"


@html_of_daemon.register
def daemon_html(title: str, status: DaemonStatus) -> str:
    """The status of a daemon as HTML: its streams, and the trainers that read them."""
    names = {trainer.session: trainer.name for trainer in status.trainers}
    streams = [
        [
            one.name,
            "live" if one.live else f"{one.samples:,}",
            f"{one.batch_size}",
            f"{one.decoded_batches:,}",
            f"{one.delivered_batches:,}",
            f"{one.bad_samples:,}",
            one.stopped or (f"waits for its storage: {one.away}" if one.away else ""),
        ]
        for one in status.streams
    ]
    trainers = [
        [
            names.get(claim.session, "?"),
            one.name,
            f"{claim.rank} of {claim.world_size}",
            "at its end" if claim.epoch is None else f"epoch {claim.epoch}, step {claim.step}",
            f"{claim.ready_ahead} of {claim.window}",
            f"{claim.wait_s:.1f} s",
        ]
        for one in status.streams
        for claim in one.subscriptions
    ]
    first = ["stream", "samples", "batch size", "decoded batches", "delivered", "bad samples", "stopped"]
    second = ["trainer", "stream", "rank", "next batch", "ready ahead", "waited"]
    tables = _table(first, streams) + _table(second, trainers)
    return f"<div><p>{escape(title)}</p>{tables}{'' if trainers else '<p>no trainers connected</p>'}</div>"


# --- pictures -------------------------------------------------------------------------------------


def png(picture: showing.Picture) -> bytes:
    """The PNG file of ``picture``, uint8 ``[height, width, 3]`` in RGB order."""
    height, width = picture.shape[:2]
    rows = np.zeros((height, 1 + 3 * width), np.uint8)  # each row begins with its filter: 0, none
    rows[:, 1:] = picture.reshape(height, 3 * width)
    header = pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)  # 8 bits, RGB, no interlacing
    parts = [(b"IHDR", header), (b"IDAT", zlib.compress(rows.tobytes())), (b"IEND", b"")]
    chunks = [pack(">I", len(data)) + kind + data + pack(">I", zlib.crc32(kind + data)) for kind, data in parts]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def shrunk(picture: showing.Picture) -> showing.Picture:
    """Reduce uint8 ``[height, width, 3]`` to at most 96 x 96 pixels: means of square cells."""
    height, width = picture.shape[:2]
    cell = -(-max(height, width) // PICTURE_PIXELS)
    if cell == 1:
        return picture
    down, right = np.arange(0, height, cell), np.arange(0, width, cell)
    sums = np.add.reduceat(np.add.reduceat(picture, down, axis=0, dtype=np.uint32), right, axis=1)
    heights, widths = np.diff(down, append=height), np.diff(right, append=width)
    return np.asarray(sums // (heights[:, None, None] * widths[None, :, None]), np.uint8)


def _drawn(name: str, batch: Batch, images: Sequence[Array], overlays: Sequence[Overlay]) -> tuple[list[str], str]:
    """The images of a field as HTML, and a line of text about the field."""
    shape = batch.room(name).shape
    channels_first = showing.has_channels_first(shape)
    note = f"{name}: {_type_text(batch, name)}"
    low, high = showing.range_of(images)
    if images and (images[0].dtype != np.uint8 or (_is_grey(shape) and high <= MASK_MAX)):
        images = [image.astype(np.float32) for image in images]
        note += f", drawn from {low:.4g} (black) to {high:.4g} (white)"
    drawn = []
    values = {one.field: _samples(batch, one.field) for one in overlays}
    for row, image in enumerate(images):
        if not image.size:
            drawn.append("(no pixels)")
            continue
        picture = showing.as_rgb(showing.as_bytes(image, low, high), channels_first=channels_first)
        over = [(one, values[one.field][row]) for one in overlays]
        data = b64encode(png(showing.overlaid(shrunk(picture), picture.shape[:2], over))).decode()
        drawn.append(f'<img alt="{_cell(name)}" src="data:image/png;base64,{data}">')
    return drawn, note


def _is_grey(shape: Sequence[int]) -> bool:
    return len(shape) == showing.GREY_DIMENSIONS or 1 in {shape[0], shape[2]}


def _samples(batch: Batch, name: str) -> list[Array]:
    """The first values of a field: an array for each sample, of the sample's own shape."""
    room = batch.room(name)
    array, sizes = room.array[:PICTURES_MAX], room.sizes
    if room.varying is None or sizes is None:
        return [array[row, ...] for row in range(len(array))]
    return row_views(array, sizes[:PICTURES_MAX], room.varying)


# --- text -----------------------------------------------------------------------------------------


def _table(header: Sequence[str], rows: Sequence[Iterable[str]]) -> str:
    """A table of escaped cells; "" without rows."""
    if not rows:
        return ""
    lines = [f"<tr>{''.join(f'<th>{_cell(text)}</th>' for text in header)}</tr>"]
    lines += [f"<tr>{''.join(f'<td>{_cell(text)}</td>' for text in row)}</tr>" for row in rows[:ROWS_MAX]]
    more = f"<p>and {len(rows) - ROWS_MAX} more</p>" if len(rows) > ROWS_MAX else ""
    return f"<table>{''.join(lines)}</table>{more}"


def _cell(text: str) -> str:
    return escape(_shortened(text))


def _shortened(text: str) -> str:
    return text if len(text) <= CHARACTERS_MAX else text[: CHARACTERS_MAX - 2] + ".."


def _type_text(batch: Batch, name: str) -> str:
    room = batch.room(name)
    lengths = [str(batch.samples), *length_texts(room.array.shape[1:], room.varying)]
    return f"{room.array.dtype}[{', '.join(lengths)}]"


def _shape_text(field: FieldSchema) -> str:
    kind = f" {field.varying.kind}" if field.varying else ""
    return f"[{', '.join(length_texts(field.shape, field.varying))}]{kind}"
