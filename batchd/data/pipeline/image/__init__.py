"""The steps on images, and the decoders."""
