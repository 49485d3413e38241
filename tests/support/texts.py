"""Small files that steps on text read: tokenizers, lists of words, tables of vectors."""

import numpy as np
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors

WORDS = {"[UNK]": 0, "[CLS]": 1, "[SEP]": 2, "the": 3, "cat": 4, "sat": 5, "on": 6, "mat": 7, ".": 8}
BPE_VOCABULARY = {
    piece: number for number, piece in enumerate(["[UNK]", *"abcdefghij", "ab", "abc", "de", "abcde", "ij"])
}
BPE_MERGES = [("a", "b"), ("ab", "c"), ("d", "e"), ("abc", "de"), ("i", "j")]


def word_level(**options):
    """Make a tokenizer of whole words, with [CLS] in front and [SEP] behind."""
    tokenizer = Tokenizer(models.WordLevel(WORDS, unk_token="[UNK]", **options))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = [(name, WORDS[name]) for name in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=special)
    return tokenizer


def byte_pairs():
    """Make a tokenizer of pieces of words that are merged in the order of ``BPE_MERGES``.

    It has no special tokens.
    """
    tokenizer = Tokenizer(models.BPE(BPE_VOCABULARY, BPE_MERGES, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer


def save(tokenizer, folder, name="tokenizer.json"):
    """Write a tokenizer.json."""
    tokenizer.save(str(folder / name))
    return folder / name


def with_special(tokenizer, name):
    """Return the tokenizer with one more special token."""
    tokenizer.add_special_tokens([AddedToken(name, special=True)])
    return tokenizer


def word_table(folder, words, columns=3):
    """Write ``words.txt`` and ``table.npy``, whose row i is i + 1, i + 1.25, i + 1.5, ..."""
    table = np.arange(1, len(words) + 1, dtype=np.float32)[:, None] + np.arange(columns, dtype=np.float32) / 4
    (folder / "words.txt").write_text("".join(f"{word}\n" for word in words))
    np.save(folder / "table.npy", table)
    return {"words": folder / "words.txt", "table": folder / "table.npy"}, table
