"""The errors that end a run: one clear line for the user, exit code 2."""

COULD_NOT_RUN = 2
"""The exit code of a run that was not possible, or is not whole."""


class ConformanceError(Exception):
    """The suite could not run: a bad target, fixture or argument.

    The message is a single line that names the file, tensor or argument at fault.
    """


class FixtureError(ConformanceError):
    """A golden set is missing, damaged, or not of the documented format."""


class TargetError(ConformanceError):
    """The implementation under test could not be loaded or described."""


def printable(text: object) -> str:
    """A text with its control characters spelled out: a target must not command the terminal that shows it."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in str(text))


def in_one_line(error: BaseException) -> str:
    """Type and text of an exception, also of one whose text cannot be had."""
    try:
        text = " ".join(str(error).split())[:300]
    except BaseException:
        text = "an exception without a text"
    return f"{type(error).__name__}: {printable(text)}".encode("utf-8", "backslashreplace").decode("utf-8")
