"""How requests and results look outside this process: JSON, with tensors as paths of safetensors files.

`values` encodes requests and their arguments, `store` writes the tensors of arguments, `results` reads what came back,
`messages` are the lines of a conversation with a process.  The first three serve folders as well.  `docs/protocol.md`
describes the whole for the author of a port; `schemas/` holds the JSON Schemas.
"""

VERSION = 1
"""Raised when a harness written for the version before would be misled; new fields alone do not raise it."""
