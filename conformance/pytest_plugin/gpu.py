"""One GPU a worker: two workers on one device would share its memory, and the others would idle."""

from __future__ import annotations

import os
import re

VISIBLE = "CUDA_VISIBLE_DEVICES"


def give_worker_its_gpu(worker: str) -> None:
    """Narrow this process to one of the devices that it sees; `worker` is pytest-xdist's name, such as "gw3".

    Must be called before the target is imported: a process that has begun to use a device keeps its view of them.
    """
    devices = visible_devices()
    number = re.search(r"[0-9]+$", worker)
    if len(devices) > 1 and number is not None:
        os.environ[VISIBLE] = devices[int(number[0]) % len(devices)]


def visible_devices() -> list[str]:
    """The devices of this process, as `CUDA_VISIBLE_DEVICES` names them."""
    chosen = os.environ.get(VISIBLE)
    if chosen is not None:
        return [name.strip() for name in chosen.split(",") if name.strip()]
    import torch

    # Counts through the driver's management library, without a context on any device.
    return [str(index) for index in range(torch.cuda.device_count())]
