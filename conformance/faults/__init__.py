"""Implementations made from the reference by small changes: honest variants that must pass, faults that must not."""
