"""The GPT of models.py in PyTorch, and its gradient: in microbatches, and clipped per example by Opacus.

    python benchmarks/torch_gpt.py --check          # CPU, seconds: the same loss and gradient as models.py

accumulation.py and clipping.py run this file as a process of its own, so that JAX and PyTorch do not share a device.
It prints one JSON object a line: the device first, then a row for each measurement.

The parameters are float32, and autocast computes in bfloat16. Attention is `scaled_dot_product_attention`, with the
kernel that PyTorch chooses. Memory is the peak that PyTorch's allocator counts during one gradient, without parameters,
batch and gradient: what XLA calls temporaries.

The check copies the parameters of a small model from JAX. Found: in float32 loss and gradient agree to 1e-6; with
bfloat16 arithmetic in both, gradients differ by 0.01 of their norm. Two controls are caught: a model without its causal
mask, and one with another GELU.
"""

import argparse
import contextlib
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional

WARM_UPS = 2


class Norm(nn.LayerNorm):
    """LayerNorm without a bias. Opacus expects one, so it can have a bias of zeros that is not trained."""

    def __init__(self, width: int, zero_bias: bool) -> None:
        super().__init__(width, eps=1e-5, bias=zero_bias)
        if zero_bias:
            self.bias.requires_grad_(False)


class Block(nn.Module):
    """One layer: attention and MLP."""

    causal = True
    gelu = "tanh"  # what `jax.nn.gelu` computes by default

    def __init__(self, width: int, heads: int, zero_bias: bool) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = Norm(width, zero_bias)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.project = nn.Linear(width, width, bias=False)
        self.norm2 = Norm(width, zero_bias)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        shape = (*hidden.shape[:-1], self.heads, hidden.shape[-1] // self.heads)
        q, k, v = (each.view(shape).transpose(1, 2) for each in self.qkv(self.norm1(hidden)).chunk(3, dim=-1))
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        hidden = hidden + self.project(attended.transpose(1, 2).reshape(hidden.shape))
        return hidden + self.down(functional.gelu(self.up(self.norm2(hidden)), approximate=self.gelu))


class GPT(nn.Module):
    """`models.GPT`. Called with inputs and targets, it returns the mean loss of each example.

    Args:
      layers, width, heads, context, vocabulary: as of `models.GPT`.
      tied: whether the last layer shares its weights with the embedding. Opacus' ghost clipping needs False.
      zero_bias: see `Norm`.
    """

    def __init__(
        self,
        layers: int,
        width: int,
        heads: int,
        context: int,
        vocabulary: int,
        tied: bool = True,
        zero_bias: bool = False,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.ModuleList([Block(width, heads, zero_bias) for _ in range(layers)])
        self.norm = Norm(width, zero_bias)
        self.head = nn.Linear(width, vocabulary, bias=False)
        for name, parameter in self.named_parameters():
            if "norm" not in name:
                nn.init.normal_(parameter, std=0.02)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        # Every example has its own row of positions: Opacus computes gradients per row.
        positions = torch.arange(inputs.shape[1], device=inputs.device).expand(inputs.shape).contiguous()
        hidden = self.embedding(inputs) + self.position(positions)
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(self.norm(hidden))
        losses = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        return losses.view(targets.shape).mean(dim=1)


def autocast(device: torch.device) -> Any:
    return torch.autocast(device.type, dtype=torch.bfloat16)


def device_of_run() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def batch_of(examples: int, context: int, vocabulary: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(0, vocabulary, (examples, context + 1), device=device)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def accumulate(
    model: Callable[..., Any], params: list[nn.Parameter], batch: tuple[torch.Tensor, ...], size: int
) -> torch.Tensor:
    """The loss of the batch. Its gradient is added up in `.grad`, microbatch after microbatch."""
    for parameter in params:
        parameter.grad = None
    count = len(batch[0]) // size
    total = torch.zeros((), device=batch[0].device)
    for microbatch in zip(*(leaf.split(size) for leaf in batch), strict=True):
        with autocast(batch[0].device):
            loss = model(*microbatch).mean() / count
        loss.backward()
        total += loss.detach()
    return total


def bytes_of(tensors: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor is not None)


def timed(run: Callable[[], Any], device: torch.device) -> float:
    synchronize(device)
    start = time.perf_counter()
    run()
    synchronize(device)
    return time.perf_counter() - start


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def measure(run: Callable[[], Any], arrays: Callable[[], Any], repeats: int, device: torch.device) -> dict[str, Any]:
    """The figures of a function: its first call, the median of later calls, and its peak beyond `arrays`."""
    first = timed(run, device)
    for _ in range(WARM_UPS - 1):
        run()
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    seconds = [timed(run, device) for _ in range(repeats)]
    peak = torch.cuda.max_memory_allocated() - bytes_of(arrays()) if on_gpu else None
    return {"milliseconds": 1e3 * statistics.median(seconds), "temporaries_bytes": peak, "first_seconds": first}


def accumulation(shape: dict[str, int], examples: int, way: str, sizes: list[int], repeats: int) -> Iterator[dict]:
    """A row for each size of the microbatches, without torch.compile or with it."""
    device = device_of_run()
    with device:
        model = GPT(**shape)
    params = list(model.parameters())
    batch = batch_of(examples, shape["context"], shape["vocabulary"], device)
    for size in sizes:
        if way == "torch.compile":
            torch._dynamo.reset()  # every size is compiled by itself, with the shapes as constants
        program = torch.compile(model, dynamic=False) if way == "torch.compile" else model
        row: dict[str, Any] = {"way": way, "microbatch_size": size, "note": ""}
        try:
            row |= measure(
                lambda program=program, size=size: accumulate(program, params, batch, size),
                lambda: [*params, *batch, *(parameter.grad for parameter in params)],
                repeats,
                device,
            )
        except torch.OutOfMemoryError:
            row["note"] = "out of memory"
        yield row
        release(params)


def release(params: list[nn.Parameter]) -> None:
    for parameter in params:
        parameter.grad = None
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def weighted(examples: int, device: torch.device) -> torch.Tensor:
    """The weights of the examples, between 1/4 and 4, as in clipping.py."""
    return 2.0 ** (4.0 * torch.rand(examples, device=device) - 2.0)


def clipping(shape: dict[str, int], examples: int, ways: list[str], repeats: int) -> Iterator[dict]:
    """Rows of clipped gradients, with their distance from a loop over single examples."""
    device = device_of_run()
    batch = batch_of(examples, shape["context"], shape["vocabulary"], device)
    weights = weighted(examples, device)
    for way in ways:
        # Without hooks, so that one model serves for the reference and, with hooks added, for Opacus.
        with device:
            model = GPT(**shape, tied=way != "opacus_ghost", zero_bias=True)
        params = [parameter for parameter in model.parameters() if parameter.requires_grad]
        note = "embeddings not tied, as ghost clipping needs it" if way == "opacus_ghost" else ""
        row: dict[str, Any] = {"way": way, "microbatch_size": examples, "note": note}
        clip_norm, expected = by_hand(model, params, batch, weights)
        try:
            run, gradient = clipped(way, model, params, batch, weights, clip_norm)
            # Parameters, batch, one gradient, and the reference, which is there only to be compared with.
            arrays = [*params, *batch, weights, *params, *expected]
            row |= measure(run, lambda arrays=arrays: arrays, repeats, device)
            del arrays
            row["difference"], row["worst"] = distance(gradient(), expected)
        except Exception as error:  # such as out of memory: the other rows still count
            row["note"] = f"{type(error).__name__}: {str(error)[:80]}"
        yield row
        release(params)
        del model, params, expected
        gc.collect()


def losses(model: Callable[..., Any], batch: tuple[torch.Tensor, ...], weights: torch.Tensor) -> torch.Tensor:
    with autocast(weights.device):
        return weights * model(*batch)


def by_hand(
    model: nn.Module, params: list[nn.Parameter], batch: tuple[torch.Tensor, ...], weights: torch.Tensor
) -> tuple[float, list[torch.Tensor]]:
    """The median of the norms, and the sum of the gradients clipped to it, by a loop over single examples."""

    def of(example: int) -> tuple[list[torch.Tensor], torch.Tensor]:
        rows = slice(example, example + 1)
        value = losses(model, tuple(leaf[rows] for leaf in batch), weights[rows]).sum()
        grads = torch.autograd.grad(value, params)
        return list(grads), torch.sqrt(sum((leaf**2).sum() for leaf in grads))

    clip_norm = statistics.median(float(of(example)[1]) for example in range(len(weights)))
    total = [torch.zeros_like(parameter) for parameter in params]
    for example in range(len(weights)):
        grads, norm = of(example)
        factor = min(1.0, clip_norm / float(norm))
        total = [old.add_(leaf, alpha=factor) for old, leaf in zip(total, grads, strict=True)]
    return clip_norm, total


def clipped(
    way: str,
    model: nn.Module,
    params: list[nn.Parameter],
    batch: tuple[torch.Tensor, ...],
    weights: torch.Tensor,
    clip_norm: float,
) -> tuple[Callable[[], Any], Callable[[], list[torch.Tensor]]]:
    """A function to measure, and one that returns the gradient which it left behind."""
    if way == "torch_plain":

        def plain() -> None:
            for parameter in params:
                parameter.grad = None
            losses(model, batch, weights).sum().backward()

        return plain, lambda: [parameter.grad for parameter in params]
    from opacus import GradSampleModule
    from opacus.grad_sample import GradSampleModuleFastGradientClipping
    from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPTensorFastGradientClipping

    private = {"noise_multiplier": 0.0, "max_grad_norm": clip_norm, "expected_batch_size": None}
    private["loss_reduction"] = "sum"
    if way == "opacus":
        hooked: Any = GradSampleModule(model, loss_reduction="sum")
        optimizer: Any = DPOptimizer(torch.optim.SGD(params, lr=0.0), **private)

        def run() -> None:
            optimizer.zero_grad(set_to_none=True)
            losses(hooked, batch, weights).sum().backward()
            optimizer.clip_and_accumulate()

        return run, lambda: [parameter.summed_grad for parameter in params]
    hooked = GradSampleModuleFastGradientClipping(
        model, loss_reduction="sum", max_grad_norm=clip_norm, use_ghost_clipping=True
    )
    optimizer = DPOptimizerFastGradientClipping(torch.optim.SGD(params, lr=0.0), **private)

    def ghost() -> None:
        optimizer.zero_grad(set_to_none=True)
        each = losses(hooked, batch, weights)
        DPTensorFastGradientClipping(hooked, optimizer, each, loss_reduction="sum").backward()

    return ghost, lambda: [parameter.grad for parameter in params]


def distance(mine: list[torch.Tensor], its: list[torch.Tensor]) -> tuple[float, float]:
    """The distance of two gradients relative to the norm of the second: of all arrays, and of the worst array."""
    apart = torch.stack([((x - y) ** 2).sum() for x, y in zip(mine, its, strict=True)])
    lengths = torch.stack([(leaf**2).sum() for leaf in its])
    return float((apart.sum() / lengths.sum()).sqrt()), float((apart / lengths).max().sqrt())


def check() -> None:
    """Compares loss and gradient with those of models.py, for the same parameters and batch."""
    from unittest import mock

    import jax
    import models
    import numpy as np

    shape = {"layers": 2, "width": 64, "heads": 4, "context": 32, "vocabulary": 256}
    of_jax = models.GPT(**shape)
    params = of_jax.init(jax.random.key(0))
    # Norms other than 1, so that they are compared too.
    params = jax.tree.map(lambda leaf: leaf * 1.5 if leaf.ndim == 1 else leaf * 4, params)
    batch = of_jax.batch(jax.random.key(1), 8)
    model = GPT(**shape)
    copy_parameters(params, model)
    tokens = tuple(torch.from_numpy(np.array(batch[name], np.int64)) for name in ("inputs", "targets"))
    failed = []
    for name, wide in (("float32", True), ("bfloat16", False)):
        with mock.patch.object(models.jnp, "bfloat16", models.jnp.float32) if wide else contextlib.nullcontext():
            value, grads = jax.value_and_grad(of_jax.loss)(params, batch)
        expected = GPT(**shape)
        copy_parameters(grads, expected)
        for case, changes in (
            ("the same", {}),
            ("control: no causal mask", {"causal": False}),
            ("control: another GELU", {"gelu": "none"}),
        ):
            with contextlib.ExitStack() as stack:
                for attribute, changed in changes.items():
                    stack.enter_context(mock.patch.object(Block, attribute, changed))
                if wide:
                    stack.enter_context(mock.patch.object(sys.modules[__name__], "autocast", contextlib.nullcontext))
                loss = accumulate(model, list(model.parameters()), tokens, 4)
            apart, worst = distance(
                [parameter.grad for parameter in model.parameters()], list(map(torch.detach, expected.parameters()))
            )
            print(
                f"{name:9} {case:26} loss {float(loss):.6f}, JAX {float(value):.6f}; gradients differ by {apart:.1e},"
                f" the worst array by {worst:.1e}"
            )
            close = apart < (1e-5 if wide else 0.03)
            if close != (not changes) and (wide or not changes):  # bfloat16 hides the other GELU
                failed.append(f"{name}, {case}")
    if failed:
        sys.exit(f"not as expected: {'; '.join(failed)}")


def copy_parameters(tree: Any, model: GPT) -> None:
    """Copies a tree of models.GPT into the parameters of a model. Its weights are the transposed ones."""
    import numpy as np

    def put(parameter: nn.Parameter, leaf: Any, transpose: bool = False) -> None:
        array = torch.from_numpy(np.array(leaf, np.float32))
        with torch.no_grad():
            parameter.copy_(array.T if transpose else array)

    put(model.embedding.weight, tree["embedding"])
    put(model.position.weight, tree["position"])
    put(model.norm.weight, tree["norm"])
    for block, leaves in zip(model.blocks, tree["blocks"], strict=True):
        for name in ("norm1", "norm2"):
            put(getattr(block, name).weight, leaves[name])
        for name in ("qkv", "project", "up", "down"):
            put(getattr(block, name).weight, leaves[name], transpose=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare with models.py, on the CPU")
    parser.add_argument("--work", help="what to measure, as JSON; accumulation.py and clipping.py write it")
    options = parser.parse_args()
    if options.check:
        return check()
    if not options.work:
        parser.error("--check or --work is needed")
    torch.manual_seed(0)
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    print(json.dumps({"device": name, "torch": torch.__version__}), flush=True)
    for task in json.loads(options.work):
        measures = {"accumulation": accumulation, "clipping": clipping}[task.pop("kind")]
        labels = task.pop("labels")
        for row in measures(**task):
            print(json.dumps({**labels, **row}), flush=True)


if __name__ == "__main__":
    main()
