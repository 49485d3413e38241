"""The steps that augment images, done to pixels: as a part of an ``ImageStage``. Worker process.

``tone`` changes levels, ``warp`` moves pixels, ``policies`` draws which. Each registers with
``image.recolor.recolor_for``.
"""

from batchd.data.pipeline.augment import policies, tone, warp

__all__ = ["policies", "tone", "warp"]
