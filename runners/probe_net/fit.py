"""From measured transfers to a link: rate, window, and what a message of a given size costs. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from polygon.domain.errors import InputError

WINDOW_SHARE = 0.82
"""Part of a socket buffer that carries payload at 80 ms; measured 0.70 at 20, 0.87 at 160 ms (Linux 6.18, iperf3)."""

SATURATED = 0.9
"""Below this part of the best rate a stream count counts as limited by windows, not by the link."""

LEAST_WINDOW = 1 << 14
"""Bytes of the least buffer that Linux begins with (`tcp_wmem`): what fits to less is noise of a short round trip."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamFit:
    """Rate of n streams, as min(link, n * 0.82 * W / RTT)."""

    link_bytes_per_s: float
    """What the link gave with the most streams; a lower bound of the link where `saturated` is False."""
    window_bytes: float | None
    """W, the effective buffer of one stream; None where one stream already filled the link (W is then only bounded)."""
    saturated: bool
    streams_needed: int
    """Least number of streams that reach `SATURATED` of the link by the formula."""

    def bytes_per_s(self, streams: int, rtt_s: float) -> float:
        """Rate of n streams by the formula [bytes/s]."""
        if self.window_bytes is None or rtt_s <= 0:
            return self.link_bytes_per_s
        return min(self.link_bytes_per_s, streams * WINDOW_SHARE * self.window_bytes / rtt_s)


def fit_streams(rtt_s: float, bytes_per_s: Mapping[int, float]) -> StreamFit:
    r"""Fit :math:`b(n) = \min(B, n \cdot 0.82 \, W / RTT)` to rates measured with different numbers of streams.

    B is the best rate seen. W comes from the stream counts below the best one that stayed under `SATURATED` of B, as
    the median of :math:`b(n) RTT / (0.82 n)`; more streams that bring less are not limited by their windows.

    Parameters
    ----------
    rtt_s : float
        Least round trip [s].
    bytes_per_s : mapping of int to float
        Measured rate [bytes/s] by number of streams.
    """
    if not bytes_per_s:
        raise InputError("streams: found no measurement, expected at least one")
    link = max(bytes_per_s.values())
    best = min(n for n, rate in bytes_per_s.items() if rate == link)
    limited = {n: rate for n, rate in bytes_per_s.items() if n < best and rate < SATURATED * link}
    *fewer, most = sorted(bytes_per_s)
    # The best rate is the link's own only where the last streams added did not bring more in proportion.
    saturated = bool(fewer) and bytes_per_s[most] < SATURATED * most / fewer[-1] * bytes_per_s[fewer[-1]]
    windows = [rate * rtt_s / (WINDOW_SHARE * n) for n, rate in limited.items()]
    window = float(np.median(windows)) if windows and np.median(windows) >= LEAST_WINDOW else None
    needed = 1
    if window is not None:
        needed = max(1, int(np.ceil(SATURATED * link * rtt_s / (WINDOW_SHARE * window) - 1e-9)))
    return StreamFit(link_bytes_per_s=link, window_bytes=window, saturated=saturated, streams_needed=needed)


def fit_message(sizes_bytes: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """Latency [s] and rate [bytes/s] of t = latency + bytes / rate, by least squares of the relative error.

    The rate is inf where larger messages took no longer.
    """
    size, time_s = np.asarray(sizes_bytes, float), np.asarray(seconds, float)
    if len(size) < 2 or np.ptp(size) == 0:
        raise InputError(f"messages: found {len(size)} sizes, expected at least two that differ")
    weight = 1 / time_s
    matrix = np.stack([np.ones_like(size), size], axis=1) * weight[:, None]
    (latency_s, per_byte), *_ = np.linalg.lstsq(matrix, time_s * weight, rcond=None)
    return float(max(latency_s, 0.0)), float(1 / per_byte) if per_byte > 0 else float("inf")


def read_iperf3(data: Any, where: str) -> tuple[int, float, float | None]:
    """Streams, rate [bytes/s] and least round trip [s] (None where iperf3 could not see it) of an `iperf3 -J` report.

    Uses `end.sum_received.bits_per_second` (what arrived) and `end.streams[].sender.min_rtt` (microseconds).

    Raises
    ------
    InputError
        Where the file is no iperf3 report, or is the report of a failed run (iperf3's own message is quoted).
    """
    if isinstance(data, dict) and data.get("error"):
        raise InputError(f"{where}: found a failed run ({data['error']}), expected a finished one")
    start = data.get("start") if isinstance(data, dict) else None
    test = start.get("test_start") if isinstance(start, dict) else None
    said = test if isinstance(test, dict) else {}
    for key, option in (("reverse", "--reverse"), ("bidir", "--bidir")):
        if said.get(key):
            raise InputError(f"{where}: found a run with {option}, expected one of each way without it")
    if str(said.get("protocol", "TCP")).upper() != "TCP":
        raise InputError(f"{where}: found a run over {said['protocol']}, expected TCP, which ranks speak")
    try:
        end = data["end"]
        streams = end["streams"]
        rate = float(end["sum_received"]["bits_per_second"]) / 8
        rtts = [stream["sender"]["min_rtt"] for stream in streams if stream.get("sender", {}).get("min_rtt")]
    except (KeyError, TypeError, ValueError):
        raise InputError(f"{where}: found no iperf3 report, expected the output of iperf3 -J (TCP)") from None
    if not streams or rate <= 0:
        raise InputError(f"{where}: found {len(streams)} streams and {rate:g} bytes/s, expected a run that moved data")
    return len(streams), rate, min(rtts) * 1e-6 if rtts else None
