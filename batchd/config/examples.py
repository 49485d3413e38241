"""What people write for a key, as an example. Daemon and CLI; standard library only.

Invariant: an example of a key is what that key may hold, whatever kind of source or step it is of.
"""

EXAMPLES = {
    "source": '{ type = "folder", path = "/data/photos" }',
    "batch_size": "256",
    "pipeline": """[
    { op = "decode" },
    { op = "random_resized_crop", size = [224, 224] },
    { op = "random_flip" },
]""",
    "sources": '[{ type = "folder", path = "/data/photos" }, { type = "folder", path = "/data/more" }]',
    "weights": "[3, 1]",
    "name": '"zip"',
    "options": '{ path = "/data/photos.zip" }',
    "of": '{ type = "folder", path = "/data/photos" }',
    "patterns": '["train/**/*.{jpg,png}", "more/*.jpg"]',
    "parquet.fields": '{ image = "image", label = "int64" }',
    "lmdb.fields": '{ image = "image" }',
    "shards": '["train-{0000..0123}.tar"]',
    "csv.fields": '{ age = "float32", label = "int64" }',
    "record": '{ label = "uint8", image = "uint8[3,32,32]" }',
    "tfrecord.fields": '{ image = "image", label = "int64" }',
    "video.files": '["train/**/*.mp4"]',
    "csv.root": "",
    "csv.path": '"/data/table.csv"',
    "npy.root": "",
    "npy.path": '"/data/images.npy"',
    "npz.path": '"/data/mnist.npz"',
    "raw.root": "",
    "raw.path": '"/data/data_batch_1.bin"',
    "runtime_dir": '"/run/batchd"',
    "tcp": '"10.0.0.5:7070"',
    "keys_dir": '"/etc/batchd/keys"',
    "cache_dir": '"/var/cache/batchd"',
    "cache_memory": '"160GiB"',
    "cache_short_side": "256",
    "cache_size": '"160GiB"',
    "memory": '"1GiB"',
    "path": '"/data/photos"',
    "root": '"/data"',
    "size": "[224, 224]",
    "classes": "10",
    "dtype": '"float32"',
    "min": "0.0",
    "max": "255.0",
    "drop.fields": '["caption"]',
    "field": '"fname"',
    "to": '"file"',
    "file": '"/data/tokenizer.json"',
    "max_length": "128",
    "words": '"/data/words.txt"',
    "table": '"/data/vectors.npy"',
    "max_words": "64",
    "length": "256",
    "max_shape": "[512, 512, 3]",
    "quarter_turns": "[0, 1, 2, 3]",
    "mask": '"mask"',
    "python_path": '["/srv/training"]',
    "http_names": '["batchd.example.org"]',
    "python.options": '{ split = "train" }',
    "generator.options": "{ level = 3 }",
    "function": '"package.module:name"',
    "fields": '{ image = "uint8[32,32,3]", label = "int64" }',
    "outputs": '{ score = "float32" }',
}
"""What stands where there is no default, or an empty list; a key without an example, or with an empty one for its kind of source
or step, excludes one that has one."""


def example_of(kind: str, name: str) -> str:
    """What may stand for ``name`` in a source or step of a kind; "" where there is no example."""
    return EXAMPLES.get(f"{kind}.{name}", EXAMPLES.get(name, ""))
