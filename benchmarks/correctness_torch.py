"""The losses of `correctness_losses.py` in PyTorch, and the loop that Hugging Face's documentation has for them.

The loss of a microbatch is divided by the number of accumulation steps, and `backward` adds up the gradients. With
`num_items_in_batch`, as Trainer passes it to models and to `compute_loss_func`, the loss of a microbatch is a sum that
is divided by the number of items of all microbatches, and by nothing else.

For "mean", "masked mean over tokens", "ragged" and "a microbatch without tokens" this loop was compared with Trainer
itself (transformers 5.23, one step of SGD), for token means also with `num_items_in_batch`. The gradients were the
same to 4e-16; for the microbatch without tokens, both are NaN unless `num_items_in_batch` is used.

`Loop.check` compares PyTorch's gradient of the full batch with JAX's, so that both columns are about the same loss.
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import torch
import torch.nn.functional as F
from correctness_losses import CLASSES, FEATURES, Problem

Tree = Any


def predict(params: Tree, batch: Tree) -> torch.Tensor:
    return torch.tanh(batch["x"] @ params["w"] + params["b"]) @ params["v"]


def _errors(outputs: torch.Tensor, batch: Tree) -> torch.Tensor:
    return ((outputs - batch["y"]) ** 2).sum(-1)


def _nll(logits: torch.Tensor, batch: Tree) -> torch.Tensor:
    flat = F.cross_entropy(logits.flatten(0, -2), batch["label"].flatten(), reduction="none")
    return flat.reshape(batch["label"].shape)


def mean(params: Tree, batch: Tree, counts: Tree) -> torch.Tensor:
    return _errors(predict(params, batch), batch).sum() / counts["examples"]


def total(params: Tree, batch: Tree, counts: Tree) -> torch.Tensor:
    return _errors(predict(params, batch), batch).sum()


def masked_mean(params: Tree, batch: Tree, counts: Tree) -> torch.Tensor:
    return (_nll(predict(params, batch), batch) * batch["mask"]).sum() / counts["tokens"]


def two_terms(params: Tree, batch: Tree, counts: Tree) -> torch.Tensor:
    logits = predict(params, batch)
    rating = (logits[:, 0].softmax(-1) * batch["rating"]).sum(-1)
    language = (_nll(logits, batch) * batch["mask"]).sum() / counts["tokens"]
    return language + ((rating - 1) ** 2 * batch["rated"]).sum() / counts["rated"]


def regularised(params: Tree, batch: Tree, counts: Tree) -> torch.Tensor:
    return mean(params, batch, counts) + 0.1 * sum((leaf**2).sum() for leaf in params.values())


def rmse(params: Tree, batch: Tree, counts: Tree) -> torch.Tensor:
    return mean(params, batch, counts).sqrt()


def perplexity(params: Tree, batch: Tree, counts: Tree) -> torch.Tensor:
    return masked_mean(params, batch, counts).exp()


def balanced(params: Tree, batch: Tree, counts: Tree) -> torch.Tensor:
    scores = batch["x"] @ params["w"]
    gates = scores.softmax(-1)
    chosen = F.one_hot(scores.argmax(-1), scores.shape[-1]).to(scores.dtype)
    errors = _errors((gates * chosen) @ params["v"], batch).sum() / counts["examples"]
    return errors + scores.shape[-1] * (chosen.mean(0) * gates.mean(0)).sum()


def dice(params: Tree, batch: Tree, counts: Tree) -> torch.Tensor:
    guessed = predict(params, batch).softmax(-1)
    right = F.one_hot(batch["label"], CLASSES).to(guessed.dtype)
    return 1 - (2 * (guessed * right).sum(0) / (guessed.sum(0) + right.sum(0))).mean()


def _unit(rows: torch.Tensor) -> torch.Tensor:
    return rows / ((rows**2).sum(-1, keepdim=True) + 1e-6).sqrt()


def clip(params: Tree, batch: Tree, counts: Tree) -> torch.Tensor:
    images, texts = _unit(predict(params, batch)), _unit(torch.tanh(batch["text"] @ params["text"]))
    logits = images @ texts.T * params["temperature"].exp()
    target = torch.arange(len(logits))
    return F.cross_entropy(logits, target) / 2 + F.cross_entropy(logits.T, target) / 2


def supervised_contrast(params: Tree, batch: Tree, counts: Tree) -> torch.Tensor:
    rows, label = _unit(predict(params, batch)), batch["label"]
    itself = torch.eye(len(label), dtype=torch.bool)
    logits = rows @ rows.T * 4
    logs = logits - logits.masked_fill(itself, -1e9).logsumexp(1, keepdim=True)
    same = ((label[:, None] == label[None, :]) & ~itself).to(rows.dtype)
    return -((logs * same).sum(1) / same.sum(1).clamp(min=1)).mean()


def cross_correlation(params: Tree, batch: Tree, counts: Tree) -> torch.Tensor:
    def standard(rows: torch.Tensor) -> torch.Tensor:
        return (rows - rows.mean(0)) / (rows.std(0, correction=0) + 1e-3)

    one, two = standard(predict(params, batch)), standard(predict(params, {"x": batch["text"]}))
    one_of_each = torch.eye(CLASSES, dtype=one.dtype)
    return ((one.T @ two / len(one) - one_of_each) ** 2 * (0.1 + 0.9 * one_of_each)).sum()


def ranking(params: Tree, batch: Tree, counts: Tree) -> torch.Tensor:
    score, relevance = predict(params, batch)[:, 0], batch["y"][:, 0]
    ordered = (relevance[:, None] > relevance[None, :]).to(score.dtype)
    return (F.softplus(score[None, :] - score[:, None]) * ordered).sum() / ordered.sum()


def hardest(params: Tree, batch: Tree, counts: Tree) -> torch.Tensor:
    losses = _nll(predict(params, batch), batch)
    return losses.topk(len(losses) // 4).values.mean()


def batch_norm(params: Tree, batch: Tree, counts: Tree) -> torch.Tensor:
    hidden = F.batch_norm(batch["x"] @ params["w"], None, None, training=True, eps=1e-5) + params["b"]
    return _errors(F.relu(hidden) @ params["v"], batch).sum() / counts["examples"]


def dropout(params: Tree, batch: Tree, counts: Tree) -> torch.Tensor:
    hidden = torch.tanh(F.dropout(batch["x"], 0.2) @ params["w"] + params["b"])
    return _errors(F.dropout(hidden, 0.5) @ params["v"], batch).sum() / counts["examples"]


def augmented(params: Tree, batch: Tree, counts: Tree) -> torch.Tensor:
    """PyTorch has no keys: the noise of each example is part of the batch."""
    return mean(params, batch | {"x": batch["x"] + batch["noise"]}, counts)


def two_networks(params: Tree, batch: Tree, counts: Tree) -> torch.Tensor:
    one, two = ({name[2:]: leaf for name, leaf in params.items() if name[0] == digit} for digit in "01")
    return _errors(predict(one, batch) + predict(two, {"x": batch["text"]}), batch).sum() / counts["examples"]


def narrow(params: Tree, batch: Tree, counts: Tree) -> torch.Tensor:
    return mean({name: leaf.to(batch["x"].dtype) for name, leaf in params.items()}, batch, counts)


def tied(params: Tree, batch: Tree, counts: Tree) -> torch.Tensor:
    logits = torch.tanh(params["table"][batch["words"]]) @ params["table"].T
    return _nll(logits, batch).sum() / counts["examples"]


def layers(params: Tree, batch: Tree, counts: Tree) -> torch.Tensor:
    hidden = batch["x"]
    for w, b in zip(params["w"], params["b"], strict=True):
        hidden = hidden + torch.tanh(hidden @ w + b)
    return _errors(hidden @ params["v"], batch).sum() / counts["examples"]


LOSSES: dict[str, Callable[..., torch.Tensor]] = {
    "mean": mean,
    "sum": total,
    "masked mean over tokens": masked_mean,
    "two terms, own denominators": two_terms,
    "mean + L2 of the parameters": regularised,
    "RMSE: root of a mean": rmse,
    "perplexity: exp of a mean": perplexity,
    "mixture of experts, balanced": balanced,
    "dice: ratios of sums": dice,
    "CLIP, in-batch negatives": clip,
    "SupCon": supervised_contrast,
    "Barlow Twins": cross_correlation,
    "pairwise ranking": ranking,
    "hardest quarter of the batch": hardest,
    "BatchNorm in training": batch_norm,
    "dropout, one key for the batch": dropout,
    "noise, a key for each example": augmented,
    "ragged: 29 examples by 4": mean,
    "a microbatch without tokens": masked_mean,
    "gradient of two arguments": two_networks,
    "bfloat16, 1024 microbatches": narrow,
    "tied weights in a jitted loss": tied,
    "layers in lax.scan": layers,
    "masked mean on a mesh of 4": masked_mean,
}


class Loop:
    """A loss of the table in PyTorch, with the data of its problem.

    Args:
      name: the name of the loss.
      problem: its parameters and batch, as JAX has them.
      counts: the denominators of the full batch, as JAX has them.
    """

    def __init__(self, name: str, problem: Problem, counts: Tree) -> None:
        self.loss, self.size = LOSSES[name], problem.size
        batch = dict(problem.batch)
        if "key" in batch:
            draw = jax.vmap(lambda key: jax.random.normal(key, (FEATURES,), batch["x"].dtype))
            batch["noise"] = draw(batch.pop("key"))
        self.leaves, self.structure = jax.tree.flatten(problem.params)
        paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(problem.params)]
        # One argument with a flat tree: names alone. Two arguments: the number of the argument first.
        self.names = [path[-1].key if len(problem.params) == 1 else f"{path[0].idx}_{path[-1].key}" for path in paths]
        self.batch = {name: _tensor(leaf) for name, leaf in batch.items()}
        self.counts = {name: float(count) for name, count in counts.items()}
        self.examples = len(next(iter(self.batch.values())))

    def params(self, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
        """Fresh parameters, without gradients."""
        tensors = [_tensor(leaf) for leaf in self.leaves]
        if dtype is not None:
            tensors = [tensor.to(dtype) for tensor in tensors]
        return {name: tensor.requires_grad_() for name, tensor in zip(self.names, tensors, strict=True)}

    def grads(self, params: dict[str, torch.Tensor]) -> Tree:
        """The gradients that `backward` has left, in the tree that JAX has them in."""
        found = [params[name].grad for name in self.names]
        zeros = [torch.zeros_like(params[name]) for name in self.names]  # PyTorch has None for what a loss does not use
        pairs = zip(found, zeros, strict=True)
        return self.structure.unflatten([(zero if grad is None else grad).double().numpy() for grad, zero in pairs])

    def slices(self, batch: Tree) -> list[Tree]:
        number = len(next(iter(batch.values())))
        starts = range(0, number, self.size)
        return [{name: leaf[start : start + self.size] for name, leaf in batch.items()} for start in starts]

    def own_counts(self, batch: Tree) -> Tree:
        """The denominators of a microbatch."""
        counts = {"examples": float(len(next(iter(batch.values()))))}
        counts |= {"tokens": batch["mask"].sum()} if "mask" in batch else {}
        return counts | ({"rated": batch["rated"].sum()} if "rated" in batch else {})

    def check(self, expected: Tree, tolerance: float) -> None:
        """Raises if PyTorch's gradient of the full batch is not JAX's."""
        params = self.params(torch.float64)
        batch = {name: leaf.double() if leaf.is_floating_point() else leaf for name, leaf in self.batch.items()}
        self.loss(params, batch, self.counts).backward()
        for one, two in zip(*map(jax.tree.leaves, (self.grads(params), expected)), strict=True):
            np.testing.assert_allclose(one, two, rtol=0, atol=max(tolerance, 1e-12) * np.abs(np.asarray(two)).max())

    def unchanged(self) -> Tree:
        """The loss of each microbatch, divided by the number of steps."""
        params, microbatches = self.params(), self.slices(self.batch)
        for microbatch in microbatches:
            loss = self.loss(params, microbatch, self.own_counts(microbatch)) / len(microbatches)
            loss.backward()
        return self.grads(params)

    def items(self) -> Tree:
        """The sum of each microbatch, divided by the counts of all of them: `num_items_in_batch`."""
        params = self.params()
        for microbatch in self.slices(self.batch):
            self.loss(params, microbatch, self.counts).backward()
        return self.grads(params)

    def autocast(self) -> Tree:
        """Parameters in float32, products in bfloat16: mixed precision, as with `bf16=True`."""
        params, microbatches = self.params(torch.float32), self.slices(self.batch)
        for microbatch in microbatches:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = self.loss(params, microbatch, self.own_counts(microbatch)) / len(microbatches)
            loss.backward()
        return self.grads(params)

    def _on_devices(self, of_device: Callable[[Tree, Tree, int], None], devices: int = 4) -> Tree:
        """The mean of the gradients of four devices with a quarter of the batch each."""
        rows, total = self.examples // devices, self.params()
        for device in range(devices):
            mine = {name: leaf[device * rows : (device + 1) * rows] for name, leaf in self.batch.items()}
            params = self.params()
            of_device(params, mine, devices)
            for name, leaf in params.items():
                assert leaf.grad is not None
                share = leaf.grad / devices
                total[name].grad = share if total[name].grad is None else total[name].grad + share
        return self.grads(total)

    def unchanged_on_devices(self) -> Tree:
        """Each device divides by its own tokens and steps."""

        def of_device(params: Tree, batch: Tree, devices: int) -> None:
            microbatches = [{k: v[i : i + self.size // devices] for k, v in batch.items()} for i in self._starts(batch)]
            for microbatch in microbatches:
                (self.loss(params, microbatch, self.own_counts(microbatch)) / len(microbatches)).backward()

        return self._on_devices(of_device)

    def items_on_devices(self) -> Tree:
        """`average_tokens_across_devices`: the count of all devices, times their number, as they are averaged."""

        def of_device(params: Tree, batch: Tree, devices: int) -> None:
            for start in self._starts(batch):
                microbatch = {name: leaf[start : start + self.size // devices] for name, leaf in batch.items()}
                (self.loss(params, microbatch, self.counts) * devices).backward()

        return self._on_devices(of_device)

    def _starts(self, batch: Tree, devices: int = 4) -> range:
        return range(0, len(next(iter(batch.values()))), self.size // devices)

    def dropout(self) -> tuple[Tree, Tree]:
        """The gradients of the loop and of the full batch, each from the same seed."""
        torch.manual_seed(0)
        params = self.params()
        self.loss(params, self.batch, self.counts).backward()
        torch.manual_seed(0)
        return self.unchanged(), self.grads(params)


def _tensor(leaf: Any) -> torch.Tensor:
    if leaf.dtype == jax.numpy.bfloat16:
        return torch.tensor(np.asarray(leaf.astype(jax.numpy.float32))).to(torch.bfloat16)
    return torch.tensor(np.asarray(leaf))
