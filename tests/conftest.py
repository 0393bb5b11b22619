"""What every test stands on: threads and signals of the processes that they run in and start."""

from __future__ import annotations

import os
import signal
import threading

# Set before torch is imported: on small tensors a pool of threads costs more than it saves.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell that starts the tests in the background has them ignore interrupts, and so would every process they start.
if threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.default_int_handler)
