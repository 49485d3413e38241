"""The steps that give samples of different shapes a place in a batch."""
