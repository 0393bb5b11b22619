"""Implementations that come with the suite, behind its own interface, and transports for those of others."""
