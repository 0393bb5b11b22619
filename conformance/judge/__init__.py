"""Judging: values with error bounds, the six modes of comparison, and each component's equations with bounds."""
