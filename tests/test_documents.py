"""Attention within packed documents, by a kernel that takes lengths in place of a mask.

The kernel needs a GPU (test_gpu_kernels.py); here it is one of our own, with the same arguments.
What it computes is compared with attention by model.py's mask."""

import itertools
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import like
from test_chat import BYTES
from torch.utils.flop_counter import FlopCounterMode
from workers.train_cases import batch_of

import text.batch as batch_py
from config import ParallelConfig, Totals
from data import Windows
from model import Attention, Llama, LlamaConfig, document_mask
from plumbing.messages import UserError
from runs import records
from runs.changed import check_documents
from runs.task import Task
from techniques.recompute import recompute_and_compile
from text.batch import Batch, Documents
from text.packing import Packed, Rows

CONFIG = LlamaConfig(64, 2, 4, 2, 64, vocab_size=101)
CPU = torch.device("cpu")


def one_by_one(q, k, v, starts, k_starts, longest, k_longest, *, window_size, enable_gqa):
    """torch.nn.attention.varlen.varlen_attn: each document by itself, whose last query attends to
    all its keys. q [N, H, E]."""
    assert starts.dtype == k_starts.dtype == torch.int32
    assert window_size == (-1, 0)
    assert enable_gqa == (q.shape[1] != k.shape[1])
    assert q.dtype == k.dtype == v.dtype
    of_queries = itertools.pairwise(starts.tolist())
    of_keys = itertools.pairwise(k_starts.tolist())
    rows = []
    for (start, end), (k_start, k_end) in zip(of_queries, of_keys, strict=True):
        queries = end - start
        keys = k_end - k_start
        assert queries <= longest
        assert queries <= keys <= k_longest
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
    widths = range(8, 257, 8)
    ours = {("cpu", torch.float64): widths, ("cpu", torch.bfloat16): widths}
    monkeypatch.setattr(batch_py, "DOCUMENT_KERNELS", batch_py.DOCUMENT_KERNELS | ours)


def random_positions(B: int, T: int, within: bool) -> torch.Tensor:
    """Documents of 1 to 12 tokens; with `within`, rows begin in the middle of one."""

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, ()))

    rows = []
    for _ in range(B):
        before = draw(1, 9)  # tokens of its first document that stand in the row before
        length = draw(0, T + 1)
        row = torch.arange(before, 100)[:length] if within else torch.arange(0)
        while len(row) < T:
            document = torch.arange(draw(1, 13))
            row = torch.cat([row, document])
        rows.append(row[:T])
    return torch.stack(rows)


def test_lengths_and_mask_say_the_same():
    torch.manual_seed(0)
    for trial in range(300):
        B = int(torch.randint(1, 6, ()))
        T = int(torch.randint(1, 40, ()))
        positions = random_positions(B, T, within=trial % 3 == 0)
        tokens = torch.zeros(B, T, dtype=torch.int64)
        batch = Batch(tokens, tokens, positions, 0)
        for part in batch.microbatches(1 + trial % B):
            starts, _, longest, _ = part.documents
            n = part.tokens.numel()
            assert starts[0] == 0
            assert starts[-1] == n
            pairs = torch.zeros(n, n, dtype=torch.bool)
            for start, end in itertools.pairwise(starts.tolist()):
                length = end - start
                assert 0 <= length <= longest <= T
                pairs[start:end, start:end] = torch.ones(length, length).tril()
            masks = document_mask(part.positions, torch.arange(T), T)[:, 0].int()
            assert torch.equal(pairs, torch.block_diag(*masks).bool())


def masks_of(model: Llama) -> list:
    """A list that receives the mask of each forward of the first block."""
    masks = []
    model.layers["0"].register_forward_pre_hook(lambda _, given: masks.append(given[2]))
    return masks


@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
def test_attention_by_documents_is_attention_by_mask(with_kernel, checkpointing):
    batch = batch_of(packed=True)
    results = []
    for documents in (None, batch.documents):
        torch.manual_seed(0)
        model = Llama(CONFIG).double()
        model.init_weights(1)
        recompute_and_compile(model, checkpointing, compile=False)
        masks = masks_of(model)
        loss = model(*batch.inputs, documents=documents)
        loss.backward()
        expected = Documents if documents else torch.Tensor
        assert type(masks[0]) is expected
        results.append([loss, *(p.grad for p in model.parameters())])
    for by_mask, by_documents in zip(*results, strict=True):
        torch.testing.assert_close(by_documents, by_mask, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype, head_dim", [(torch.float32, 16), (torch.float64, 6)])
def test_without_a_kernel_there_is_a_mask(with_kernel, dtype, head_dim):
    """For another dtype, or for heads of a width that the kernel does not take. Documents without
    positions are refused."""
    config = replace(CONFIG, dim=4 * head_dim, head_dim=0)
    batch = batch_of(packed=True)
    model = Llama(config).to(dtype)
    masks = masks_of(model)
    model(batch.tokens, positions=batch.positions, documents=batch.documents)
    assert masks[0].shape == (8, 1, 13, 13)
    with pytest.raises(ValueError, match="cache and documents need positions"):
        model(batch.tokens, documents=batch.documents)


def test_a_mask_and_a_kernel_that_differ_are_refused(with_kernel, monkeypatch):
    """Only where there is a kernel."""

    def within_a_window(positions, slots, S):
        return document_mask(positions, slots, S).triu(-256)

    monkeypatch.setattr("model.document_mask", within_a_window)
    refusal = pytest.raises(UserError, match="change both alike")
    expected = {
        torch.float64: refusal,
        torch.bfloat16: refusal,
        torch.float32: nullcontext(),
    }
    for dtype, outcome in expected.items():
        parallel = ParallelConfig(dtype=dtype)
        world = SimpleNamespace(device=CPU, parallel=parallel, cp_mesh=None)
        with outcome:
            check_documents(CONFIG, world)


def test_dropout_that_a_kernel_lacks_is_refused(with_kernel, monkeypatch):
    """Only where documents are packed, since other rows are attended to without the kernel."""

    def attend(self, q, k, v, mask):
        by_kernel = hasattr(mask, "attention")
        return F.dropout(plain(q, k, v, mask), 0.1, self.training and not by_kernel)

    plain = Attention.attend
    monkeypatch.setattr(Attention, "attend", attend)
    world = SimpleNamespace(device=CPU, parallel=ParallelConfig(dtype=torch.bfloat16), cp_mesh=None)
    check_documents(CONFIG, world)
    with pytest.raises(UserError, match="attend has dropout"):
        check_documents(CONFIG, world, packed=True)


# ------------------------------------------------------------------------------------------ FLOPs


def rows_of(kind: str) -> tuple[Windows | Packed, list[list[int]]]:
    """Return data of three rows, and the texts in them, none of which attends to another."""
    draw = np.random.default_rng(0)
    if kind in ("windows", "documents"):
        tokens = draw.integers(0, 256, 61, dtype=np.uint16)
        tokens[[0, 3, 24, 40, 41]] = BYTES.bos
        windows = Windows([tokens], 20, BYTES, document_mask=kind == "documents")
        borders = [0, 20, 40, 60]
        if kind == "documents":
            borders = [0, 3, 20, 24, 40, 41, 60]
        return windows, [tokens[a:b].tolist() for a, b in itertools.pairwise(borders)]
    samples = []
    for length in (20, 2, 7, 14, 5, 9)[: 3 if kind == "rows" else None]:
        ids = draw.integers(0, 256, length + 1).tolist()
        samples.append((ids, [False] + [True] * length))
    rows = Rows(samples, BYTES) if kind == "rows" else Packed(samples, 23, BYTES)
    assert len(rows) == 3
    return rows, [ids[:-1] for ids, _ in samples]


@pytest.mark.parametrize("kind", ["windows", "documents", "packed", "rows"])
def test_flops_of_a_batch_are_those_of_its_texts(kind):
    """Each by itself in a model, under PyTorch's counter. A window leaves out what is before it."""
    rows, texts = rows_of(kind)
    model = Llama(replace(CONFIG, n_kv_heads=4, vocab_size=BYTES.vocab_size))
    plain = torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)
    with plain, FlopCounterMode(display=False) as counter:
        for ids in texts:
            tokens = torch.tensor([ids])
            model(tokens, targets=tokens).backward()
    expected = counter.get_total_flops()
    batch = rows.batch([0, 1, 2])
    assert 0 < sum(map(len, texts)) <= batch.tokens.numel()

    def sizes(model: Llama) -> list[int]:
        work = SimpleNamespace(model=model)
        return Task(None, None, None, work, None).sizes(batch)

    assert sizes(model) == [batch.text_bytes, sum(map(len, texts)), expected]
    in_windows = Llama(like(model.config, "olmo3", window=6, full_every=2))
    full = Llama(like(model.config, "olmo3", window=64, full_every=2))
    left_out = sum(12 * model.config.q_dim * len(ids) * max(len(ids) - 6, 0) for ids in texts)
    assert sizes(full)[2] - sizes(in_windows)[2] == left_out > 0


def test_mfu_is_of_what_all_ranks_computed(monkeypatch):
    monkeypatch.setattr(records, "note_step", lambda *_: None)
    recorder = SimpleNamespace(
        steps=SimpleNamespace(done=0, last=9),
        world=SimpleNamespace(size=4, device=CPU),
        profiler=None,
        tokens=5,
        peak_flops=1e12,
        step_started=0.0,
    )
    totals = Totals(2.0, 3, 0, tokens=600, flops=8 * 10**12)
    metrics = records.Recorder.measure(recorder, 2, totals, 1e-3, {})
    assert metrics["mfu"] * metrics["seconds"] == pytest.approx(2)  # 8 TFLOPs by 4 TFLOP/s
    assert metrics["tokens_per_second"] * metrics["seconds"] == pytest.approx(600)
    assert metrics["tokens"] == 605
