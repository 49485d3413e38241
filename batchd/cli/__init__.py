"""The command line, in the user's shell: one module for each command, loaded when it is called; ``main`` is where it starts."""
