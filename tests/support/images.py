"""Generated images for tests: small colour photographs, and odd variants of real data sets.

Arrays are RGB, uint8, [height, width, 3]; files are bytes. What cv2 cannot write (an EXIF tag,
inks, a palette with alpha, a header that lies) is built here from the format's own description.
"""

import zlib
from base64 import b85decode
from collections.abc import Mapping
from pathlib import Path
from struct import pack, unpack_from

import cv2
import numpy as np
import simplejpeg

JPEG_START, JPEG_END = b"\xff\xd8", b"\xff\xd9"
PNG_MAGIC = b"\x89PNG\r\n\x1a\n"
SIDES = [(60, 40), (50, 50), (40, 60), (20, 90)]
"""Heights and widths of pictures: portrait, square, wide, banner."""


def photo(height=75, width=100, seed=0):
    """Paint soft, colourful blobs with a little grain."""
    random = np.random.default_rng(seed)
    cells = random.uniform(0, 255, (4, 5, 3)).astype(np.float32)
    image = cv2.resize(cells, (width, height), interpolation=cv2.INTER_CUBIC) + random.normal(0, 6, (height, width, 3))
    return np.clip(image, 0, 255).astype(np.uint8)


def corners(height=64, width=96):
    """Paint the quarters red, green, blue and white, so any turn or flip shows."""
    image = np.zeros((height, width, 3), np.uint8)
    image[: height // 2, : width // 2] = (220, 30, 30)
    image[: height // 2, width // 2 :] = (30, 200, 30)
    image[height // 2 :, : width // 2] = (30, 30, 220)
    image[height // 2 :, width // 2 :] = (240, 240, 240)
    return image


def encode(image, extension, *parameters):
    """Write an image (RGB, RGBA or grey) as a file of the format that ``extension`` names."""
    if image.ndim == 3:
        image = cv2.cvtColor(image, cv2.COLOR_RGBA2BGRA if image.shape[2] == 4 else cv2.COLOR_RGB2BGR)
    done, encoded = cv2.imencode(extension, image, list(parameters))
    assert done
    return encoded.tobytes()


def jpeg(image, quality=95, subsampling="420"):
    """Write a baseline JPEG; an image of one channel becomes a grey one."""
    grey = image.ndim == 2
    pixels = np.ascontiguousarray(image[..., np.newaxis] if grey else image)
    return simplejpeg.encode_jpeg(pixels, quality, "GRAY" if grey else "RGB", "Gray" if grey else subsampling)


def progressive_jpeg(image):
    """Write a JPEG of several scans."""
    return encode(image, ".jpg", cv2.IMWRITE_JPEG_PROGRESSIVE, 1)


def jpeg_with_scans(image, scans):
    """Write a progressive JPEG that repeats its last scan until it has ``scans`` more of them."""
    data = progressive_jpeg(image)
    last = data[data.rindex(b"\xff\xda") : -2]
    return data[:-2] + last * scans + JPEG_END


def jpeg_of(image, subsampling="420", restart=0, quality=90, *, is_progressive=False):
    """Write a colour JPEG with a restart marker every so many MCUs, baseline or progressive.

    A grey image becomes a grey JPEG.
    """
    options = [cv2.IMWRITE_JPEG_QUALITY, quality, cv2.IMWRITE_JPEG_RST_INTERVAL, restart]
    if image.ndim == 3:
        factor = getattr(cv2, f"IMWRITE_JPEG_SAMPLING_FACTOR_{subsampling}")
        options += [cv2.IMWRITE_JPEG_SAMPLING_FACTOR, factor]
    return encode(image, ".jpg", *options, cv2.IMWRITE_JPEG_PROGRESSIVE, int(is_progressive))


def jpeg_by_component(grey, scans=1):
    """Write a baseline JPEG with the same scan for each of three components.

    Each of the first ``scans`` components has its scan.
    """
    data = jpeg(grey)
    frame, scan = data.index(b"\xff\xc0"), data.index(b"\xff\xda")
    head, height_and_width = data[:frame], data[frame + 5 : frame + 9]
    tables = data[frame + 2 + unpack_from(">H", data, frame + 2)[0] : scan]
    components = b"".join(bytes([number, 0x11, 0]) for number in (1, 2, 3))
    entropy = data[scan + 10 : -2]
    parts = [b"\xff\xda\0\x08\1" + bytes([number]) + b"\0\0\x3f\0" + entropy for number in (1, 2, 3)]
    return (
        head
        + b"\xff\xc0\0\x11\x08"
        + height_and_width
        + b"\3"
        + components
        + tables
        + parts[0] * scans
        + parts[1]
        + parts[2]
        + JPEG_END
    )


def jpeg_of_components(components):
    """Write a baseline JPEG of (plane, sampling) with a scan for each; 0x42 is 4 across, 2 down.

    The first plane has the size of the image, and the others a part of it.
    """
    files = [jpeg(plane) for plane, _sampling in components]
    first, (height, width) = files[0], components[0][0].shape
    frame, scan = first.index(b"\xff\xc0"), first.index(b"\xff\xda")
    tables = first[frame + 2 + unpack_from(">H", first, frame + 2)[0] : scan]
    listed = b"".join(bytes([number, sampling, 0]) for number, (_plane, sampling) in enumerate(components))
    head = pack(">BBHBHHB", 0xFF, 0xC0, 8 + len(listed), 8, height, width, len(components))
    scans = (
        b"\xff\xda\0\x08\1" + bytes([number]) + b"\0\0\x3f\0" + file[file.index(b"\xff\xda") + 10 : -2]
        for number, file in enumerate(files)
    )
    return first[:frame] + head + listed + tables + b"".join(scans) + JPEG_END


def jpeg_of_sampling(image, across, down):
    """Write a colour JPEG, chroma ``across`` times ``down`` times smaller, by component."""
    planes = cv2.cvtColor(image, cv2.COLOR_RGB2YCrCb)
    size = -(-image.shape[1] // across), -(-image.shape[0] // down)
    small = [cv2.resize(planes[..., place], size, interpolation=cv2.INTER_AREA) for place in (2, 1)]
    return jpeg_of_components([(planes[..., 0], across << 4 | down), *((plane, 0x11) for plane in small)])


def arithmetic_jpeg():
    """Return a JPEG of 37 x 20 pixels with arithmetic coding, which no installed encoder writes."""
    return b85decode(
        "|JeWF01!$>Nk#wx0RR9200961|JwjV02>k%7Zed27Zw*D92+1gLMtdGB`8rkJupIGRb^yfRb5+Zc$tA}agcLcU4^xVke;Kft*d8%yve$z$C;"
        "?Br2pFhLjfEf9w;LyPAe-;q;6eqq@<*zq@<*zq@<*zq@<*zq@<*zq@<*zq@<*zq@<*zq@<*zq@<*zq@<*zq@<*zq@@4J01*fP6aXay0U`hb5"
        "di}c0sqVZ3IGrg1pyEd1^?Or3<CiG0ucid06zf#04NY4kOr~hY^=z#&@_NpyhJ>Bqus-Heth7>@0Srsje=I^MoF;vOa-fn)W1bT(%$Ly*lS;"
        "G*bwfre>H1{48TKn&~@nuzeN>P<-=Wbq^Kn|=-JF5cgu0n;j9s}bI!=Vn%bw@`)?;*VY1N2tRAK?;Bt}cjkla5e2i64bK};NeZgD)IK5q~fd"
        "AP"
    )


def ycck_jpeg(inks):
    """Write a JPEG of inks, uint8 [height, width, 4], as YCCK with Adobe's mark (0: full)."""
    return simplejpeg.encode_jpeg(np.ascontiguousarray(inks), 95, "CMYK", "444")


def cmyk_jpeg(color, height=48, width=64):
    """Write a JPEG of one colour, stored as CMYK, with Adobe's mark.

    A YCCK file holds three channels of luma and chroma. A decoder that takes them for inks uses
    them unchanged, so the wanted inks are encoded as the colour with these values of luma and
    chroma.
    """
    # cv2 orders them Y, Cr, Cb.
    luma_chroma = np.full((1, 1, 3), [color[0], color[2], color[1]], np.uint8)
    inverted = 255 - cv2.cvtColor(luma_chroma, cv2.COLOR_YCrCb2RGB)[0, 0]
    inks = np.full((height, width, 4), [*inverted, 255], np.uint8)
    data = bytearray(ycck_jpeg(inks))
    data[data.index(b"Adobe") + 11] = 0
    return bytes(data)


def exif_block(orientation, order="<"):
    """Build an EXIF block (a TIFF file of one directory with one entry)."""
    start = b"II*\0" if order == "<" else b"MM\0*"
    return start + pack(f"{order}IHHHIHHI", 8, 1, 0x0112, 3, 1, orientation, 0, 0)


def jpeg_with_exif(data, orientation, order="<"):
    """Put an EXIF segment with ``orientation`` into a JPEG."""
    payload = b"Exif\0\0" + exif_block(orientation, order)
    return JPEG_START + b"\xff\xe1" + pack(">H", len(payload) + 2) + payload + data[2:]


def png_with(data, kind, content):
    """Put a chunk into a PNG, behind its header."""
    return data[:33] + png_chunk(kind, content) + data[33:]


def png_with_exif(data, orientation):
    """Put an eXIf chunk with ``orientation`` into a PNG, behind its header."""
    return png_with(data, b"eXIf", exif_block(orientation))


def png_with_raw_profile(data, orientation, kind=b"tEXt", name=b"exif"):
    """Put EXIF into a PNG as ImageMagick does: as text of hexadecimal digits, of any ``kind``."""
    block = b"Exif\0\0" + exif_block(orientation)
    text = b"\n%s\n%8d\n%s\n" % (name, len(block), block.hex().encode())
    packed = {b"tEXt": text, b"zTXt": b"\0" + zlib.compress(text), b"iTXt": b"\1\0en\0\0" + zlib.compress(text)}
    return png_with(data, kind, b"Raw profile type " + name + b"\0" + packed[kind])


def webp_with_exif(data, orientation):
    """Wrap a plain WebP into the extended form, with an EXIF chunk."""
    height, width = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR_BGR).shape[:2]
    size = (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    block = exif_block(orientation)
    chunks = b"VP8X" + pack("<IB3x", 10, 0b1000) + size + data[12:] + b"EXIF" + pack("<I", len(block)) + block
    return b"RIFF" + pack("<I", len(chunks) + 4) + b"WEBP" + chunks


def stored_as(image, orientation):
    """Turn an upright image into what a camera stores together with ``orientation``."""
    turned = {
        1: lambda: image,
        2: lambda: image[:, ::-1],
        3: lambda: image[::-1, ::-1],
        4: lambda: image[::-1],
        5: lambda: image.swapaxes(0, 1),
        6: lambda: np.rot90(image, 1),
        7: lambda: image[::-1, ::-1].swapaxes(0, 1),
        8: lambda: np.rot90(image, -1),
    }[orientation]()
    return np.ascontiguousarray(turned)


def png_chunk(kind, payload):
    """Build one chunk of a PNG."""
    return pack(">I", len(payload)) + kind + payload + pack(">I", zlib.crc32(kind + payload))


def with_right_checksums(data):
    """Correct the checksum of every chunk of a PNG, as far as its chunks can be followed."""
    fixed, start = bytearray(data), 8
    while start + 12 <= len(data) and (end := start + 12 + unpack_from(">I", data, start)[0]) <= len(data):
        fixed[end - 4 : end] = pack(">I", zlib.crc32(data[start + 4 : end - 4]))
        start = end
    return bytes(fixed)


def png16(image):
    """Write a PNG of 16 bits per channel whose upper bytes are ``image``."""
    return encode(image.astype(np.uint16) * 256 + 99, ".png")


def palette_png(indices, palette, alphas):
    """Write a PNG of palette indices, uint8 [height, width], with an alpha for each entry."""
    height, width = indices.shape
    rows = b"".join(b"\0" + row.astype(np.uint8).tobytes() for row in indices)
    return (
        PNG_MAGIC
        + png_chunk(b"IHDR", pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0))
        + png_chunk(b"PLTE", np.asarray(palette, np.uint8).tobytes())
        + png_chunk(b"tRNS", bytes(alphas))
        + png_chunk(b"IDAT", zlib.compress(rows))
        + png_chunk(b"IEND", b"")
    )


def animation(extension, frames):
    """Write an animated GIF, WebP or PNG from RGB frames."""
    animated = cv2.Animation()
    animated.frames = [cv2.cvtColor(frame, cv2.COLOR_RGB2BGRA) for frame in frames]
    animated.durations = [100] * len(frames)
    done, encoded = cv2.imencodeanimation(extension, animated)
    assert done
    return encoded.tobytes()


def jpeg_announcing(data, height, width, bits=8):
    """Change the size in the header of a baseline JPEG."""
    start = data.index(b"\xff\xc0")
    return data[: start + 4] + pack(">BHH", bits, height, width) + data[start + 9 :]


def huge_jpeg_header():
    """Make 100 bytes that announce a JPEG of 65,500 x 65,500 pixels."""
    data = jpeg_announcing(jpeg(photo(8, 8)), 65_500, 65_500)
    frame = data.index(b"\xff\xc0")
    frame_bytes = data[frame : frame + 2 + unpack_from(">H", data, frame + 2)[0]]
    scan = data.index(b"\xff\xda")
    scan_bytes = data[scan : scan + 2 + unpack_from(">H", data, scan + 2)[0]]
    return (JPEG_START + frame_bytes + scan_bytes).ljust(98, b"\0") + JPEG_END


def gif(indices, palette, transparent=None):
    """Write a GIF of up to 128 colors whose every pixel has a code of its own."""
    height, width = indices.shape
    colors = np.zeros((128, 3), np.uint8)
    colors[: len(palette)] = palette
    codes = b"".join(
        b"\x80" + part.tobytes() for part in np.array_split(indices.astype(np.uint8).ravel(), indices.size // 100 + 1)
    )
    blocks = b"".join(bytes([len(codes[at : at + 255])]) + codes[at : at + 255] for at in range(0, len(codes), 255))
    control = b"" if transparent is None else b"\x21\xf9\4\1\0\0" + bytes([transparent, 0])
    size = pack("<HH", width, height)
    screen = b"GIF89a" + size + b"\xf6\0\0" + colors.tobytes()
    return screen + control + b"\x2c\0\0\0\0" + size + b"\0\x07" + blocks + b"\1\x81\0;"


def alpha_chunk(alphas):
    """Write the alpha of a lossy WebP, uint8 [height, width], of an even number of pixels."""
    return b"ALPH" + pack("<I", 1 + alphas.size) + b"\0" + alphas.tobytes() + b"\0"


def webp_with_alpha(data, alphas):
    """Wrap a plain lossy WebP into the extended form, with alphas."""
    height, width = alphas.shape
    size = (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    chunks = b"VP8X" + pack("<IB3x", 10, 0b10000) + size + alpha_chunk(alphas) + data[12:]
    return b"RIFF" + pack("<I", len(chunks) + 4) + b"WEBP" + chunks


def still_in_animated_webp(data, left=0, top=0, canvas=None, alphas=None):
    """Make a plain WebP the only frame of an animated one, at an even place.

    ``alphas``: if it is lossy.
    """
    height, width = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR_BGR).shape[:2]
    across, down = canvas or (width, height)

    def number(value):
        return value.to_bytes(3, "little")

    frame = number(left // 2) + number(top // 2) + number(width - 1) + number(height - 1) + number(100) + b"\0"
    frame += (b"" if alphas is None else alpha_chunk(alphas)) + data[12:]
    chunks = b"VP8X" + pack("<IB3x", 10, 0b10010) + number(across - 1) + number(down - 1)
    chunks += b"ANIM" + pack("<I4sH", 6, b"\xff\x80\0\xff", 0) + b"ANMF" + pack("<I", len(frame)) + frame
    return b"RIFF" + pack("<I", len(chunks) + 4) + b"WEBP" + chunks


def bitmap(pixels, masks, bits, *, is_top_down=False, header_bytes=40, gap=0):
    """Write a BMP of numbers [height, width] with red, green and blue under ``masks``."""
    height, width = pixels.shape
    rows = pixels.astype(f"<u{bits // 8}")
    rows = rows if is_top_down else rows[::-1]
    padding = bytes(-width * bits // 8 % 4)
    start = 14 + max(header_bytes, 52) + gap
    header = pack("<IiiHHI", header_bytes, width, -height if is_top_down else height, 1, bits, 3) + bytes(20)
    header += pack("<III", *masks) + bytes(max(header_bytes, 52) - 52 + gap)
    body = b"".join(row.tobytes() + padding for row in rows)
    return b"BM" + pack("<I4xI", start + len(body), start) + header + body


def huge_png_header():
    """Make 100 bytes that announce a PNG of 65,500 x 65,500 pixels."""
    start = PNG_MAGIC + png_chunk(b"IHDR", pack(">IIBBBBB", 65_500, 65_500, 8, 2, 0, 0, 0))
    end = png_chunk(b"IEND", b"")
    body = zlib.compress(b"").ljust(100 - len(start) - len(end) - 12, b"\0")
    return start + png_chunk(b"IDAT", body) + end


def write_photos(folder, counts: Mapping[str, int], height=48, width=64):
    """Write ``counts[name]`` small JPEGs, each different, into ``folder``/name/number.jpg.

    Return their paths, sorted.
    """
    paths = []
    for seed_base, name in enumerate(sorted(counts)):
        (Path(folder) / name).mkdir(parents=True, exist_ok=True)
        for number in range(counts[name]):
            path = Path(folder) / name / f"{number:05}.jpg"
            path.write_bytes(jpeg(photo(height, width, seed=seed_base * 100_000 + number)))
            paths.append(path)
    return paths


def write_aspects(folder: Path) -> Path:
    """Write forty pictures of four aspects; every second four are stored on their side, tagged."""
    folder.mkdir()
    for place in range(40):
        height, width = SIDES[place % 4]
        upright, sideways = jpeg(photo(height, width)), jpeg_with_exif(jpeg(photo(width, height)), 6)
        (folder / f"{place:02}.jpg").write_bytes(sideways if place // 4 % 2 else upright)
    return folder
