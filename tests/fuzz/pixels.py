"""Call the extensions for pixels, sound and words with arguments of all kinds; `make fuzz-pixels`.

``pixels.py PIXELS SOUND WORDS SECONDS SEED``: the extensions are built with AddressSanitizer and
UndefinedBehaviorSanitizer, which end the process at the first wrong access. Each call either works,
or raises ``ValueError`` or ``BufferError``.
"""

import sys
import time
from collections import defaultdict
from importlib.util import module_from_spec, spec_from_file_location

import numpy as np

PACKAGE = "batchd.data.pipeline"
NAMES = ("count_levels", "fill_polygon", "fill_runs", "recolor", "remap", "resample", "scale", "sharpen")
NAMES += ("warp", "warp_parts")
SOUND_NAMES = ("combine", "convolve", "logarithms", "resample", "spectra")
WORDS_NAMES = ("encode", "letters", "place")
REFUSED = (ValueError, BufferError, OverflowError)


def extension(name, path):
    """Load the extension at a path."""
    spec = spec_from_file_location(f"{PACKAGE}.{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Arguments:
    """Arguments that fit, and some that do not."""

    def __init__(self, seed):
        self.random = np.random.default_rng(seed)

    def chance(self, share=0.1):
        """Return True for some of the calls."""
        return self.random.random() < share

    def side(self):
        """Return a length: often short, sometimes none, or long."""
        return int(self.random.choice([0, 1, 2, 3, self.random.integers(1, 40), self.random.integers(1, 300)]))

    def image(self, shape=None):
        """Return an image: a part of a larger one, in any order, of another type now and then."""
        height, width, channels = shape or (self.side(), self.side(), int(self.random.integers(1, 5)))
        channels = int(self.random.integers(0, 7)) if self.chance(0.03) else channels
        whole = self.random.integers(0, 256, (2 * height + 2, width + 3, channels)).astype(np.uint8)
        part = whole[1 : 2 * height + 1][:: self.random.choice([1, 2, -1])][:height, 2 : 2 + width]
        part = part[:, ::-1] if self.chance(0.05) else part
        part = part.astype(np.int16) if self.chance(0.02) else part
        part.flags.writeable = not self.chance(0.02)
        return part[..., 0] if self.chance(0.02) and channels else part

    def like(self, image):
        """Return an image of the same shape, nearly always."""
        return self.image(None if self.chance(0.05) or image.ndim != 3 else image.shape)

    def number(self, usual):
        """Return a number around what is usual, or anything."""
        anything = [-1, 0, 1, 2**31 - 1, -(2**31), usual, usual + 1]
        return int(self.random.choice(anything) if self.chance(0.2) else self.random.integers(0, usual + 1))

    def change(self):
        """Return a kind of change of colours and its number, nearly always one that fits."""
        kind = int(self.random.integers(5))
        most = (11, 11, 11, 6 << 16, 11 << 14)[kind]
        number = float(
            self.random.choice([np.nan, -1, most + 1]) if self.chance(0.01) else self.random.uniform(0, most)
        )
        return 7 if self.chance(0.01) else kind, number

    def taps(self, source, target):
        """Return taps that lie within the source, nearly always."""
        count = int(self.random.integers(1, max(2, min(source, 30) + 1)))
        first = self.random.integers(0, max(1, source - count + 1), target).astype(np.int32)
        first = first + self.random.integers(-3, 4, target).astype(np.int32) if self.chance(0.05) else first
        shares = self.random.random((target, count))
        shift = int(self.random.integers(14, 19))
        weights = np.rint(shares / shares.sum(axis=1, keepdims=True) * (1 << 14)).astype(np.int16)
        return first, weights, self.number(22) if self.chance(0.05) else shift

    def places(self, shape):
        """Return places of pixels, near or anywhere."""
        reach = int(self.random.choice([1 << 12, 1 << 20, 2**31 - 1]))
        places = self.random.integers(-reach, reach, (*shape[:2], 2)).astype(np.int32)
        return places[:-1] if self.chance(0.03) else places

    def origin(self, of_shift):
        """Return factors of x, y and 1; the first one often that of a row that is shifted."""
        reach = int(self.random.choice([1 << 33, 1 << 40, 1 << 62]))
        by_x, *others = (int(number) for number in self.random.integers(-reach, reach, 3))
        return of_shift if self.chance(0.5) else by_x, *others

    def upright(self, origin):
        """Return factors without that of y, nearly always, that find pixels now and then."""
        by_x, by_y, by_one = origin
        return by_x, by_y if self.chance(0.05) else 0, self.number(20) << 32 if self.chance(0.7) else by_one

    def corners(self):
        """Return corners, anywhere, and some that are no numbers."""
        reach = float(self.random.choice([50, 1000, 1e30]))
        corners = self.random.uniform(-reach, reach, (self.side(), 2)).astype(
            np.float32 if self.chance(0.03) else float
        )
        return corners * (np.nan if self.chance(0.03) else 1)

    def outline(self, numbers):
        """Return arguments of an outline: numbers, a mask and its size, nearly always."""
        height, width = self.side(), self.side()
        mask = np.zeros((height, width + self.chance(0.03)), np.uint8)
        mask.flags.writeable = not self.chance(0.02)
        return numbers, mask, height, -width if self.chance(0.02) else width

    def fill(self):
        """Return four bytes, or three."""
        return bytes(3 if self.chance(0.03) else 4)

    def call(self):
        """Return the name of a function and its arguments."""
        image, flag = self.image(), bool(self.random.integers(2))
        other = self.image((self.side(), self.side(), image.shape[-1]))
        name = str(self.random.choice(NAMES))
        size = image.shape[:2] if image.ndim > 1 else (1, 1)
        target = other.shape[:2] if other.ndim > 1 else (1, 1)
        return name, {
            "count_levels": lambda: (image, np.zeros((image.shape[-1] + self.chance(0.05), 256), np.uint32)),
            "fill_polygon": lambda: self.outline(self.corners()),
            "fill_runs": lambda: self.outline(np.cumsum(self.random.integers(-self.chance(0.01), 50, self.side()))),
            "recolor": lambda: (self.image((*size, 3)), tuple(self.change() for _ in range(self.number(8) % 10)), flag),
            "remap": lambda: (image, other, self.places(target), flag, self.fill()),
            "resample": lambda: (
                image,
                other,
                self.taps(size[0], target[0]),
                self.taps(size[-1], target[-1]),
                self.number(7) if self.chance() else 4,
                flag,
                self.chance(0.5),
            ),
            "scale": lambda: (image, other, flag, self.chance(0.5), self.chance(0.5)),
            "sharpen": lambda: (image, self.like(image), self.number(10 << 14)),
            "warp_parts": lambda: (
                tuple((self.image(), self.number(40) - 20, self.number(40) - 20) for _ in range(self.number(4) % 70))
                if self.chance(0.1)
                else ((image, self.number(40) - 20, self.number(40) - 20),),
                (self.number(60), self.number(60)),
                self.fill(),
                other,
                self.upright(self.origin(1 << 31)),
                (0 if self.chance(0.9) else 7, *self.origin(0)[1:]),
                self.fill(),
            ),
            "warp": lambda: (image, other, self.origin(1 << 32), self.origin(0), flag, self.fill()),
        }[name]()


class SoundArguments(Arguments):
    """Arguments of the extension for sound."""

    def numbers(self, *shape, dtype=np.float32):
        """Return numbers of a shape, and of another, another type or read-only now and then."""
        shape = (*shape[:-1], shape[-1] + 1) if self.chance(0.01) else shape
        made = (self.random.standard_normal(shape) * self.random.choice([1, 1e30])).astype(dtype)
        made = made.astype(np.int16) if self.chance(0.01) else made
        made.flags.writeable = not self.chance(0.01)
        return made[..., ::-1] if self.chance(0.01) else made

    def resampling(self):
        """Return arguments of ``resample``."""
        channels = int(self.random.integers(1, 4))
        kernel = self.numbers(int(self.random.integers(1, 40)), 16 * self.side(), dtype=np.float64)
        up, down = (max(1, self.number(1 << self.random.integers(1, 25))) for _ in range(2))
        places = self.number(1 << 39) if self.chance() else self.number(500), self.number(500)
        return self.numbers(self.side(), channels), self.numbers(self.side(), channels), kernel, up, down, *places

    def call(self):
        """Return the name of a function and its arguments."""
        name = str(self.random.choice(SOUND_NAMES))
        return name, {
            "combine": self.combination,
            "convolve": self.convolution,
            "logarithms": lambda: (
                self.numbers(self.side(), self.side(), dtype=np.float64),
                float(self.random.choice([1e-10, 1, 0, np.nan] if self.chance() else [1e-10, 1])),
                float(self.random.standard_normal()),
            ),
            "resample": self.resampling,
            "spectra": self.transforms,
        }[name]()

    def combination(self):
        """Return arguments of ``combine``."""
        rows, inner, sums = self.side(), self.side(), self.side()
        shapes = (rows, inner), (inner + self.chance(0.03), sums), (rows + self.chance(0.03), sums)
        return tuple(self.numbers(*shape, dtype=np.float64) for shape in shapes)

    def convolution(self):
        """Return arguments of ``convolve``."""
        count, length = self.side(), max(1, self.side())
        part = self.number(1 << 40) if self.chance(0.05) else int(self.random.integers(1, length + 1))
        target = self.numbers(count + self.chance(0.03), dtype=np.float64)
        arrays = self.numbers(count), self.numbers(self.side()), target, self.numbers(length, 2, dtype=np.float64)
        return *arrays, part, self.number(1 << 40) if self.chance(0.05) else self.number(300)

    def transforms(self):
        """Return arguments of ``spectra``."""
        length, hop = max(1, self.side()), max(1, self.number(300))
        window = self.side() if self.chance(0.05) else int(self.random.integers(1, length + 1))
        samples = self.side() + window
        frames = self.side() if self.chance() else (samples - window) // hop + 1
        bands, bins = None, length // 2 + 1 + self.chance(0.02)
        if self.chance(0.5):
            bins = self.side()
            ends = np.cumsum(self.random.integers(0, max(2, min(9, length // 2)), bins)) - self.chance(0.03)
            firsts = self.random.integers(0, max(1, length // 2 - 8), bins)
            weights = self.numbers(max(0, int(ends[-1])) if bins and not self.chance(0.03) else 5, dtype=np.float64)
            bands = firsts.astype(np.int32), ends.astype(np.int32), weights
        arrays = (
            self.numbers(samples),
            self.numbers(frames, bins, dtype=np.float64),
            self.numbers(window, dtype=np.float64),
            self.numbers(length, 2, dtype=np.float64),
        )
        return *arrays, hop, self.chance(0.5), self.chance(0.5), float(self.chance(0.5)), bands


class WordsArguments(Arguments):
    """Arguments of the extension for words."""

    CHARACTERS = 0x110000
    ALPHABETS = ("ab", "a b'1\n", "aé中🙂 ", "\x00\x7f\x80\u07ff\u0800\uffff\U00010000\U0010ffff")

    def __init__(self, seed):
        super().__init__(seed)
        self.letters = self.random.integers(0, 256, self.CHARACTERS).astype(np.uint8)
        self.letters[:128] = np.arange(128)
        self.table = bytearray(32 << 4)
        """It stays, so entries of other calls are found in it."""

    def anything(self, size):
        """Return bytes of all values."""
        return self.random.integers(0, 256, size).astype(np.uint8).tobytes()

    def text(self):
        """Return a text, with half of a surrogate pair now and then."""
        alphabet = list(self.ALPHABETS[int(self.random.integers(len(self.ALPHABETS)))])
        return "".join(self.random.choice(alphabet, self.side())) + ("\ud800" if self.chance(0.02) else "")

    def program(self):
        """Return sets and alternatives, nearly always whole."""
        sets = int(self.random.integers(1, 6))
        made = bytearray([sets]) + self.anything(32 * sets)
        for _ in range(int(self.random.integers(1, 5))):
            items = int(self.random.integers(0, 5))
            made.append(items + self.chance(0.01))
            for _ in range(items):
                most = int(self.random.choice([0, 1, 3, 255]))
                made += bytes([int(self.random.integers(sets)) + self.chance(0.01), int(self.random.integers(3)), most])
        return bytes(made) if self.chance(0.95) else self.anything(self.side())

    def encoding(self):
        """Return arguments of ``encode``; the memo has any number of bytes for any word."""
        text = self.text()
        letters = self.letters[[ord(one) for one in text]].tobytes() if text else b""
        table = bytearray(self.anything(self.side())) if self.chance(0.1) else self.table
        memo = defaultdict(lambda: self.anything(int(self.random.integers(20))))
        return text, letters[self.chance(0.03) :], self.program(), memo, table

    def call(self):
        """Return the name of a function and its arguments."""
        name = str(self.random.choice(WORDS_NAMES))
        return name, {
            "encode": self.encoding,
            "letters": lambda: (self.text(), self.letters[self.chance(0.03) :]),
            "place": lambda: (memoryview(self.anything(self.side()))[self.chance(0.05) :], self.number(300)),
        }[name]()


def main():
    """Call until the time is over."""
    *paths, seconds, seed = sys.argv[1:]
    made, refused = {}, 0
    kinds = (("_pixels", Arguments, NAMES), ("_sound", SoundArguments, SOUND_NAMES))
    kinds += (("_words", WordsArguments, WORDS_NAMES),)
    for (kind, of_arguments, names), path in zip(kinds, paths, strict=True):
        module, arguments = extension(kind, path), of_arguments(int(seed))
        end = time.monotonic() + float(seconds) / len(paths)
        while time.monotonic() < end:
            if kind == "_pixels":
                module.use_avx2(arguments.chance(0.7))
            elif kind == "_sound":
                module.use_vectors(int(arguments.random.choice([128, 256, 512])))
            name, given = arguments.call()
            try:
                getattr(module, name)(*given)
            except REFUSED:
                refused += 1
            else:
                made[kind, name] = made.get((kind, name), 0) + 1
        assert {name for of, name in made if of == kind} == set(names), made
    sys.stdout.write(f"{sum(made.values())} calls worked, {refused} were refused: {made}\n")


if __name__ == "__main__":
    main()
