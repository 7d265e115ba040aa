"""Measure single operators on this device: `python -m runners.bench_device -o bench.json [--seconds 120]`.

Matrix products in shapes of training, attention, element-wise kernels and copies, what a launch and an eager block
cost the host, one all-reduce between local ranks. Every number is the median of repeated timings after a warm-up (CUDA
events on a GPU). The file is what the planner reads under `--bench` in place of what the architecture is known to
reach. Ctrl-C ends the measurement; what was measured until then is written.
"""

from __future__ import annotations

import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

if __package__ in (None, ""):
    _root = Path(__file__).resolve().parents[1]
    sys.path[0] = str(_root)
    sys.path.insert(1, str(_root / "comm"))

from polygon.commands import cli
from polygon.commands.bench_device import parser
from polygon.domain.bench import AttentionRow, BlockRow, CollectiveRow, DeviceBench, ProductRow, StreamRow
from polygon.domain.errors import InputError
from polygon.domain.model import Model
from polygon.formats.bench_file import bench_data
from polygon.formats.files import write_bench
from polygon.formats.serialization import format_json
from runners.engine.arguments import require_torch
from runners.profile_layers import LayerBench, choose_device, device_name, median, processor_name

if TYPE_CHECKING:
    import torch

SHAPES = (
    (1, 1, 1), (2, 2, 2), (4, 4, 4),  # square
    (8, 1, 1), (2, 1, 1), (2, 3, 1), (4, 3, 1), (4, 4, 1), (2, 4, 1), (4, 1, 4), (1, 1, 4),  # tall: many tokens
    (0.25, 1, 1), (0.25, 4, 1),  # few tokens
    (1, 1, 8), (4, 1, 2),  # a weight's gradient: tokens are the inner dimension
    (2, 12, 1),  # head
    (4, 4, 0.0625), (2, 2, 0.125), (4, 1, 0.25),  # short inner dimension
)  # fmt: skip
"""Rows, columns and inner dimension of the products, over the width."""
RAGGED = ((2, 1, 1, 0, 5), (1, 4, 1, 0, 3), (1, 1, 2, 5, 0), (1, 6, 1, 0, 1))
"""The same for products without alignment: with what is added to the inner dimension and to the columns."""
WIDTHS = (64, 128, 256, 512, 1024, 2048)
GEMM_PART, OPERATORS_PART = 0.4, 0.6
"""Of the seconds asked for: products, and all operators; blocks and the collective get what is left."""
PASSES = 6
"""Over all cases, as many as the sizes are chosen for; more where they are small. One after the other, so that a busy
moment of the machine falls on one timing of many cases and not on all timings of one."""
BLOCK_FLOPS = 3 * 24 * (7 * 3 + 7 * 4)
"""Per token and square of the width, of what the measurement of a block does: three copies, seven passes of forward and
backward with recomputation and seven without."""
AHEAD = 2.0
"""Seconds of the products of a block's forward over those of its launches: blocks show what the device takes for its
operators one after the other, not what the host does."""
COLLECTIVE_S = 10.0
"""Least seconds that must be left for the all-reduce: two processes have to start."""
LEAST_REPEATS, MOST_REPEATS = 3, 30
"""Of the all-reduce."""
SAMPLE_S = {"cpu": 2e-3, "cuda": 5e-3}
"""One timing covers as many calls as take this long, so that clock and events do not count."""
STREAM_ELEMENTS = {"cpu": 2**22, "cuda": 2**28}
"""Of the larger operand of an element-wise kernel: the activations of a micro-batch, beyond most caches."""
COLLECTIVE_BYTES = {"cpu": 16 * 2**20, "cuda": 256 * 2**20}
TINY, HEAD_DIM = 64, 64
"""Width of a block that is nothing but launches; size of the heads of all."""


class OutOfTimeError(Exception):
    """The time is up."""


class StoppedError(Exception):
    """The user wants no more."""


@dataclass(slots=True, kw_only=True)
class BenchWork:
    """A call that is timed, with its timings."""

    call: Callable[[], Any]
    calls: int = 0
    """Back to back in one timing; 0: not warmed up yet."""
    samples_s: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchCase:
    """One row of the file."""

    group: str
    works: tuple[BenchWork, ...]
    row: Callable[..., Any]
    """From the median seconds of each work."""
    tf32: bool = False

    @property
    def measured(self) -> bool:
        """Whether everything in it was timed."""
        return all(work.samples_s for work in self.works)


class Timer:
    """Seconds of a call on one device."""

    def __init__(self, device: torch.device) -> None:
        import torch

        self._device = device
        alone = device.type == "cpu" and torch.get_num_threads() == 1
        self.clock = time.process_time if alone else time.perf_counter
        """One thread is asked for the processor time it had: others on a busy machine are not the device's fault."""

    def sample_s(self, call: Callable[[], Any], calls: int = 1) -> float:
        """Seconds of one of so many calls, back to back."""
        if self._device.type == "cpu":
            start_s = self.clock()
            for _ in range(calls):
                call()
            return (self.clock() - start_s) / calls
        import torch

        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize(self._device)
        first.record()
        for _ in range(calls):
            call()
        last.record()
        last.synchronize()
        return first.elapsed_time(last) / 1e3 / calls

    def visit(self, work: BenchWork) -> None:
        """One more timing; before the first a warm-up, in which libraries choose and load their kernels."""
        least_s = SAMPLE_S[self._device.type]
        if not work.calls:
            work.call()
            work.calls = 1
            for _ in range(2):
                once_s = max(self.sample_s(work.call, work.calls), 1e-7)
                work.calls = max(1, min(20000, round(least_s / once_s)))
        work.samples_s.append(self.sample_s(work.call, work.calls))


def _dtype(precision: str) -> torch.dtype:
    import torch

    return {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]


def _random(shape: Sequence[int], precision: str, device: torch.device) -> torch.Tensor:
    """Normal operands: units that see zeros or constants draw less power and run faster than in training."""
    import torch

    generator = torch.Generator(device).manual_seed(0)
    return torch.randn(tuple(shape), generator=generator, device=device).to(_dtype(precision))


def product_cases(width: int, precision: str, device: torch.device) -> Iterator[BenchCase]:
    """Products of every shape, of views into one piece of memory."""
    import torch

    shapes = [tuple(max(1, int(part * width)) for part in shape) for shape in SHAPES]
    shapes += [(int(r * width), int(c * width) + odd, int(k * width) + more) for r, c, k, more, odd in RAGGED]
    pool = _random((max(r * k + k * c for r, c, k in shapes),), precision, device)
    for rows, columns, inner in shapes:
        a = pool[: rows * inner].view(rows, inner)
        b = pool[rows * inner : rows * inner + inner * columns].view(inner, columns)

        def row(seconds: float, rows: int = rows, columns: int = columns, inner: int = inner) -> ProductRow:
            return ProductRow(precision=precision, rows=rows, columns=columns, inner=inner, seconds=seconds)

        work = BenchWork(call=partial(torch.matmul, a, b))
        yield BenchCase(group="products", works=(work,), row=row, tf32=precision == "tf32")


def attention_cases(tokens: int, heads: int, precision: str, device: torch.device) -> Iterator[BenchCase]:
    """Causal attention over sequences of several lengths, with as many tokens in all."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention as attend

    for seq_len, head_dim in ((tokens // 16, 128), (tokens // 4, 128), (tokens, 128), (tokens // 4, 64)):
        shape = (tokens // seq_len, heads, seq_len, head_dim)
        q, k, v = (_random(shape, precision, device).requires_grad_() for _ in range(3))
        gradient, forward = _random(shape, precision, device), partial(attend, q, k, v, is_causal=True)
        backward = partial(torch.autograd.grad, forward(), (q, k, v), gradient, retain_graph=True)

        def row(forward_s: float, backward_s: float, seq_len: int = seq_len, head_dim: int = head_dim) -> AttentionRow:
            return AttentionRow(
                precision=precision,
                batch=tokens // seq_len,
                heads=heads,
                seq_len=seq_len,
                head_dim=head_dim,
                forward_s=forward_s,
                backward_s=backward_s,
            )

        works = (BenchWork(call=forward), BenchWork(call=backward))
        yield BenchCase(group="attention", works=works, row=row, tf32=precision == "tf32")


def stream_cases(width: int, tokens: int, precision: str, device: torch.device) -> Iterator[BenchCase]:
    """Element-wise kernels of a block and a copy, over as many tokens of one width and over a quarter of them."""
    import torch
    from torch.nn import functional

    for part in (1, 4):
        x, y = (_random((tokens // part, width), precision, device) for _ in range(2))
        moved = x.numel() * x.element_size()
        operations: dict[str, tuple[int, Callable[[], Any]]] = {
            "copy": (2, partial(y.copy_, x)),
            "add": (3, partial(torch.add, x, y)),
            "gelu": (2, partial(functional.gelu, x, approximate="tanh")),
            "layer-norm": (2, partial(functional.layer_norm, x, (width,))),
            "softmax": (2, partial(torch.softmax, x, -1)),
        }
        for name, (streams, call) in operations.items():

            def row(seconds: float, name: str = name, moved_bytes: int = streams * moved) -> StreamRow:
                return StreamRow(precision=precision, operation=name, moved_bytes=moved_bytes, seconds=seconds)

            yield BenchCase(group="streams", works=(BenchWork(call=call),), row=row)


def launch_case(device: torch.device) -> BenchCase:
    """The rate of kernels with nothing to do."""
    one = _random((1,), "fp32", device)
    return BenchCase(group="launch_s", works=(BenchWork(call=lambda: one.add_(1.0)),), row=lambda seconds: seconds)


def block_of(width: int, seq_len: int) -> Model:
    """A model whose block is measured."""
    heads = max(1, width // HEAD_DIM)
    return Model(
        name=f"block-{width}",
        blocks=1,
        hidden_size=width,
        heads=heads,
        kv_heads=heads,
        head_dim=width // heads,
        ffn_size=4 * width,
        vocab_size=64,
        max_seq_len=seq_len,
    )


def block_row(model: Model, micro_batch_size: int, precision: str, device: torch.device, seconds: float) -> BlockRow:
    """Forward and backward of one block, operation by operation; of the smallest on a GPU what the host needs."""
    name, clock = "fp32" if precision == "tf32" else precision, Timer(device).clock
    block = LayerBench(model, "block", 1, device, name, clock=clock)
    with _tf32(precision == "tf32"):
        if model.hidden_size == TINY and device.type != "cpu":
            forward_s, backward_s = block.launches(micro_batch_size, model.max_seq_len, seconds)
        else:
            row = block.measure(micro_batch_size, model.max_seq_len, seconds)
            forward_s, backward_s = row["forward_s"], row["backward_s"]
    return BlockRow(
        precision=precision,
        hidden_size=model.hidden_size,
        heads=model.heads,
        seq_len=model.max_seq_len,
        micro_batch_size=micro_batch_size,
        forward_s=forward_s,
        backward_s=backward_s,
    )


def _rank(rank: int, members: int, backend: str, folder: str, n_bytes: int, seconds: float) -> None:
    """One process of the collective; the first writes its median."""
    import torch
    import torch.distributed as dist

    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=members)
    buffer = torch.ones(n_bytes // 4, device=device)
    torch.set_num_threads(1)
    samples: list[float] = []
    end_s = time.perf_counter() + seconds
    go_on = torch.ones(1, device=device)
    while go_on.item():
        start_s = time.perf_counter()
        dist.all_reduce(buffer)
        if backend == "nccl":
            torch.cuda.synchronize()
        samples.append(time.perf_counter() - start_s)
        buffer.fill_(1.0)
        more = len(samples) <= LEAST_REPEATS or (len(samples) <= MOST_REPEATS and time.perf_counter() < end_s)
        go_on.fill_(float(more))
        dist.broadcast(go_on, 0)  # the first decides for all
    if rank == 0:
        Path(folder, "seconds").write_text(repr(median(samples[1:])))
    dist.destroy_process_group()


def collective_row(device: torch.device, seconds: float) -> CollectiveRow:
    """An all-reduce among the GPUs of this machine, or two processes where it has none or one."""
    import torch
    from torch.multiprocessing import spawn

    many = device.type == "cuda" and torch.cuda.device_count() > 1
    members, backend = (torch.cuda.device_count(), "nccl") if many else (2, "gloo")
    n_bytes = COLLECTIVE_BYTES["cuda" if many else "cpu"]
    with tempfile.TemporaryDirectory() as folder:
        spawn(_rank, args=(members, backend, folder, n_bytes, seconds), nprocs=members)
        measured_s = float(Path(folder, "seconds").read_text())
    return CollectiveRow(backend=backend, members=members, n_bytes=n_bytes, seconds=measured_s)


class Session:
    """Measures until the time is up, and keeps what it has."""

    def __init__(self, bench: DeviceBench, device: torch.device, seconds: float, asked: Callable[[], bool]) -> None:
        self.bench, self.device, self.seconds = bench, device, seconds
        self._asked, self._timer = asked, Timer(device)
        self._start_s = time.perf_counter()
        self._flops: dict[str, float] = {}
        """FLOP/s of a small product by precision, as time passes by."""

    @property
    def spent_s(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self._start_s

    @property
    def _left_s(self) -> float:
        return self.seconds - self.spent_s

    def _width(self, precisions: Sequence[str]) -> int:
        """Of the products: the largest at which all shapes can be measured as often as they should."""
        import torch

        size = 256 if self.device.type == "cpu" else 2048
        for precision in precisions:
            a = _random((size, size), precision, self.device)
            work = BenchWork(call=partial(torch.matmul, a, a))
            with _tf32(precision == "tf32"):
                self._timer.visit(work)
                start_s = time.perf_counter()  # here the time counts that passes by
                for _ in range(LEAST_REPEATS):
                    self._timer.visit(work)
            calls = LEAST_REPEATS * work.calls
            self._flops[precision] = 2.0 * size**3 * calls / (time.perf_counter() - start_s)
        flops = 2.0 * sum(r * c * k for r, c, k, *_ in (*SHAPES, *RAGGED)) * len(precisions)
        most = (GEMM_PART * self.seconds / (PASSES + 2) * min(self._flops.values()) / flops) ** (
            1 / 3
        )  # the first pass is three
        return max([width for width in WIDTHS if width <= most], default=WIDTHS[0])

    def _cases(self, width: int, precisions: Sequence[str]) -> list[BenchCase]:
        cpu = self.device.type == "cpu"
        tokens, heads = (1024, 4) if cpu else (16384, 16)
        cases = [launch_case(self.device)]
        for precision in precisions:
            cases += product_cases(width, precision, self.device)
            cases += attention_cases(tokens, heads, precision, self.device)
            cases += stream_cases(width, STREAM_ELEMENTS[self.device.type] // width, precision, self.device)
        return cases

    def run(self, precisions: Sequence[str], show: Callable[[float, str], None], tell: Callable[[str], None]) -> None:
        """Pass after pass over all operators, the first of them whatever it takes; then blocks, then the collective."""
        width = self._width(precisions)
        cases = self._cases(width, precisions)
        try:
            with suppress(OutOfTimeError):
                for number in count(1):
                    for case in cases:
                        with _tf32(case.tf32):
                            for work in case.works:
                                self._timer.visit(work)
                        self._check_time(OPERATORS_PART if number > 1 else math.inf)
                        show(min(1.0, self.spent_s / self.seconds), f"pass {number}: {case.group}")
                    self._note_clock()
                    if number == 1:
                        tell(f"every operator measured once after {self.spent_s:.0f} s")
        finally:
            self._keep([case for case in cases if case.measured], whole=all(case.measured for case in cases))
            cases.clear()
        self._check_time(1.0)
        seq_len = 256 if self.device.type == "cpu" else 2048
        for size, length, times in ((TINY, 16, 1), (width, seq_len, 1), (width // 2, seq_len, 2), (width, seq_len, 2)):
            for precision in precisions:
                micro_batch_size = times * self._least_sequences(size, length, precision)
                show(min(1.0, self.spent_s / self.seconds), f"a block of width {size} in {precision}")
                if BLOCK_FLOPS * micro_batch_size * length * size**2 / self._flops[precision] > self._left_s:
                    raise OutOfTimeError
                model, each_s = block_of(size, length), 0.01 * self.seconds / len(precisions)
                self._add("blocks", block_row(model, micro_batch_size, precision, self.device, each_s))
                self._check_time(1.0)
        if self._left_s < COLLECTIVE_S:
            raise OutOfTimeError
        show(self.spent_s / self.seconds, "all-reduce")
        self._add("collectives", collective_row(self.device, 0.05 * self.seconds))

    def _least_sequences(self, width: int, seq_len: int, precision: str) -> int:
        """Sequences with which a block of a GPU takes `AHEAD` times as long as its launches: 1, 2, 4 ...; 1 of others.

        From the smallest block, which is measured first and is nothing but launches."""
        host = next((row for row in self.bench.blocks if row.precision == precision), None)
        if self.device.type == "cpu" or host is None:
            return 1
        forward_s = 24 * seq_len * width**2 / self._flops[precision]
        return 2 ** max(0, math.ceil(math.log2(AHEAD * host.forward_s / forward_s)))

    def _keep(self, cases: Sequence[BenchCase], *, whole: bool) -> None:
        """Rows of what was timed."""
        for case in cases:
            row = case.row(*(median(work.samples_s) for work in case.works))
            if case.group == "launch_s":
                self.bench = replace(self.bench, launch_s=row)
            else:
                self._add(case.group, row)
        self.bench = replace(self.bench, complete=whole)

    def _add(self, group: str, row: Any) -> None:
        rows: Any = (*getattr(self.bench, group), row)
        self.bench = replace(self.bench, **{group: rows})

    def _check_time(self, part: float) -> None:
        if self._asked():
            raise StoppedError
        if self.spent_s > part * self.seconds:
            raise OutOfTimeError

    def _note_clock(self) -> None:
        """What the driver says while the device is warm."""
        if self.device.type == "cuda" and self.bench.clock_mhz is None:
            says: dict[str, Any] = driver_says(self.device.index or 0)
            self.bench = replace(self.bench, **says)


@contextmanager
def _tf32(wanted: bool) -> Iterator[None]:
    """Products of fp32 operands in tf32 inside the block, or not."""
    import torch

    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = wanted
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def driver_says(index: int) -> dict[str, float]:
    """Power limit and clock of a GPU, as far as nvidia-smi is there and knows them."""
    command = ["nvidia-smi", "--query-gpu=power.limit,clocks.sm", "--format=csv,noheader,nounits", "-i", str(index)]
    try:
        words = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.split(",")
    except (OSError, subprocess.SubprocessError):
        return {}
    found = {}
    for name, word in zip(("power_limit_w", "clock_mhz"), words, strict=False):
        if word.strip().replace(".", "", 1).isdigit():
            found[name] = float(word)
    return found


def _usual_precisions(device: torch.device) -> list[str]:
    """What training would use: 16 bits on a GPU (bf16 where its units have it), fp32 and bf16 on a CPU."""
    import torch

    if device.type == "cpu":
        return ["fp32", "bf16"]
    old = torch.version.hip is None and torch.cuda.get_device_capability(device) < (8, 0)
    return ["fp16"] if old else ["bf16"]


def main(argv: list[str] | None = None) -> int:
    """The command; raises `InputError` for anything the user can mend."""
    args = parser().parse_args(argv)
    require_torch()
    import torch

    device = choose_device(args.device)
    precisions = args.dtype or _usual_precisions(device)
    if device.type == "cpu":
        if "tf32" in precisions:
            raise InputError("--dtype: found tf32, expected fp32, bf16 or fp16 on a CPU")
        torch.set_num_threads(args.threads)
    cuda = [f"cuda {torch.version.cuda}"] if device.type == "cuda" and torch.version.cuda else []
    talk = cli.Talk(quiet=args.quiet)
    with cli.interruptible() as asked, talk.progress("measuring", 1.0) as show:
        session = Session(
            DeviceBench(
                device=device_name(args.device_name, device),
                measured_on=torch.cuda.get_device_name(device) if device.type == "cuda" else processor_name(),
                threads=args.threads if device.type == "cpu" else None,
                versions=(f"torch {torch.__version__}", *cuda),
                date=args.date,
            ),
            device,
            args.seconds,
            asked,
        )
        try:
            session.run(precisions, show, talk.say)
        except (OutOfTimeError, StoppedError):
            session.bench = replace(session.bench, complete=False)
    bench = session.bench
    for precision in bench.precisions:
        rows = [row for row in bench.products if row.precision == precision]
        best = max(2.0 * row.rows * row.columns * row.inner / row.seconds for row in rows)
        talk.say(f"products in {precision}: {len(rows)} shapes, the fastest {best / 1e12:.3g} TFLOP/s")
    if not bench.products:
        return cli.interrupted(asked)
    if not bench.complete:
        talk.say("not everything was measured (it takes more seconds): the file holds what was")
    if args.out:
        write_bench(args.out, bench)
        talk.say(f"measurements of {bench.device} in {args.out}: use them with --bench {args.out}")
    if args.json or not args.out:
        cli.write(format_json(bench_data(bench)))
    return asked.exit_code if asked() and not bench.complete else cli.EXIT_OK


if __name__ == "__main__":
    sys.exit(cli.run(main))
