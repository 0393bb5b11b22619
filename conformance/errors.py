"""The errors that end a run: one clear line for the user, exit code 2."""


class ConformanceError(Exception):
    """The suite could not run: a bad target, fixture or argument.

    The message is a single line that names the file, tensor or argument at fault.
    """


class FixtureError(ConformanceError):
    """A golden set is missing, damaged, or not of the documented format."""


class TargetError(ConformanceError):
    """The implementation under test could not be loaded or described."""
