"""The step that calls a function of the user's own."""
