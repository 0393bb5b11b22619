"""Numerical conformance suite for implementations of DeepSeek-V4.1-Flash."""

__version__ = "0.1.0"
