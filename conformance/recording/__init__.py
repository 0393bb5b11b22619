"""Recording golden sets from a checkout of the published inference code: `conformance record`."""
