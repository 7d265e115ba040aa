"""Tokens split over a tensor-parallel group: the whole model's loss and gradients, and less kept for backward."""

from dataclasses import replace

import pytest
import torch
from polygon_comm.accelerator import Accelerator
from polygon_comm.tensor_group import TensorGroup
from polygon_comm.transport import gloo_devices
from torch import distributed

from runners.engine.layers import build_layers, layer_name, shard_dim
from tests.patience import PATIENCE_S
from tests.real_ranks import run_ranks
from tests.small_problems import small_model

TOKENS, ROWS = 16, 3
GPT = small_model(max_seq_len=TOKENS, heads=4, kv_heads=4)
LLAMA = replace(GPT, family="llama", kv_heads=2, gated_mlp=True, rms_norm=True, learned_positions=False)
MODELS = {
    "biases and learned positions": GPT,
    "a vocabulary that is not cut": replace(GPT, vocab_size=GPT.vocab_size + 1, tied_embeddings=False),
    "gates and grouped heads": LLAMA,
    "one key head for two ranks": replace(LLAMA, kv_heads=1, qkv_bias=True),
    "experts": replace(LLAMA, experts=4, experts_per_token=2, expert_ffn_size=32, shared_experts=1),
}


def drawn(model):
    ids = torch.randint(model.vocab_size, (ROWS, TOKENS + 1), generator=torch.Generator().manual_seed(1))
    return ids[:, :-1], ids[:, 1:]


def forward(layers, model, ids, targets):
    x = ids
    for layer in range(model.layers - 1):
        x = layers[str(layer)](x)
    return layers[str(model.layers - 1)](x, targets)


def tensor_group(rank, port):
    store = distributed.TCPStore("127.0.0.1", port, 2, rank == 0)
    devices = gloo_devices(1, "127.0.0.1")
    return TensorGroup(store, rank, 2, devices=devices, timeout_s=PATIENCE_S, accelerator=Accelerator())


def differences(rank, port, precision):
    """Of every model: relative difference of the loss, and the largest of a gradient, from the whole model's."""
    found, group = {}, tensor_group(rank, port)
    for name, model in MODELS.items():
        layers = build_layers(model, range(model.layers), 0, tp=group, by_tokens=True)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16"):
            loss = forward(layers, model, *drawn(model))
        loss.backward()
        whole = build_layers(model, range(model.layers), 0)
        expected = forward(whole, model, *drawn(model))
        expected.backward()
        off = []
        for (key, parameter), wanted in zip(layers.named_parameters(), whole.parameters(), strict=True):
            if key.endswith("key.bias"):
                continue  # it changes no attention: its gradient is rounding alone
            layer, _, part = key.partition(".")
            dim = shard_dim(model, f"{layer_name(model, int(layer))}.{part}", 2)
            gradient = parameter.grad if dim is None else group.gather(parameter.grad, dim)
            off.append(float((gradient - wanted.grad).norm() / wanted.grad.norm()))
        found[name] = abs(loss.item() / expected.item() - 1), max(off)
    return found


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-5), ("bf16", 0.05)])
def test_loss_and_gradients_are_those_of_the_whole_model(precision, tolerance):
    """Norms, biases, positions, routers, cut and whole vocabularies: every gradient on both ranks."""
    for found in run_ranks(differences, 2, precision):
        assert found.keys() == MODELS.keys()
        for name, (loss, gradient) in found.items():
            # Which expert a token goes to turns with the rounding of 16 bits.
            assert loss < tolerance / 10 and (gradient < tolerance or (name, precision) == ("experts", "bf16"))


def kept_bytes(rank, port, by_tokens):
    """Bytes that a block keeps for backward, but for its parameters."""
    model = replace(LLAMA, heads=2, kv_heads=2, head_dim=32)
    group = tensor_group(rank, port)
    block = build_layers(model, [1], 0, tp=group, by_tokens=by_tokens)["1"]
    x = torch.randn(ROWS, TOKENS // (2 if by_tokens else 1), model.hidden_size, requires_grad=True)
    parameters = {parameter.untyped_storage().data_ptr() for parameter in block.parameters()}
    saved = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = block(x)
    out.sum().backward()
    return sum(n_bytes for place, n_bytes in saved.items() if place not in parameters)


def test_what_lies_between_the_products_is_kept_once():
    """Two ranks split what norms and residual sums keep, and do not keep the gathered inputs of products.

    By hand: the inputs of two norms, of each the values before and after its weight, and a factor a token.
    """
    [whole, _], [split, _] = (run_ranks(kept_bytes, 2, by_tokens) for by_tokens in (False, True))
    tokens = ROWS * TOKENS * 4
    assert whole - split == ((2 + 2 * 2) * LLAMA.hidden_size + 2) * tokens // 2
