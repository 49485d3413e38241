"""From the values of a source to one row of a batch. Workers run all of it; the daemon runs ``fields`` and the effects alone.

fields       which fields a batch has, and what is wrong with a list of steps (no cv2: the daemon uses it)
effects      what a step makes of the columns of a sample, on paper; image_effects has the steps on images
execute      the steps of one stream as stages, from the values of a sample into its row
stages       what a stage is
randomness   the random numbers of one sample
probe        what a file says of itself, before a decoder sees it; with exif and png, which it reads
vision       the one place that loads cv2
decode       bytes to pixels; jpeg_box does that for a part of a JPEG, by the extension _jpeg
seekable     JPEGs of which such a part is read alone, by the same extension (`batchd prepare`)
geometry     the steps on paper: boxes, sizes and turns, before any pixel is touched
planners     what each step does there
moves        what is on that paper, done to pixels, and to a mask
recolor      the steps that change what pixels are
followers    mask, boxes and points of an image; mask reads a mask's file
image_stage  all of them together, into the buffer they are given
made         photo-like images for the demo and the benchmarks
errors       what can be wrong with one sample
"""
