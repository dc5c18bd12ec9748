"""The two ways in which a run is the user's to mend; neither shows a traceback."""


class ConfigError(ValueError):
    """A setting is refused: the message names the key, the value, the rule and what to write instead. Exit code 2."""


class RunError(RuntimeError):
    """A run cannot go on for a reason outside the program; the message says which and what to do. Exit code 1."""
