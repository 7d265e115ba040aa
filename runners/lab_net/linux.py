"""The few Linux calls that the lab needs: namespaces, TUN devices, addresses, kernel settings of a namespace.

Everything hangs on open file descriptors: a namespace without a name and a TUN device that is not persistent vanish
with the last process that holds them, so a crash of the lab leaves no namespace behind.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import signal
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from polygon.domain.errors import InputError

INTERFACE = "wan0"
"""The network interface of every lab host."""

VNET_HEADER_BYTES = 10
"""struct virtio_net_hdr before each packet (linux/virtio_net.h)."""

_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000
_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0
_IFF_TUN, _IFF_NO_PI, _IFF_VNET_HDR = 0x0001, 0x1000, 0x4000
_TUN_F_CSUM, _TUN_F_TSO4, _TUN_F_TSO_ECN = 0x01, 0x02, 0x08
_SIOCSIFADDR, _SIOCSIFNETMASK, _SIOCSIFFLAGS, _SIOCGIFFLAGS, _SIOCSIFMTU = 0x8916, 0x891C, 0x8914, 0x8913, 0x8922
_IFF_UP = 0x1
_PR_SET_PDEATHSIG = 1
_SELF_NET = "/proc/thread-self/ns/net"


class LabUnavailableError(OSError):
    """This machine or this user cannot have network namespaces or TUN devices; the message says what is missing."""


def unavailable(error: LabUnavailableError) -> InputError:
    """The message for people when a machine gives no lab."""
    return InputError(
        f"this machine gives no lab: {error}; expected root, or user namespaces "
        "(sysctl -w kernel.unprivileged_userns_clone=1 user.max_user_namespaces=10000) and a /dev/net/tun that the "
        "user may open (chmod 666 /dev/net/tun)"
    )


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise LabUnavailableError(number, f"{what}: {os.strerror(number)}")


def enter_user_namespace() -> None:
    """Become root of a new user namespace with a network namespace of its own (for users without CAP_NET_ADMIN).

    Must be called while the process has one thread, so before numpy is imported.

    Raises
    ------
    LabUnavailableError
        Where the kernel or its settings forbid it, or the process has several threads.
    """
    user, group = os.geteuid(), os.getegid()
    if len(list(Path("/proc/self/task").iterdir())) > 1:
        raise LabUnavailableError("a process with several threads cannot enter a user namespace, start as root")
    _check(_libc().unshare(_CLONE_NEWUSER | _CLONE_NEWNET), "unshare(user and network namespace)")
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"0 {user} 1")
    Path("/proc/self/gid_map").write_text(f"0 {group} 1")


def become_root() -> None:
    """Root of a user namespace, for who is not root: to be called before numpy or torch start threads.

    Raises
    ------
    InputError
        Where this machine gives no lab.
    """
    if os.geteuid() == 0:
        return
    try:
        enter_user_namespace()
    except LabUnavailableError as error:
        raise unavailable(error) from None


def outer_user() -> int:
    """The user's id outside the user namespace that the process is in (the same where it is in none)."""
    user = os.getuid()
    for line in Path("/proc/self/uid_map").read_text().splitlines():
        inner, outer, count = map(int, line.split())
        if inner <= user < inner + count:
            return outer + user - inner
    return user


def open_namespace() -> int:
    """A file descriptor of the network namespace of the calling thread."""
    return os.open(_SELF_NET, os.O_RDONLY | os.O_CLOEXEC)


def end_with_parent() -> None:
    """Have the calling process killed when its parent ends."""
    _libc().prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def move_into(namespace: int) -> None:
    """Move the calling thread, and what it starts, into a network namespace for good."""
    _check(_libc().setns(namespace, _CLONE_NEWNET), "setns")


@contextlib.contextmanager
def inside(namespace: int) -> Iterator[None]:
    """Move the calling thread into a network namespace; processes started inside stay there."""
    home = open_namespace()
    try:
        _check(_libc().setns(namespace, _CLONE_NEWNET), "setns")
        yield
    finally:
        _check(_libc().setns(home, _CLONE_NEWNET), "setns")
        os.close(home)


def new_namespace() -> int:
    """Make a network namespace with its loopback up; returns its file descriptor, the caller's thread stays at home."""
    home = open_namespace()
    try:
        _check(_libc().unshare(_CLONE_NEWNET), "unshare(network namespace)")
        namespace = open_namespace()
        _set_flags_up("lo")
    finally:
        _check(_libc().setns(home, _CLONE_NEWNET), "setns")
        os.close(home)
    return namespace


def _ioctl(request: int, name: str, payload: bytes) -> bytes:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        return fcntl.ioctl(sock, request, struct.pack("16s24s", name.encode(), payload))


def _set_flags_up(name: str) -> None:
    flags = struct.unpack("16xH", _ioctl(_SIOCGIFFLAGS, name, b"")[:18])[0]
    _ioctl(_SIOCSIFFLAGS, name, struct.pack("H", flags | _IFF_UP))


def configure(name: str, address: str, netmask: str, mtu: int) -> None:
    """Give an interface of the calling thread's namespace its address and MTU, and bring it up."""

    def as_sockaddr(text: str) -> bytes:
        return struct.pack("HH4s8x", socket.AF_INET, 0, socket.inet_aton(text))

    _ioctl(_SIOCSIFADDR, name, as_sockaddr(address))
    _ioctl(_SIOCSIFNETMASK, name, as_sockaddr(netmask))
    _ioctl(_SIOCSIFMTU, name, struct.pack("i", mtu))
    _set_flags_up(name)


def open_tun(name: str) -> int:
    """A TUN device of the calling thread's namespace with checksum and segmentation offload.

    Packets are read and written with a virtio_net_hdr before them; TCP arrives in segments of up to 64 KiB, which is
    what lets a relay in Python carry Gbit/s.
    """
    try:
        descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise LabUnavailableError(error.errno, f"/dev/net/tun: {error.strerror}") from error
    fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TUN | _IFF_NO_PI | _IFF_VNET_HDR))
    fcntl.ioctl(descriptor, _TUNSETOFFLOAD, _TUN_F_CSUM | _TUN_F_TSO4 | _TUN_F_TSO_ECN)
    return descriptor


@dataclass(frozen=True, slots=True, kw_only=True)
class TcpSettings:
    """How TCP behaves on the lab's hosts."""

    window_bytes: int = 4 << 20
    """Most bytes a connection buffers: maximum of tcp_wmem (tcp_rmem is twice that). Linux' default: 4 MiB."""
    congestion: str = ""
    """Congestion control; empty: what the kernel chooses."""
    slow_start_after_idle: bool = True
    """Linux' default: after a pause of one retransmission timeout a loss-based sender starts slowly again."""


def available_congestion() -> list[str]:
    """Congestion controls that the kernel offers."""
    return Path("/proc/sys/net/ipv4/tcp_available_congestion_control").read_text().split()


def apply_tcp(settings: TcpSettings) -> None:
    """Write the TCP settings of the calling thread's namespace."""
    base = Path("/proc/sys/net/ipv4")
    # The receive buffer also holds bookkeeping, about half of it is window: it is set twice as large.
    (base / "tcp_rmem").write_text(f"4096 131072 {2 * settings.window_bytes}")
    (base / "tcp_wmem").write_text(f"4096 16384 {settings.window_bytes}")
    (base / "tcp_slow_start_after_idle").write_text(str(int(settings.slow_start_after_idle)))
    if settings.congestion:
        try:
            (base / "tcp_congestion_control").write_text(settings.congestion)
        except PermissionError:
            allowed = (base / "tcp_allowed_congestion_control").read_text().strip()
            raise InputError(
                f"congestion: found {settings.congestion!r}, expected {' or '.join(allowed.split())} (what this host "
                f"allows in namespaces; more with: sysctl -w net.ipv4.tcp_allowed_congestion_control="
                f"'{allowed} {settings.congestion}')"
            ) from None


def missing_capability() -> str | None:
    """What keeps this process from having a lab, tried in a child process; None: nothing does."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        message = b""
        try:
            if os.geteuid() != 0:
                enter_user_namespace()
            with inside(new_namespace()):
                open_tun(INTERFACE)
        except OSError as error:
            message = str(error).encode()
        finally:
            os.write(writer, message)
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        found = pipe.read().decode()
    os.waitpid(child, 0)
    return found or None
