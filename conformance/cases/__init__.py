"""The catalogue: what is asked of an implementation, and how each answer is judged."""
