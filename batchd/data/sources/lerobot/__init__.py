"""The source ``lerobot``: frames of robots' episodes, with windows of time around them."""
