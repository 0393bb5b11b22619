"""Commands of the command line, one module each; `conformance/cli.py` registers them."""
