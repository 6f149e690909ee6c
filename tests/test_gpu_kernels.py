"""Kernels on one GPU: attention by documents, experts, 8 and 4 bits, the optimizers'.

Each is compared with what the same code computes on the CPU, or with attention by a mask."""

import pytest
import torch
from test_adamw import steps as adamw_steps
from test_adamw import with_bfloat16_moments
from test_context_parallel import shared
from test_documents import random_positions
from test_gpu import DEVICE, LOW, close, needs_gpu
from test_gpu import pytestmark as pytestmark

from lora import LoRA, LoRALinear
from model import attend, document_mask
from techniques.context_parallel import own_tokens
from techniques.experts import GroupedLinear
from techniques.float8 import float8_product, has_float8
from techniques.nf4 import dequantized, quantized
from text.batch import Batch, Documents


def leaves(tensors, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return copies in another dtype, which get gradients."""
    return [tensor.detach().to(dtype).requires_grad_() for tensor in tensors]


def with_gradients(y: torch.Tensor, inputs: list, grad: torch.Tensor) -> tuple:
    """Return y and the gradients of its inputs, given its own."""
    gradients = torch.autograd.grad(y, inputs, grad.to(y))
    return y, *gradients


# ---------------------------------------------------------------------------------- optimizers


def test_moments_in_bfloat16_are_updated_as_on_the_cpu():
    on_cpu = adamw_steps(with_bfloat16_moments)
    on_gpu = adamw_steps(with_bfloat16_moments, device=DEVICE.type)
    torch.testing.assert_close(on_gpu, on_cpu, rtol=1e-10, atol=1e-10)


# --------------------------------------------------------------------- attention by documents


@needs_gpu
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_attention_by_documents_is_attention_by_mask(kv_heads):
    for trial in range(10):
        torch.manual_seed(trial)
        positions = random_positions(3, 200, within=trial % 2 == 0)
        tokens = torch.zeros(3, 200, dtype=torch.int64)
        batch = Batch(tokens, tokens, positions, 0).to(DEVICE)
        mask = document_mask(batch.positions, torch.arange(200, device=DEVICE), 200)
        q = torch.randn(3, 200, 4, 64, device=DEVICE)
        k = torch.randn(3, 200, kv_heads, 64, device=DEVICE)
        v = torch.randn(3, 200, kv_heads, 64, device=DEVICE)
        grad = torch.randn_like(q)
        inputs = leaves((q, k, v), torch.float32)
        out = attend(*inputs, mask)
        by_mask = with_gradients(out, inputs, grad)
        inputs = leaves((q, k, v), LOW)
        out = attend(*inputs, batch.documents)
        by_lengths = with_gradients(out, inputs, grad)
        close(by_lengths, by_mask, 0.02)


@needs_gpu
@pytest.mark.parametrize("packed", [False, True])
def test_shared_sequences_by_lengths_are_those_by_mask(packed):
    """What each of three ranks computes once it has all keys and values."""
    torch.manual_seed(0)
    positions = random_positions(3, 240, within=True) if packed else None
    q = torch.randn(3, 240, 4, 64, device=DEVICE)
    k = torch.randn(3, 240, 2, 64, device=DEVICE)
    v = torch.randn(3, 240, 2, 64, device=DEVICE)
    grad = torch.randn_like(q)
    for rank in range(3):
        own_q = own_tokens(q, rank, 3)
        own_grad = own_tokens(grad, rank, 3)
        results = []
        for dtype in (torch.float32, LOW):
            batch = shared(positions, rank, 3, T=240, dtype=dtype)
            documents = batch.to(DEVICE).documents
            assert isinstance(documents.masks[0], Documents) == (dtype == LOW)
            inputs = leaves((own_q, k, v), dtype)
            out = documents.attend_to(*inputs)
            results.append(with_gradients(out, inputs, own_grad))
        by_mask, by_lengths = results
        close(by_lengths, by_mask, 0.02)


# ------------------------------------------------------------------------------------- experts


COUNTS = [  # rows of each expert
    (40, 0, 100, 3, 57),
    (0, 0, 200, 0, 0),
    (0, 0, 0, 0, 0),
]


@needs_gpu
@pytest.mark.parametrize("F", [384, 6])
@pytest.mark.parametrize("counts", COUNTS)
def test_grouped_products_in_bfloat16_are_those_of_the_cpu(counts, F):
    """Also of experts without rows, whose weights get a gradient of zeros."""
    torch.manual_seed(0)
    rows = sum(counts)
    x = torch.randn(rows, 256, device=DEVICE).to(LOW)
    weight = torch.randn(5, F, 256, device=DEVICE).to(LOW)
    grad = torch.randn(rows, F, device=DEVICE).to(LOW)
    results = []
    for device, dtype in ((DEVICE, LOW), ("cpu", torch.float64)):
        layer = GroupedLinear(5, 256, F, used=1).to(device, dtype)
        layer.weight.data.copy_(weight)
        inputs = x.to(device, dtype).requires_grad_()
        y = layer(inputs, torch.tensor(counts, device=device))
        results.append(with_gradients(y, [inputs, layer.weight], grad))
    for ours, theirs in zip(*results, strict=True):
        assert ours.shape == theirs.shape
        error = (ours.cpu().double() - theirs).norm()
        assert error <= 0.01 * theirs.norm()


# -------------------------------------------------------------------------------- 8 and 4 bits


@needs_gpu
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "mxfp8"])
def test_products_in_8_bits_are_those_of_the_cpu(recipe, compiled):
    """The GPU's products beside those that a CPU emulates: output and both gradients."""
    if not has_float8(torch.device("cuda"), torch.bfloat16, recipe):
        pytest.skip(f"this GPU has no {recipe} products")
    torch.manual_seed(0)
    x = torch.randn(1, 256, 512, dtype=torch.bfloat16)
    weight = torch.randn(384, 512, dtype=torch.bfloat16)
    weight[3] *= 100  # an outlier
    grad = torch.randn(1, 256, 384, dtype=torch.bfloat16)
    inputs = leaves((x.cuda(), weight.cuda()), torch.bfloat16)
    product = torch.compile(float8_product, fullgraph=True) if compiled else float8_product
    y = product(*inputs, recipe)
    on_gpu = with_gradients(y, inputs, grad)
    inputs = leaves((x, weight), torch.bfloat16)
    y = float8_product(*inputs, recipe)
    on_cpu = with_gradients(y, inputs, grad)
    close(on_gpu, on_cpu, 0.01)


@needs_gpu
@pytest.mark.parametrize("dora", [False, True])
def test_a_base_in_4_bits_is_that_of_the_cpu(dora):
    """Codes and numbers bit for bit; output and gradients of a layer, also under autocast."""
    torch.manual_seed(0)
    matrix = torch.randn(384, 512)
    x = torch.randn(2, 64, 512)
    grad = torch.randn(2, 64, 384)
    weight, row_scale = quantized(matrix)
    weight_on_gpu, row_scale_on_gpu = quantized(matrix.cuda())
    assert torch.equal(weight, weight_on_gpu.cpu())
    assert torch.equal(row_scale, row_scale_on_gpu.cpu())
    for dtype in (torch.float32, torch.bfloat16):
        numbers = dequantized(weight, row_scale, dtype)
        numbers_on_gpu = dequantized(weight_on_gpu, row_scale_on_gpu, dtype)
        assert torch.equal(numbers, numbers_on_gpu.cpu())

    linear = torch.nn.Linear(512, 384, bias=False)
    layer = LoRALinear(linear, LoRA(8, dora=dora), bits=4)
    layer.weight.data.copy_(weight)
    layer.row_scale.data.copy_(row_scale)
    for parameter in layer.parameters():
        if parameter.requires_grad:
            parameter.data.uniform_(-1, 1)
    results = {}
    for device in ("cpu", "cuda"):
        layer.to(device)
        trained = [p for p in layer.parameters() if p.requires_grad]
        inputs = x.to(device).requires_grad_()
        with torch.autocast(device, torch.bfloat16):
            y = layer(inputs)
        results[device] = with_gradients(y, [inputs, *trained], grad)
    close(results["cuda"], results["cpu"], 0.02)
