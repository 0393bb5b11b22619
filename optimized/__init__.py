"""Optimised Triton implementation: one module a component, the same names and signatures as `reference`."""
