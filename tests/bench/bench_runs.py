"""The device of which nothing is asked."""

from __future__ import annotations

from conformance.bench.devices import Device

DEVICE = Device("cpu", "a device", 1 << 10)
