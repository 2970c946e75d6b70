"""Bytes that a process has sent over TCP, as the kernel counts them."""

from __future__ import annotations

import os
import socket
import struct

# Offset of tcpi_bytes_acked in Linux's struct tcp_info.
_ACKED = 120


def bytes_sent() -> int:
    """Over all open TCP sockets of this process, acknowledged by the other side. Linux only."""
    total = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            copy = socket.socket(fileno=os.dup(int(name)))
        except OSError:
            # Closed since it was listed.
            continue
        with copy:
            if copy.family in (socket.AF_INET, socket.AF_INET6) and copy.type == socket.SOCK_STREAM:
                total += struct.unpack_from("Q", copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256), _ACKED)[0]
    return total
