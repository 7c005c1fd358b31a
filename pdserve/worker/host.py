"""Which machine this is, as far as processes that want to share its memory are concerned."""

import os
import socket
from contextlib import suppress
from pathlib import Path


def host_identity() -> str:
    """Equal for processes that run under one kernel and in one network namespace (so that they reach each other's Unix
    sockets), different for all others: the host's name, the boot's id and the namespace's, as far as they are known."""
    parts = [socket.gethostname()]
    with suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip())
        parts.append(os.readlink("/proc/self/ns/net"))
    return " ".join(parts)
