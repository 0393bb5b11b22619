"""Each component's equations on values with error bounds: what an honest implementation may answer.

Written in numpy float64 from the specification, independently of `reference/`, so that either checks the other.
"""
