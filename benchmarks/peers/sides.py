"""Which sides there are, in which tables, and the numbers to reach. Plain data."""

from typing import NamedTuple

from environments import OURS


class Side(NamedTuple):
    """One row of a table: a script with a variant, in an environment; ``label`` is for people."""

    name: str
    label: str
    environment: str
    script: str
    variant: str = ""
    trainers: int = 1

    @property
    def is_ours(self) -> bool:
        """True for batchd, which the others are compared with."""
        return self.script == "batchd_side.py"


class Target(NamedTuple):
    """A ratio to reach: ours ÷ that side's images/s, in one table."""

    name: str
    table: str
    ours: tuple[str, ...]
    """Sides of batchd; the fastest one counts."""
    side: str
    at_least: float


class LeastTarget(NamedTuple):
    """The largest ratio allowed, of untouched photographs: our ``value`` / the lowest of ``sides``.

    ``value``: the name of a field of ``Measurement``.
    """

    name: str
    value: str
    sides: tuple[str, ...]
    at_most: float


LIMIT = "bare"
"""What delivers nothing, and so is no peer."""
PHOTOGRAPHS, RESIZED, SHARING = "photographs", "resized", "sharing"

BATCHD = Side("batchd", "batchd", OURS, "batchd_side.py", "files")
SHARDS = Side("batchd-shards", "batchd, shards of `batchd prepare`", OURS, "batchd_side.py", "shards")
TORCH_CV2 = Side("torch-cv2", "torch DataLoader, cv2", "torch", "torch_side.py", "cv2")
TF_DATA = Side("tf-data", "tf.data (decode_and_crop_jpeg)", "tensorflow", "tf_side.py")
TF_SERVICE = Side("tf-service", "tf.data service, one worker", "tensorflow", "tf_service_side.py")
DALI = Side("dali", "DALI, CPU", "dali", "dali_side.py")
FFCV = Side("ffcv", "FFCV, a file of its own with JPEGs", "ffcv", "ffcv_side.py", "jpg")
TENSORSOCKET = Side("tensorsocket", "TensorSocket around a DataLoader (cv2)", "tensorsocket", "tensorsocket_side.py")

TABLES = {
    PHOTOGRAPHS: (
        BATCHD,
        Side("batchd-off", 'batchd, `cache = "off"`', OURS, "batchd_side.py", "off"),
        SHARDS,
        Side(LIMIT, "limit: bare processes, region decode, nothing delivered", OURS, "bare_side.py", "files"),
        TF_DATA,
        Side("torch-region", "torch DataLoader, batchd's region decode by hand", "torch", "torch_side.py", "region"),
        Side("grain-region", "Grain, batchd's region decode by hand", "grain", "grain_side.py", "region"),
        TORCH_CV2,
        Side("torch-pil", "torch DataLoader, PIL and torchvision's transforms", "torch", "torch_side.py", "pil"),
        Side("grain-cv2", "Grain, cv2", "grain", "grain_side.py", "cv2"),
        DALI,
        FFCV,
        TF_SERVICE,
        Side("spdl", "SPDL, cv2 in threads", "spdl", "spdl_side.py", "cv2"),
        Side("spdl-region", "SPDL, batchd's region decode by hand", "spdl", "spdl_side.py", "region"),
        Side("threads-region", "threads, batchd's region decode by hand", OURS, "threads_side.py", "region"),
        Side("queue", "multiprocessing.Queue, as GeneratorEnqueuer, cv2", OURS, "queue_side.py"),
        Side("ray", "Ray Data, cv2", "ray", "ray_side.py"),
    ),
    RESIZED: (
        BATCHD,
        SHARDS,
        TF_DATA,
        TORCH_CV2,
        DALI,
        FFCV,
        Side("ffcv-half-raw", "FFCV, its file with half of them as raw pixels", "ffcv", "ffcv_side.py", "half-raw"),
    ),
    SHARING: tuple(
        side._replace(name=f"{side.name}-{trainers}", trainers=trainers)
        for side in (BATCHD, TORCH_CV2, TF_SERVICE, TENSORSOCKET)
        for trainers in (1, 2, 4)
    ),
}

OURS_IN = {
    PHOTOGRAPHS: ("batchd",),
    RESIZED: ("batchd", "batchd-shards"),
    SHARING: ("batchd-4",),
}
"""What the others are compared with in a table: the fastest of these.

Untouched photographs count as they are.
"""
TARGETS = (
    Target("off-vs-bare", PHOTOGRAPHS, ("batchd-off",), LIMIT, 0.95),
    Target("vs-tfdata", PHOTOGRAPHS, OURS_IN[PHOTOGRAPHS], "tf-data", 1.35),
    Target("vs-spdl-same-decoder", PHOTOGRAPHS, OURS_IN[PHOTOGRAPHS], "spdl-region", 1.4),
    Target("off-vs-threads-same-decoder", PHOTOGRAPHS, ("batchd-off",), "threads-region", 1.0),
    Target("off-vs-spdl-same-decoder", PHOTOGRAPHS, ("batchd-off",), "spdl-region", 1.15),
    Target("vs-tfdata-shards", PHOTOGRAPHS, ("batchd-shards",), "tf-data", 1.4),
    Target("vs-torch-same-decoder", PHOTOGRAPHS, OURS_IN[PHOTOGRAPHS], "torch-region", 1.5),
    Target("vs-grain-same-decoder", PHOTOGRAPHS, OURS_IN[PHOTOGRAPHS], "grain-region", 1.1),
    Target("vs-torch-cv2", PHOTOGRAPHS, OURS_IN[PHOTOGRAPHS], "torch-cv2", 1.5),
    Target("vs-torch-pil", PHOTOGRAPHS, OURS_IN[PHOTOGRAPHS], "torch-pil", 2.2),
    Target("vs-dali", PHOTOGRAPHS, OURS_IN[PHOTOGRAPHS], "dali", 1.9),
    Target("vs-tfservice", PHOTOGRAPHS, OURS_IN[PHOTOGRAPHS], "tf-service", 2.0),
    Target("vs-tfservice-4-trainers", SHARING, OURS_IN[SHARING], "tf-service-4", 3.5),
    Target("vs-torch-cv2-4-trainers", SHARING, OURS_IN[SHARING], "torch-cv2-4", 7),
    Target("vs-ffcv-resized", RESIZED, OURS_IN[RESIZED], "ffcv", 2.2),
    Target("vs-dali-resized", RESIZED, OURS_IN[RESIZED], "dali", 2.4),
    Target("vs-tfdata-resized", RESIZED, OURS_IN[RESIZED], "tf-data", 1.5),
)
LOADER_PROCESSES = "torch-region", "torch-cv2", "torch-pil", "grain-region", "grain-cv2", "tf-service", "queue", "ray"
"""Peers that decode in other processes than the trainer's, as batchd does."""
LEAST_TARGETS = (
    LeastTarget("pss-vs-spdl-same-decoder", "pss_bytes", ("spdl-region",), 1.5),
    LeastTarget("first-batch-vs-spdl-same-decoder", "first_batch_s", ("spdl-region",), 1.1),
    LeastTarget("first-batch-vs-loader-processes", "first_batch_s", LOADER_PROCESSES, 0.8),
)
