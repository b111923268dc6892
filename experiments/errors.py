"""The error that means: what was asked for cannot be done, and here is what can."""


class UsageError(ValueError):
    """A request that cannot be met, told in one line: the thing, and what would be right.

    ``python -m experiments`` prints the message and leaves with exit code 2; a traceback would
    only hide it. Faults of the program itself are other exceptions and keep their traceback.
    """
