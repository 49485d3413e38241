"""Chats as rows of 4,096 tokens, by Hugging Face: ``datasets.map`` with two processes.

    chats_side.py FOLDER     with "chats.jsonl" and "tokenizer.json"

Prints {"tokens", "rows", "seconds", "cpu_s"}. ``apply_chat_template`` makes tokens and masks, which
Arrow files keep. They are read as numpy, and put into rows in their order, which is the least that
a packing could cost. Imports are not counted.
"""

import json
import os
import resource
import sys
import tempfile
import time
from pathlib import Path

import datasets
import numpy as np
from transformers import PreTrainedTokenizerFast

ROOM = 4096
TEMPLATE = (
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' }}"
    "{%- if message.role == 'assistant' %}{% generation %}{{- message.content + '<|im_end|>' }}{% endgeneration %}"
    "{%- else %}{{- message.content + '<|im_end|>' }}{%- endif %}{{- '\\n' }}{%- endfor %}"
)


def main(folder: Path) -> None:
    """Make all rows once."""
    datasets.disable_progress_bars()
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), chat_template=TEMPLATE)

    def made(chat: dict[str, object]) -> dict[str, object]:
        found = tokenizer.apply_chat_template(
            chat["messages"], tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        return {"tokens": found["input_ids"], "loss_mask": found["assistant_masks"]}

    begun_s, cpu_s = time.perf_counter(), _cpu_s()
    with tempfile.TemporaryDirectory() as cache:
        file = str(folder / "chats.jsonl")
        chats = datasets.load_dataset("json", data_files=file, split="train", cache_dir=cache)
        chats = chats.map(made, num_proc=2, remove_columns=chats.column_names)
        rows, tokens = _packed(chats)
    seconds = time.perf_counter() - begun_s
    print(json.dumps({"tokens": tokens, "rows": rows, "seconds": seconds, "cpu_s": _cpu_s() - cpu_s}))


def _packed(chats: "datasets.Dataset") -> tuple[int, int]:
    """Rows, and the tokens in them."""
    row, mask = np.zeros(ROOM, np.int32), np.zeros(ROOM, np.uint8)
    rows, used, total = 1, 0, 0
    for part in chats.with_format("numpy").iter(1000):
        for tokens, learned in zip(part["tokens"], part["loss_mask"], strict=True):
            if used + len(tokens) > ROOM:
                rows, used = rows + 1, 0
            row[used : used + len(tokens)], mask[used : used + len(tokens)] = tokens, learned
            used, total = used + len(tokens), total + len(tokens)
    return rows, total


def _cpu_s() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


if __name__ == "__main__":
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    main(Path(sys.argv[1]))
