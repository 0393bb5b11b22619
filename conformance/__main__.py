"""`python -m conformance` is the `conformance` command."""

from conformance.supervision import run

if __name__ == "__main__":
    run()
