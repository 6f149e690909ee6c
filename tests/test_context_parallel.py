"""techniques/context_parallel.py: what a rank attends to, and how long a sequence may be.

Attention is compared with that of whole sequences by a mask, FLOPs with a count of chunks."""

from types import SimpleNamespace

import pytest
import torch
from conftest import launch, metrics, refused, same_with_gradients, succeed
from test_documents import one_by_one, random_positions
from test_train import as_flags
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import text.batch as batch_py
from config import ParallelConfig
from model import attend, document_mask
from techniques.context_parallel import SharedBatch, own_tokens, share_sequences, whole_sequences
from text.batch import Batch


def shared(
    positions: torch.Tensor | None, rank: int, n: int, T: int = 24, dtype=torch.float64
) -> SharedBatch:
    """What `rank` of n has of three rows with these positions."""
    tokens = torch.arange(3 * T).view(3, T)
    batch = Batch(tokens, tokens + 1, positions, text_bytes=7)
    mesh = SimpleNamespace(get_local_rank=lambda: rank, size=lambda: n)
    parallel = ParallelConfig(replicate=n, cp=n, dtype=dtype)
    world = SimpleNamespace(cp_mesh=mesh, parallel=parallel)
    return share_sequences(batch, world)


@pytest.mark.parametrize("n", [2, 3, 4])
def test_a_rank_attends_by_lengths_to_what_its_tokens_may_see(monkeypatch, n):
    """As on a GPU, for documents with borders anywhere. That it does so by masks is tested in
    test_exact.py."""
    torch.manual_seed(0)
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", one_by_one)
    monkeypatch.setattr(batch_py, "VARLEN_TAKES_GQA", True)
    T = 24  # as in `shared`
    for within in (False, True):
        positions = random_positions(3, T, within)
        float64 = dict(dtype=torch.float64, requires_grad=True)
        q = torch.randn(3, T, 4, 8, **float64)
        k = torch.randn(3, T, 2, 8, **float64)
        v = torch.randn(3, T, 2, 8, **float64)
        parts = []
        for rank in range(n):
            batch = shared(positions, rank, n)
            documents = batch.documents
            size = T // (2 * n)
            masks = [batch.documents_until(end, size) for end in documents.ends]
            documents = documents._replace(masks=masks)
            own_queries = own_tokens(q, rank, n)
            parts.append(documents.attend_to(own_queries, k, v))
        found = whole_sequences(torch.stack(parts))
        mask = document_mask(positions, torch.arange(T), T)
        expected = attend(q, k, v, mask)
        same_with_gradients(found, expected, (q, k, v))


@pytest.mark.parametrize("n", [2, 4])
def test_the_text_of_a_shared_sequence_is_counted_once(n):
    assert sum(shared(None, rank, n).text_bytes for rank in range(n)) == 7


def test_every_rank_attends_to_equally_many_tokens():
    """And to no more than its chunks may see: 2 n + 1 squares of a chunk."""
    T = 48
    n = 4  # ranks
    chunk = T // (2 * n)
    square = 4 * chunk**2 * 3 * 4 * 8  # FLOPs of three rows, and of four heads of width 8
    q, k, v = torch.randn(3, 3, T, 4, 8, dtype=torch.float64)
    positions = torch.arange(T).expand(3, T)
    for rank in range(n):
        batch = shared(positions, rank, n, T=T)
        own_queries = own_tokens(q, rank, n)
        products = sdpa_kernel(SDPBackend.MATH)  # whose operators the counter knows
        with products, FlopCounterMode(display=False) as counted:
            batch.documents.attend_to(own_queries, k, v)
        assert counted.get_total_flops() == (2 * n + 1) * square


@pytest.mark.slow
def test_a_long_sequence_fits_on_four_ranks_and_not_on_one(tmp_path):
    """8,192 tokens, where each process may allocate 800 MB."""
    text, out = tmp_path / "numbers.txt", tmp_path / "run"
    text.write_text("".join(f"{i} and {i + 1} make {2 * i + 1}\n" for i in range(30_000)))
    given = dict(
        model="llama3.2-1b",
        dim=128,
        n_layers=8,
        n_heads=2,
        n_kv_heads=1,
        ffn_dim=512,
        seq_len=8192,
        batch=1,
        data=text,
        tokenizer="bytes",
        steps=2,
        eval_every=0,
        out=out,
    )
    command = "tests/workers/limited_memory.py", 800, "train.py", *as_flags(given)
    alone = launch(*command, timeout=300)
    refused(alone, "out of memory: a step is predicted", "--checkpointing")
    succeed(*command, "--cp=4", "--resume", nproc=4, timeout=600)
    assert [row["step"] for row in metrics(out)] == [1, 2]
