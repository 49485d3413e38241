"""The source ``video``: frames of video files."""
