"""Kernels on one GPU: attention by documents, experts, 8 and 4 bits, the optimizers'."""

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
        q, k, v = (torch.randn(3, 200, h, 64, device=DEVICE) for h in (4, kv_heads, kv_heads))
        grad, results = torch.randn_like(q), []
        for dtype in (torch.float32, LOW):
            inputs = [t.to(dtype).requires_grad_() for t in (q, k, v)]
            mask = batch.documents if dtype == LOW else document_mask(batch.positions, 200)
            out = attend(*inputs, mask)
            results.append((out, *torch.autograd.grad(out, inputs, grad.to(dtype))))
        by_mask, by_lengths = results
        close(by_lengths, by_mask, 0.02)


@needs_gpu
@pytest.mark.parametrize("packed", [False, True])
def test_shared_sequences_by_lengths_are_those_by_mask(packed):
    """What each of three ranks computes once it has all keys and values."""
    torch.manual_seed(0)
    positions = random_positions(3, 240, within=True) if packed else None
    q, k, v, grad = (torch.randn(3, 240, h, 64, device=DEVICE) for h in (4, 2, 2, 4))
    for rank in range(3):
        results = []
        for dtype in (torch.float32, LOW):
            documents = shared(positions, rank, 3, T=240, dtype=dtype).to(DEVICE).documents
            assert isinstance(documents.masks[0], Documents) == (dtype == LOW)
            own_q, own_grad = (own_tokens(t, rank, 3).to(dtype) for t in (q, grad))
            inputs = [t.to(dtype).detach().requires_grad_() for t in (own_q, k, v)]
            out = documents.attend_to(*inputs)
            results.append((out, *torch.autograd.grad(out, inputs, own_grad)))
        by_mask, by_lengths = results
        close(by_lengths, by_mask, 0.02)


# ------------------------------------------------------------------------------------- experts


@needs_gpu
@pytest.mark.parametrize("F", [384, 6])
@pytest.mark.parametrize("counts", [(40, 0, 100, 3, 57), (0, 0, 200, 0, 0), (0, 0, 0, 0, 0)])
def test_grouped_products_in_bfloat16_are_those_of_the_cpu(counts, F):
    """Also of experts without rows, whose weights get a gradient of zeros."""
    torch.manual_seed(0)
    shapes = (sum(counts), 256), (5, F, 256), (sum(counts), F)
    x, weight, grad = (torch.randn(*shape, device=DEVICE).to(LOW) for shape in shapes)
    results = []
    for device, dtype in ((DEVICE, LOW), ("cpu", torch.float64)):
        layer = GroupedLinear(5, 256, F, used=1).to(device, dtype)
        layer.weight.data.copy_(weight)
        inputs = x.to(device, dtype).requires_grad_()
        y = layer(inputs, torch.tensor(counts, device=device))
        found = torch.autograd.grad(y, [inputs, layer.weight], grad.to(device, dtype))
        results.append([y, *found])
    for ours, theirs in zip(*results, strict=True):
        error = (ours.cpu().double() - theirs).norm()
        assert ours.shape == theirs.shape and error <= 0.01 * theirs.norm()


# -------------------------------------------------------------------------------- 8 and 4 bits


@needs_gpu
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "mxfp8"])
def test_products_in_8_bits_are_those_of_the_cpu(recipe, compiled):
    """The GPU's products beside those that a CPU emulates: output and both gradients."""
    if not has_float8(torch.device("cuda"), torch.bfloat16, recipe):
        pytest.skip(f"this GPU has no {recipe} products")
    torch.manual_seed(0)
    shapes = (1, 256, 512), (384, 512), (1, 256, 384)
    x, weight, grad = (torch.randn(*shape, dtype=torch.bfloat16) for shape in shapes)
    weight[3] *= 100  # an outlier

    def outputs(device: str, product) -> tuple[torch.Tensor, ...]:
        inputs = [t.to(device).requires_grad_() for t in (x, weight)]
        y = product(*inputs, recipe)
        return y, *torch.autograd.grad(y, inputs, grad.to(device))

    product = torch.compile(float8_product, fullgraph=True) if compiled else float8_product
    close(outputs("cuda", product), outputs("cpu", float8_product), 0.01)


@needs_gpu
@pytest.mark.parametrize("dora", [False, True])
def test_a_base_in_4_bits_is_that_of_the_cpu(dora):
    """Codes and numbers bit for bit; output and gradients of a layer, also under autocast."""
    torch.manual_seed(0)
    matrix, x, grad = (torch.randn(*shape) for shape in ((384, 512), (2, 64, 512), (2, 64, 384)))
    stored = quantized(matrix)
    for on_cpu, on_gpu in zip(stored, quantized(matrix.cuda()), strict=True):
        assert torch.equal(on_cpu, on_gpu.cpu())
    for dtype in (torch.float32, torch.bfloat16):
        numbers = dequantized(*(parameter.cuda() for parameter in stored), dtype)
        assert torch.equal(dequantized(*stored, dtype), numbers.cpu())

    layer = LoRALinear(torch.nn.Linear(512, 384, bias=False), LoRA(8, dora=dora), bits=4)
    with torch.no_grad():
        for parameter, value in zip((layer.weight, layer.row_scale), stored):
            parameter.copy_(value)
        for parameter in layer.parameters():
            if parameter.requires_grad:
                parameter.uniform_(-1, 1)
    results = {}
    for device in ("cpu", "cuda"):
        layer.to(device)
        trained = [p for p in layer.parameters() if p.requires_grad]
        inputs = x.to(device).requires_grad_()
        with torch.autocast(device, torch.bfloat16):
            y = layer(inputs)
        results[device] = y, *torch.autograd.grad(y, [inputs, *trained], grad.to(y))
    close(results["cuda"], results["cpu"], 0.02)
