"""The commands, in the user's shell: one module each, loaded when called; see ``main``."""
