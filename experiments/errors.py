"""The error of invalid requests."""


class UsageError(ValueError):
    """An invalid request; the message is one line with the cause and the correction.

    ``python -m experiments`` prints the message, without a traceback, and exits with code 2. Bugs
    in the program raise other exceptions, with their traceback.
    """
