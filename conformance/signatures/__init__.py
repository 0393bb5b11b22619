"""Which known mistake a port's wrong values are the values of.

After a run with failures the reference is asked the same questions with each fault of the catalogue, and with each
deviation, in turn.  Where its answers are the port's, the report says so.
"""

DEFAULT_SECONDS = 20.0
"""Half of what judging the reference at level `core` takes on one core: nobody should wait for an explanation longer
than for the verdict."""
