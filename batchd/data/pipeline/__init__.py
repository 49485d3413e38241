"""From the values of a source to one row of a batch. Workers run all of it; the daemon the effects.

options        what all steps have in common, and the steps of all families
effects        what a step makes of the columns of a sample, on paper
sample_fields  the fields of a batch, and the mistakes in a list of steps
step_files     the files that steps read
cache_split    where a cache of decoded samples divides the steps
stages         what a stage is: one or several steps in a worker
execute        the steps of one stream as stages, from the values of a sample into its row
randomness     the random numbers of one sample; ``timings`` the time of its parts

Each family is a folder with ``options``, ``effects`` and ``stages``. ``image`` has more, in the
order in which an image passes them:

probe          what a file says of itself, before a decoder sees it; ``containers`` has its parts
geometry       the steps on paper: boxes, sizes and turns, before any pixel is touched
decode         bytes to pixels; ``jpeg_box`` decodes a part of a JPEG, by the extension _jpeg
resample       the moves of that paper, done to pixels
recolor        the steps that change the values of pixels
followers      mask, boxes and points of an image
augment.tone   the steps that change levels; ``augment.warp`` those that move pixels anywhere;
               ``augment.policies`` those that draw such changes
opencv         the one place that loads cv2, and the memory of its images
"""
