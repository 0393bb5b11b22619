"""`conformance bench`: how fast kernels are, of implementations that are right."""
