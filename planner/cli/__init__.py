"""The command line: the only layer that knows a terminal."""
