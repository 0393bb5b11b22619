"""From what the user named to a subject, and what is not timed."""

from __future__ import annotations

from dataclasses import replace

from conformance.adapters.folder import PREFIX as FOLDER_PREFIX
from conformance.adapters.in_process import InProcess
from conformance.adapters.process import PREFIX as PROCESS_PREFIX
from conformance.adapters.target import UPSTREAM_PREFIX, open_target
from conformance.bench import peers
from conformance.bench.devices import Device
from conformance.bench.subjects import Subject, device_as_default
from conformance.errors import TargetError

ARCHITECTURE, INTERPRETED = "architecture", "interpreted"
"""The convention by which a port says that its kernels are interpreted."""
REFERENCE = "reference"


def open_subject(target: str, device: Device, agreed: bool) -> Subject:
    """The subject of a target string, or of the name of a peer.

    Raises:
        TargetError: no such target, or one whose time would not be that of its kernels; one line.
    """
    if target.startswith((PROCESS_PREFIX, FOLDER_PREFIX)):
        what = "process answers through files" if target.startswith(PROCESS_PREFIX) else "folder was filled elsewhere"
        raise TargetError(f"target {target!r}: a {what}: its kernels cannot be timed from here")
    if target in peers.PEERS:
        return peers.PEERS[target](device)
    if target.startswith(UPSTREAM_PREFIX):
        return peers.upstream(target, device, agreed)
    session = open_target(target)
    assert isinstance(session, InProcess)
    description = session.describe()
    architecture = description.conventions.get(ARCHITECTURE, "")
    if architecture == INTERPRETED:
        raise TargetError(
            f"target {target!r}: its kernels are interpreted here, which takes a time that says nothing of them; "
            "--counts shows their bytes and operations"
        )
    if device.kind == "cpu" and architecture.startswith(("sm_", "gfx")):
        raise TargetError(f"target {target!r}: its kernels run on {description.device}, not on a CPU")
    subject = Subject(target, session.implementation, description, device)
    return replace(subject, surroundings=device_as_default(device)) if target == REFERENCE else subject
