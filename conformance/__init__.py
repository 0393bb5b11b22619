"""Numerical conformance suite for implementations of DeepSeek-V4.1-Flash.

A port subclasses `Implementation`, overrides the components it has, and is judged by `conformance check`.
"""

from conformance.interface import Description, Implementation, Stateful, Unsupported

__version__ = "0.1.0"
__all__ = ["Description", "Implementation", "Stateful", "Unsupported", "__version__"]
