"""Measure what layers cost on this device: `python -m runners.profile_layers MODEL -o profile.json`.

Per kind of layer (embedding, block, moe, head), micro-batch size and tensor-parallel degree: seconds of forward,
backward, backward with recomputation and optimizer update, and bytes of weights and kept activations. A degree above 1
is measured by the shapes that one rank of the group holds; its communication is not part of the profile. The file is
what the planner reads in place of its device model (docs/lab.md).

A rank that waits for a message before a pass begins it with cold caches (`--pause`): on a busy machine a small layer's
forward then takes a fifth longer, a head's three times as long.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if __package__ in (None, ""):
    _root = Path(__file__).resolve().parents[1]
    sys.path[0] = str(_root)
    sys.path.insert(1, str(_root / "comm"))

from polygon.commands import cli
from polygon.domain.errors import InputError, require
from polygon.domain.model import Model
from polygon.formats.files import check_writable, make_folder, read_model, write_json
from polygon.formats.serialization import format_json
from runners.engine.arguments import require_torch

if TYPE_CHECKING:
    import torch
    from torch import nn

STACK = 3
"""Blocks run one after the other in one measurement: as in a stage, each finds the caches full of the others' data."""
WARM_UPS = 2
LEAST_REPEATS, MOST_REPEATS = 5, 40
PRECISIONS = ("fp32", "bf16", "fp16")


def shard(model: Model, tp: int) -> Model:
    """The shapes that one of `tp` devices holds: heads, feed-forward width and vocabulary divided.

    Raises
    ------
    InputError
        Where they cannot be divided evenly (key-value heads are repeated when there are fewer than devices).
    """
    sizes = {"heads": model.heads, "ffn_size": model.ffn_size}
    if model.experts:
        sizes["expert_ffn_size"] = model.expert_ffn_size
    for name, size in sizes.items():
        if size % tp:
            raise InputError(f"--tp: found {tp}, expected a divisor of {name} = {size}")
    kv_heads = model.kv_heads // tp if model.kv_heads % tp == 0 else 1
    vocabulary = -(-model.vocab_size // tp) if model.family != "vit" else model.vocab_size
    changed: dict[str, Any] = {name: size // tp for name, size in sizes.items()}
    return replace(model, kv_heads=kv_heads, vocab_size=vocabulary, **changed)


def _kinds(model: Model) -> dict[str, int]:
    """A layer of every kind that the model has."""
    found: dict[str, int] = {}
    for layer in range(model.layers):
        found.setdefault(model.layer_kind(layer), layer)
    return found


def _inputs(model: Model, kind: str, size: int, seq_len: int, dtype: torch.dtype, device: torch.device) -> tuple:
    """What a layer of that kind takes, made up."""
    import torch

    generator = torch.Generator().manual_seed(0)
    if kind == "embedding":
        if model.family == "vit":
            image = (size, model.channels, model.image_size, model.image_size)
            return (torch.randn(image, generator=generator).to(device),)
        return (torch.randint(model.vocab_size, (size, seq_len), generator=generator).to(device),)
    hidden = torch.randn((size, seq_len, model.hidden_size), generator=generator).to(device, dtype).requires_grad_()
    if kind != "head":
        return (hidden,)
    shape = (size,) if model.family == "vit" else (size, seq_len)
    return hidden, torch.randint(model.vocab_size, shape, generator=generator).to(device)


def kept_bytes(forward: Callable[[], torch.Tensor], parameters: Sequence[torch.Tensor]) -> int:
    """Bytes that a forward pass keeps for its backward, weights left out; a storage that is kept twice counts once."""
    from torch.autograd.graph import saved_tensors_hooks

    weights = {parameter.untyped_storage().data_ptr() for parameter in parameters}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        output = forward()  # kept alive while counting, so that no address is used twice
    del output
    return sum(kept.values())


class Stopwatch:
    """Seconds of a piece of work on a device, by some clock."""

    def __init__(self, device: torch.device, clock: Callable[[], float] = time.perf_counter) -> None:
        self._device, self._clock = device, clock

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            import torch

            torch.cuda.synchronize(self._device)

    def time_s(self, work: Callable[[], Any]) -> tuple[float, Any]:
        """Seconds that the work takes, and its result."""
        self._synchronize()
        start_s = self._clock()
        result = work()
        self._synchronize()
        return self._clock() - start_s, result


def median(values: Sequence[float]) -> float:
    """The middle one, of an even number the later."""
    ordered = sorted(values)
    return ordered[len(ordered) // 2]


class LayerBench:
    """One kind of layer with the shapes of one rank, ready to be timed."""

    def __init__(
        self,
        model: Model,
        kind: str,
        layer: int,
        device: torch.device,
        precision: str,
        pause_s: float = 0.0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        import torch

        from runners.engine.gradients import Bucket
        from runners.engine.layers import build_layer
        from runners.engine.narrow_weights import NarrowWeights

        self.model, self.kind, self.device = model, kind, device
        self._pause_s = pause_s
        self.copies = STACK if kind.startswith(("block", "moe")) else 1
        self.dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
        self.modules: list[nn.Module] = [build_layer(model, layer, copy, device) for copy in range(self.copies)]
        self.parameters = [p for module in self.modules for p in module.parameters()]
        buckets = [Bucket(f"{n}", dict(module.named_parameters()), None) for n, module in enumerate(self.modules)]
        self._narrow = NarrowWeights(self.modules, buckets, self.dtype)
        self._watch = Stopwatch(device, clock)
        self._optimizer = torch.optim.AdamW(self.parameters)

    def _forward(self, inputs: tuple, recompute: bool) -> torch.Tensor:
        import torch
        from torch.utils.checkpoint import checkpoint

        x, rest = inputs[0], inputs[1:]
        with torch.autocast(self.device.type, dtype=self.dtype, enabled=self.dtype != torch.float32):
            for module in self.modules:
                x = checkpoint(module, x, *rest, use_reentrant=False) if recompute else module(x, *rest)
                x = x if self.kind == "head" else x.to(self.dtype)
        return x

    def _pause(self) -> None:
        if self._pause_s:
            time.sleep(self._pause_s)

    def _pass(self, inputs: tuple, gradient: torch.Tensor | None, recompute: bool) -> tuple[float, float]:
        self._pause()
        forward_s, output = self._watch.time_s(lambda: self._forward(inputs, recompute))
        self._pause()
        backward_s, _ = self._watch.time_s(lambda: output.backward(gradient))
        return forward_s, backward_s

    def _update(self) -> None:
        """The optimizer's step, and the weights in 16 bits for the next one."""
        self._optimizer.step()
        self._narrow.fill()

    def measure(self, size: int, seq_len: int, seconds: float) -> dict[str, Any]:
        """One row of the profile. Weights in 16 bits are made once, as in a step of several micro-batches."""
        with self._narrow.in_place():
            return self._measure(size, seq_len, seconds)

    def _measure(self, size: int, seq_len: int, seconds: float) -> dict[str, Any]:
        import torch

        inputs = _inputs(self.model, self.kind, size, seq_len, self.dtype, self.device)
        with torch.no_grad():
            shape = self._forward(inputs, False)
        gradient = None if self.kind == "head" else torch.randn_like(shape)
        passes = {recompute: self._repeat(inputs, gradient, recompute, seconds) for recompute in (False, True)}
        if self.kind == "embedding":
            passes[True] = passes[False]  # nothing is kept, nothing to recompute
        updates = [self._watch.time_s(self._update)[0] for _ in range(WARM_UPS + LEAST_REPEATS)][WARM_UPS:]
        weights = [*self.parameters, *self._narrow.leaves]
        kept = kept_bytes(lambda: self._forward(inputs, False), weights)
        row = {
            "kind": self.kind,
            "micro_batch_size": size,
            "forward_s": passes[False][0] / self.copies,
            "backward_s": passes[False][1] / self.copies,
            "backward_recompute_s": passes[True][1] / self.copies,
            "update_s": median(updates) / self.copies,
            "parameters": sum(p.numel() for p in self.parameters) // self.copies,
            "activation_bytes": kept / self.copies,
            "spread": passes[False][2],
        }
        if self.device.type == "cuda":
            row["peak_bytes"] = self._peak_bytes(inputs, gradient) / self.copies
        return row

    def launches(self, size: int, seq_len: int, seconds: float) -> tuple[float, float]:
        """Median seconds in which the host launches forward and backward of one layer; the device is never far behind.

        One pass follows another, and 16-bit weights are cast once, as in a step of several micro-batches.
        """
        import torch

        inputs = _inputs(self.model, self.kind, size, seq_len, self.dtype, self.device)
        forwards: list[float] = []
        backwards: list[float] = []
        with self._narrow.in_place():
            gradient = torch.ones_like(self._forward(inputs, False))
            end_s = time.perf_counter() + seconds
            while len(forwards) < WARM_UPS + LEAST_REPEATS or time.perf_counter() < end_s:
                start_s = time.perf_counter()
                output = self._forward(inputs, False)
                forward_s = time.perf_counter()
                output.backward(gradient)
                forwards.append(forward_s - start_s)
                backwards.append(time.perf_counter() - forward_s)
        passed = slice(WARM_UPS, None)
        return median(forwards[passed]) / self.copies, median(backwards[passed]) / self.copies

    def _repeat(
        self, inputs: tuple, gradient: torch.Tensor | None, recompute: bool, seconds: float
    ) -> tuple[float, float, float]:
        """Median forward and backward, and the half width of the middle half of their sums over the median."""
        for _ in range(WARM_UPS):
            self._pass(inputs, gradient, recompute)
        forwards: list[float] = []
        backwards: list[float] = []
        end_s = time.perf_counter() + seconds
        while len(forwards) < LEAST_REPEATS or (len(forwards) < MOST_REPEATS and time.perf_counter() < end_s):
            forward_s, backward_s = self._pass(inputs, gradient, recompute)
            forwards.append(forward_s)
            backwards.append(backward_s)
        sums = sorted(f + b for f, b in zip(forwards, backwards, strict=True))
        quarter = len(sums) // 4
        spread = (sums[-1 - quarter] - sums[quarter]) / 2 / median(sums)
        return median(forwards), median(backwards), spread

    def _peak_bytes(self, inputs: tuple, gradient: torch.Tensor | None) -> float:
        import torch

        before = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        self._pass(inputs, gradient, False)
        return float(torch.cuda.max_memory_allocated(self.device) - before)


def profile_layers(
    model: Model,
    *,
    seq_len: int,
    precision: str,
    sizes: Sequence[int],
    degrees: Sequence[int],
    device: torch.device,
    seconds: float,
    pause_s: float,
    say: Callable[[str], None],
) -> Iterator[dict[str, Any]]:
    """Rows of a profile, as they come: every kind of layer at every micro-batch size and tensor-parallel degree.

    Stops growing the micro-batch of a kind where the device's memory ends.
    """
    import torch

    for tp in degrees:
        part = shard(model, tp)
        for kind, layer in _kinds(part).items():
            bench: LayerBench | None = None
            for size in sizes:
                try:
                    bench = bench or LayerBench(part, kind, layer, device, precision, pause_s)
                    row = bench.measure(size, seq_len, seconds)
                except torch.OutOfMemoryError:
                    say(f"{kind}, tp {tp}, micro-batch {size}: out of memory; larger ones are left out")
                    break
                yield {**row, "tp": tp}
                say(
                    f"{kind}, tp {tp}, micro-batch {size}: forward {1e3 * row['forward_s']:.3f} ms, backward "
                    f"{1e3 * row['backward_s']:.3f} ms (+-{100 * row['spread']:.0f} %), "
                    f"keeps {row['activation_bytes'] / 1e6:.2f} MB"
                )
            del bench
            if device.type == "cuda":
                torch.cuda.empty_cache()


def choose_device(name: str) -> torch.device:
    """The device of `--device`: a GPU where torch sees one, unless the user wants the CPU."""
    import torch

    if name == "cuda" and not torch.cuda.is_available():
        raise InputError("--device: found 'cuda', expected cpu (torch sees no GPU here)")
    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def _parser() -> argparse.ArgumentParser:
    parser = cli.ProgramParser("profile_layers", __doc__)
    positive = cli.number(above=0)
    parser.add_argument("models", nargs="+", metavar="MODEL", help="name in the catalogue, or a model file")
    parser.add_argument("--seq-len", type=cli.whole(1), help=cli.SEQ_LEN_HELP)
    parser.add_argument("--precision", default="bf16", choices=PRECISIONS)
    parser.add_argument(
        "--micro-batch-sizes", type=cli.whole_numbers(1), default=[1, 2, 4, 8], help="1,2,4,8 if not given"
    )
    parser.add_argument(
        "--tp",
        type=cli.whole_numbers(1),
        default=[1],
        help="tensor-parallel degrees whose shapes are measured (default: 1)",
    )
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--device-name", help="type in the cluster file (default: this GPU's, or cpu-core)")
    parser.add_argument("--threads", type=cli.whole(1), default=1, help="on a CPU: threads of one rank (default: 1)")
    parser.add_argument("--seconds", type=positive, default=0.5, help="per measurement (default: 0.5)")
    parser.add_argument(
        "--pause", type=cli.number(at_least=0), default=0.0, metavar="SECONDS",
        help="before every pass, as the ranks of a pipeline wait for messages (default: none)",
    )  # fmt: skip
    parser.add_argument("-o", "--out", help="profile file; of several models a folder that gets MODEL.json each")
    parser.add_argument("--json", action="store_true", help="the profiles on stdout")
    return parser


def device_name(given: str | None, device: torch.device) -> str:
    """Name of the device type: as the catalogue has it where it has it."""
    import torch

    from polygon.formats import catalogue

    name = given or (torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu-core")
    try:
        return catalogue.device(name).name
    except InputError:
        if given:
            return given
        raise InputError(
            f"--device-name: found nothing and {name!r} in no catalogue, expected the cluster file's name"
        ) from None


def _profile(model: Model, args: argparse.Namespace, device: torch.device, name: str) -> dict[str, Any]:
    """The file's content for one model."""
    import torch

    longest = min(model.max_seq_len, cli.LONGEST_DEFAULT)
    seq_len = model.tokens_per_image if model.family == "vit" else args.seq_len or longest
    most = model.max_seq_len if model.learned_positions and model.family != "vit" else seq_len
    require(seq_len <= most, "--seq-len", seq_len, f"at most {most}, the positions that {model.name} has learned")
    rows: list[dict[str, Any]] = []
    measured = profile_layers(
        model,
        seq_len=seq_len,
        precision=args.precision,
        sizes=args.micro_batch_sizes,
        degrees=args.tp,
        device=device,
        seconds=args.seconds,
        pause_s=args.pause,
        say=lambda text: print(f"{model.name}: {text}", file=sys.stderr),  # noqa: T201
    )
    complete = False
    with suppress(KeyboardInterrupt):  # what was measured is kept: other kinds of layers keep the device model
        for row in measured:
            rows.append(row)
        complete = True
    return {
        "format": "polygon-layer-profile",
        "version": 1,
        "complete": complete,
        "device": name,
        "model": model.name,
        "hidden_size": model.hidden_size,
        "seq_len": seq_len,
        "precision": args.precision,
        "measured_on": torch.cuda.get_device_name(device) if device.type == "cuda" else processor_name(),
        "torch": torch.__version__,
        "threads": args.threads if device.type == "cpu" else None,
        "pause_s": args.pause,
        "layers": rows,
    }


def processor_name() -> str:
    """Name of the CPU."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return "CPU"
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "CPU")


def main(argv: Sequence[str] | None = None) -> int:
    """The command; raises `InputError` for anything the user can mend."""
    args = _parser().parse_args(argv)
    require_torch()
    models = [read_model(name) for name in args.models]
    for model in models:
        for tp in args.tp:
            shard(model, tp)
    if args.out:
        check_writable(args.out) if len(models) == 1 else make_folder(args.out)
    import torch

    device = choose_device(args.device)
    name = device_name(args.device_name, device)
    if device.type == "cpu":
        torch.set_num_threads(args.threads)
    with cli.interrupted_by_signals() as asked:
        for model in models:
            profile = _profile(model, args, device, name)
            if not profile["complete"] and not profile["layers"]:
                return cli.interrupted(asked)
            _hand_over(profile, args, alone=len(models) == 1)
            if not profile["complete"]:
                print("interrupted: the file holds what was measured", file=sys.stderr)  # noqa: T201
                return asked.exit_code
    return cli.EXIT_OK


def _hand_over(profile: dict[str, Any], args: argparse.Namespace, *, alone: bool) -> None:
    """Write a profile where it goes."""
    if args.out:
        # A session on a rented GPU may end early: what is measured is written at once.
        write_json(args.out if alone else Path(args.out) / f"{profile['model']}.json", profile)
    if args.json or not args.out:
        sys.stdout.write(format_json(profile))


if __name__ == "__main__":
    sys.exit(cli.run(main))
