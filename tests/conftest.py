"""One thread a process, set before torch is imported: on small tensors a pool of threads costs more than it saves."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
