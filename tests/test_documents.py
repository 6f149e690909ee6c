"""Attention within packed documents, by a kernel that takes lengths in place of a mask.

The kernel needs a GPU (test_gpu_kernels.py); here it is one of our own, with the same arguments."""

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from workers.train_cases import batch_of

import text.batch as batch_py
from config import ParallelConfig
from model import Llama, LlamaConfig, document_mask
from plumbing.messages import UserError
from runs.changed import check_documents
from techniques.recompute import recompute_and_compile
from text.batch import Batch, Documents

CONFIG = LlamaConfig(64, 2, 4, 2, 64, vocab_size=101)
CPU = torch.device("cpu")


def one_by_one(q, k, v, starts, k_starts, longest, k_longest, *, window_size, enable_gqa):
    """torch.nn.attention.varlen.varlen_attn: each document by itself, whose last query attends to
    all its keys. q [N, H, E]."""
    assert starts.dtype == k_starts.dtype == torch.int32 and window_size == (-1, 0)
    assert enable_gqa == (q.shape[1] != k.shape[1]) and q.dtype == k.dtype == v.dtype
    of_queries, of_keys = (zip(s.tolist(), s.tolist()[1:]) for s in (starts, k_starts))
    rows = []
    for (start, end), (k_start, k_end) in zip(of_queries, of_keys, strict=True):
        queries, keys = end - start, k_end - k_start
        assert queries <= longest and queries <= keys <= k_longest
        mask = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
        parts = q[start:end], k[k_start:k_end], v[k_start:k_end]
        heads = (part.transpose(0, 1) for part in parts)
        out = F.scaled_dot_product_attention(*heads, attn_mask=mask, enable_gqa=enable_gqa)
        rows.append(out.transpose(0, 1))
    return torch.cat(rows)


@pytest.fixture
def with_kernel(monkeypatch):
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", one_by_one)
    monkeypatch.setattr(batch_py, "VARLEN_TAKES_GQA", True)
    kernels = batch_py.DOCUMENT_KERNELS
    widths = dict.fromkeys([("cpu", torch.float64), ("cpu", torch.bfloat16)], range(8, 257, 8))
    monkeypatch.setattr(batch_py, "DOCUMENT_KERNELS", kernels | widths)


def random_positions(B: int, T: int, within: bool) -> torch.Tensor:
    """Documents of 1 to 12 tokens; with `within`, rows begin in the middle of one."""
    rows = []
    for _ in range(B):
        row = torch.arange(int(torch.randint(1, 9, ())), 100)[: int(torch.randint(0, T + 1, ()))]
        row = row if within else row[:0]
        while len(row) < T:
            row = torch.cat([row, torch.arange(int(torch.randint(1, 13, ())))])
        rows.append(row[:T])
    return torch.stack(rows)


def test_lengths_and_mask_say_the_same():
    torch.manual_seed(0)
    for trial in range(300):
        B, T = int(torch.randint(1, 6, ())), int(torch.randint(1, 40, ()))
        positions = random_positions(B, T, within=trial % 3 == 0)
        tokens = torch.zeros(B, T, dtype=torch.int64)
        parts = Batch(tokens, tokens, positions, 0).microbatches(1 + trial % B)
        for part in parts:
            starts, _, longest, _ = part.documents
            assert starts[0] == 0 and starts[-1] == part.tokens.numel()
            pairs = torch.zeros(part.tokens.numel(), part.tokens.numel(), dtype=torch.bool)
            for start, end in zip(starts.tolist(), starts.tolist()[1:]):
                assert 0 <= end - start <= longest <= T
                pairs[start:end, start:end] = torch.ones(end - start, end - start).tril()
            masks = document_mask(part.positions, T)[:, 0].int()
            assert torch.equal(pairs, torch.block_diag(*masks).bool())


def masks_of(model: Llama) -> list:
    """A list that receives the mask of each forward of the first block."""
    masks = []
    model.layers["0"].register_forward_pre_hook(lambda _, given: masks.append(given[3]))
    return masks


@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
def test_attention_by_documents_is_attention_by_mask(with_kernel, checkpointing):
    batch, results = batch_of(packed=True), []
    for documents in (None, batch.documents):
        torch.manual_seed(0)
        (model := Llama(CONFIG).double()).init_weights(1)
        recompute_and_compile(model, checkpointing, False)
        masks = masks_of(model)
        loss = model(*batch.inputs, documents=documents)
        loss.backward()
        assert type(masks[0]) is (Documents if documents else torch.Tensor)
        results.append([loss, *(p.grad for p in model.parameters())])
    for by_mask, by_documents in zip(*results, strict=True):
        torch.testing.assert_close(by_documents, by_mask, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype, head_dim", [(torch.float32, 12), (torch.float64, 6)])
def test_without_a_kernel_there_is_a_mask(with_kernel, dtype, head_dim):
    """For another dtype, or for heads of a width that the kernel does not take. Documents without
    positions are refused."""
    config = replace(CONFIG, dim=4 * head_dim, head_dim=0)
    batch, model = batch_of(packed=True), Llama(config).to(dtype)
    masks = masks_of(model)
    model(batch.tokens, positions=batch.positions, documents=batch.documents)
    assert masks[0].shape == (8, 1, 13, 13)
    with pytest.raises(ValueError, match="cache and documents need positions"):
        model(batch.tokens, documents=batch.documents)


def test_a_mask_and_a_kernel_that_differ_are_refused(with_kernel, monkeypatch):
    """Only where there is a kernel."""
    monkeypatch.setattr(
        "model.document_mask", lambda at, queries: document_mask(at, queries).triu(-256)
    )
    for dtype in (torch.float64, torch.bfloat16, torch.float32):
        world = SimpleNamespace(device=CPU, parallel=ParallelConfig(dtype=dtype), cp_mesh=None)
        refusal = pytest.raises(UserError, match="change both alike")
        with refusal if dtype != torch.float32 else nullcontext():
            check_documents(CONFIG, world)
