"""How ``make profile`` assigns the samples of perf to parts of a worker's work."""

import importlib.util
from collections import Counter
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[3] / "tools" / "profile_worker.py"


@pytest.fixture(scope="module")
def tool():
    """Import the script as a module."""
    spec = importlib.util.spec_from_file_location("profile_worker", TOOL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("frames", "part"),
    [
        ([("decode_mcu", "/b/libjpeg.so.62")], "entropy decoding (libjpeg-turbo)"),
        ([("jsimd_idct_islow_avx2", "/b/libjpeg.so.62")], "inverse DCT (libjpeg-turbo)"),
        ([("jsimd_h2v2_fancy_upsample_avx2", "/b/libjpeg.so.62")], "upsampling, colours (libjpeg-turbo)"),
        ([("jpeg_read_scanlines", "/b/libjpeg.so.62")], "other parts of libjpeg-turbo"),
        ([("splice", "/p/_jpeg.abi3.so")], "cut and splice the bits of the crop"),
        ([("[unknown]", "/p/cv2.abi3.so"), ("PyObject_Call", "/l/libpython3.11.so.1.0")], "flip (OpenCV)"),
        ([("_PyEval_EvalFrameDefault", "/l/libpython3.11.so.1.0")], "Python: headers, plans, calls"),
        ([("filemap_read", "[kernel.kallsyms]"), ("__x64_sys_read", "[kernel.kallsyms]")], "read files (kernel)"),
        (
            [("unix_seqpacket_sendmsg", "[kernel.kallsyms]"), ("__x64_sys_sendmsg", "[kernel.kallsyms]")],
            "messages to the daemon (kernel)",
        ),
        (
            [("clear_page_erms", "[kernel.kallsyms]"), ("asm_exc_page_fault", "[kernel.kallsyms]")],
            "page faults (kernel)",
        ),
        ([("schedule", "[kernel.kallsyms]")], "other work of the kernel"),
        ([("f", "/l/libsomething.so")], "others"),
        ([], "others"),
    ],
)
def test_a_sample_belongs_to_the_part_that_its_stack_names(tool, frames, part) -> None:
    """The innermost known function counts; in the kernel, the system call."""
    stack = "\n".join(f"        7f00{number:04x} {name} ({library})" for number, (name, library) in enumerate(frames))

    assert tool.part_of(stack) == part


def test_parts_are_drawn_by_their_size(tool) -> None:
    """Small parts and unknown functions share one bar, so that the bars add up to the total."""
    parts = tool.parts_by_size(Counter({"others": 9, "a": 300, "b": 690, "c": 1}))

    assert parts == [("b", 0.69), ("a", 0.3), ("others", pytest.approx(0.01))]
