"""Small traces as the PyTorch Profiler writes them on a GPU: launches on the host, kernels on streams."""

import itertools
import json

COMPUTE_STREAM, COMMUNICATION_STREAM = 7, 20
MAIN_THREAD = 100


def _launch(kernel, correlation):
    """The host's call that starts a kernel, a little before it."""
    return {
        "ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 1, "tid": MAIN_THREAD,
        "ts": kernel["ts"] - 2, "dur": 1, "args": {"correlation": correlation, "External id": correlation},
    }  # fmt: skip


def gpu_trace(rank, world_size, kernels, step_borders_us, annotations=()):
    """Trace of one rank.

    Kernels are (stream, name, start_us, duration_us[, arguments]), annotations (name, start_us, duration_us).
    """
    events = []
    for number, (start_us, end_us) in enumerate(itertools.pairwise(step_borders_us)):
        events.append(
            {"ph": "X", "cat": "user_annotation", "name": f"ProfilerStep#{number + 1}", "pid": 1, "tid": MAIN_THREAD,
             "ts": start_us, "dur": end_us - start_us, "args": {"External id": 0}}
        )  # fmt: skip
    for name, start_us, duration_us in annotations:
        for cat, pid, tid in (("user_annotation", 1, MAIN_THREAD), ("gpu_user_annotation", 0, COMPUTE_STREAM)):
            events.append({"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid, "ts": start_us,
                           "dur": duration_us, "args": {}})  # fmt: skip
    for correlation, (stream, name, start_us, duration_us, *more) in enumerate(kernels, start=1):
        cat = "gpu_memcpy" if name.startswith("Memcpy") else "kernel"
        arguments = {"device": 0, "stream": stream, "correlation": correlation, "External id": correlation}
        kernel = {"ph": "X", "cat": cat, "name": name, "pid": 0, "tid": stream, "ts": start_us, "dur": duration_us,
                  "args": arguments | (more[0] if more else {})}  # fmt: skip
        events += [_launch(kernel, correlation), kernel]
    return {
        "schemaVersion": 1,
        "deviceProperties": [{"id": 0, "name": "a small GPU", "totalGlobalMem": 1 << 30}],
        "distributedInfo": {"backend": "nccl", "rank": rank, "world_size": world_size},
        "host_name": "host",
        "baseTimeNanoseconds": 0,
        "displayTimeUnit": "ms",
        "traceEvents": events,
    }


def two_ranks():
    """Two ranks, two steps of 1000 us each, by hand; rank 1 has its communication quite hidden."""
    gemm, reduce = "sm80_xmma_gemm_f32f32_tn", "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevComm*, ulong)"
    size = {"Collective name": "allreduce", "In msg nelems": 250000, "Out msg nelems": 250000, "dtype": "Float",
            "Group size": 2}  # fmt: skip
    traces = []
    for rank, reduce_start_us in ((0, 500), (1, 300)):
        kernels = []
        for base in (1000, 2000):
            kernels += [
                (COMPUTE_STREAM, "Memcpy HtoD (Pageable -> Device)", base, 50),
                (COMPUTE_STREAM, gemm, base + 100, 500),
                (COMMUNICATION_STREAM, reduce, base + reduce_start_us, 300, size),
                (COMPUTE_STREAM, "multi_tensor_apply_kernel<adam>", base + 850, 100),
            ]
        traces.append(gpu_trace(rank, 2, kernels, (1000, 2000, 3000)))
    return traces


def write_traces(folder, traces):
    """One file a rank, named as people name them; the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for trace in traces:
        path = folder / f"rank{trace['distributedInfo']['rank']}_trace.json"
        path.write_text(json.dumps(trace))
    return folder
