"""The steps on images, and the decoders.

Beside ``options``, ``effects`` and ``stages``, in the order in which an image passes them:

probe          what a file says of itself, before a decoder sees it; ``containers`` has its parts
geometry       the steps on paper: boxes, sizes and turns, before any pixel is touched
decode         bytes to pixels; ``jpeg_box`` decodes a part of a JPEG, by the extension _jpeg
resample       the moves of that paper, done to pixels
recolor        the steps that change the values of pixels
followers      boxes and points of objects in an image
masks          masks of an image, and of objects in it
opencv         the one place that loads cv2, and the memory of its images

synthetic_images   pictures like photographs, for demo and benchmarks
"""
