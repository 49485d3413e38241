"""Text to the numbers of tokens. Worker process; needs the library ``tokenizers``."""

import numpy as np

from batchd.pipeline.randomness import SampleRandom
from batchd.pipeline.stages import Row
from batchd.pipeline.text.options import TOKEN_MAX, Tokenize
from batchd.pipeline.text.stages import text_in
from batchd.pipeline.text.tokenizer_file import failures_as, load_tokenizer
from batchd.samples.errors import SampleUndecodable
from batchd.samples.values import Value


class TokenizeStage:
    """Replaces text by tokens, and where they are padded, by their mask and their number too."""

    def __init__(self, step: Tokenize) -> None:
        self._step = step
        self._tokenizer, self._pad_id = load_tokenizer(step)

    def run(self, values: dict[str, Value], _random: SampleRandom, _row: Row) -> None:
        """See ``stages.Stage``."""
        step = self._step
        tokens = self._tokens(text_in(values, step.field))
        del values[step.field]
        if step.padding == "none":
            values[step.to] = tokens
            return
        count = len(tokens)
        padded = np.full(step.max_length, self._pad_id, np.int32)
        padded[:count] = tokens
        mask = np.zeros(step.max_length, np.uint8)
        mask[:count] = 1
        values |= dict(zip(step.makes, (padded, mask, np.int32(count)), strict=True))

    def _tokens(self, text: str) -> "np.ndarray[tuple[int], np.dtype[np.int32]]":
        """Raises ``SampleUndecodable``."""
        step = self._step
        with failures_as(SampleUndecodable, "the tokenizer does not take the text"):
            numbers = self._tokenizer.encode(text, add_special_tokens=step.special_tokens).ids
        if len(numbers) > step.max_length:
            raise SampleUndecodable(f"the text has {len(numbers)} tokens, more than max_length = {step.max_length}")
        if max(numbers, default=0) > TOKEN_MAX:
            raise SampleUndecodable(f"the tokenizer makes the number {max(numbers)}, which int32 cannot hold")
        return np.array(numbers, np.int32)
