"""From the bytes of a file to one row of a batch. Workers run all of it; the daemon runs ``fields`` alone.

fields       which arrays the steps produce, and what is wrong with a list of steps (no cv2: the daemon uses it)
randomness   the random numbers of one sample
probe        what a file says of itself, before a decoder sees it; with exif and png, which it reads
vision       the one place that loads cv2
decode       bytes to pixels
geometry     the steps on paper: boxes, sizes and turns, before any pixel is touched
execute      the steps on pixels, into the buffer they are given
made         photo-like images for the demo and the benchmarks
errors       what can be wrong with one sample
"""
