"""parallel.py beside what its docstrings say: what is refused, what stays small, what is told."""

import re
import textwrap
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from conftest import error_lines, launch, slow, step_of, succeed, with_fault
from exact import GROUPED, ODD
from test_train import flags
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from workers.train_cases import initialize

from config import ParallelConfig
from model import Block, Llama, LlamaConfig
from parallel import ddp, fsdp, parallelize, tensor_parallel, with_mesh
from perf import instruments
from perf.instruments import Live, build_on_meta
from plumbing.processes import Process, UserError
from runs.records import describe_mesh
from runs.setup import check_equal_replicas
from techniques import chunked_loss
from techniques.recompute import recompute_and_compile


def test_all_that_it_does():
    """The code in docstrings, on rank 0 of two: of the other one collectives know the part."""
    x, w1, w3, w2 = map(torch.randn, [(3, 4), (6, 4), (6, 4), (4, 6)])
    model = nn.Linear(4, 4, bias=False)

    def cubes(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, w).pow(3).sum()

    def run(function, dist: dict, loss=None, **names) -> dict:
        (code,) = re.findall(r"This is all .*?:\n\n(.*?)\n\n", function.__doc__, re.DOTALL)
        names |= dict(dist=SimpleNamespace(**dist), loss=loss, sequences=x, n=2)
        exec(textwrap.dedent(code), names | dict(torch=torch, silu=F.silu), found := {})
        return found

    w = model.weight.detach()
    gradient = torch.func.grad(cubes)(w, x)  # alike on both ranks
    run(ddp, dict(all_reduce=lambda x: x.mul_(2)), lambda f, x: cubes(f.weight, x), model=model)
    torch.testing.assert_close(model.weight.grad, gradient)
    gather = dict(all_gather_into_tensor=lambda whole, rows: whole.copy_(w))
    scatter = dict(reduce_scatter_tensor=lambda rows, whole: rows.copy_(2 * whole[:2]))
    rows = run(fsdp, gather | scatter, cubes, D=4, lr=0.1, rows=w[:2].clone())["rows"]
    torch.testing.assert_close(rows, (w - 0.1 * gradient)[:2])
    whole, other = (F.linear(F.silu(x @ w1[i:].T) * (x @ w3[i:].T), w2[:, i:]) for i in (0, 3))
    own = dict(x=x, w1=w1[:3], w3=w3[:3], w2=w2[:, :3])
    y = run(tensor_parallel, dict(all_reduce=lambda y: y.add_(other)), **own)["y"]
    torch.testing.assert_close(y, whole)


def test_tensor_parallelism_refuses_what_has_no_place():
    def refuses(name: str, part, remedy: str = "add its layer to PLAN.*OfHeads") -> None:
        model = build_on_meta(LlamaConfig(**GROUPED))
        path = re.sub(r"\.(weight|bias)$", "", name)
        parent, _, attribute = path.rpartition(".")
        setattr(model.get_submodule(parent), attribute, part)
        with pytest.raises(UserError, match=f"--tp cannot shard {name}: {remedy}"):
            tensor_parallel(model, mesh=None)

    with torch.device("meta"):
        refuses("layers.0.attention.v_norm.weight", nn.RMSNorm(10))
        refuses("layers.0.feed_forward.router.weight", nn.Linear(40, 4, bias=False))
        refuses("positions.weight", nn.Embedding(13, 40))
        refuses("layers.0.attention.wo.bias", nn.Linear(40, 40), "each rank would add it to a part")
        parameter, remedy = nn.Parameter(torch.ones(40)), "move it into a module of its own"
        refuses("layers.0.attention.gate", parameter, remedy)
        refuses("scale", parameter, remedy)


def test_what_the_model_was_built_with_is_not_lost_or_replaced():
    mesh = SimpleNamespace(get_local_rank=lambda dim: 0)
    world = SimpleNamespace(parallel=ParallelConfig(), device=torch.device("cpu"), mesh=mesh)
    model = Llama(LlamaConfig(**GROUPED))
    model.layers["0"].attention.register_buffer("slopes", torch.ones(4))
    with pytest.raises(UserError, match=r"attention\.slopes is a buffer, which would lose"):
        parallelize(model, world, initialize)
    model = build_on_meta(LlamaConfig(**GROUPED))
    model.layers["0"].attention.wv.weight = model.layers["0"].attention.wk.weight
    with pytest.raises(UserError, match=r"layers\.0\.attention\.wv\.weight is shared"):
        parallelize(model, world, initialize)
    smoothed = Llama(LlamaConfig(**GROUPED))
    smoothed.loss = lambda hidden, weight, targets, *_: hidden.sum()
    with pytest.raises(UserError, match=r"not another model\.loss: change loss_of"):
        tensor_parallel(smoothed, mesh=None)


@pytest.mark.parametrize("parallel", ["--dp=hsdp", slow("--dp=diloco --every=5")])
def test_nodes_with_unequal_numbers_of_ranks_agree_on_a_mesh(corpus, tmp_path, parallel):
    """Of 2, 1 and 1 ranks no two share a node everywhere. If they did not agree they would wait for
    each other; so they compare their meshes before."""
    nodes = dict(nodes=[2, 1, 1], timeout=60)
    command = "train.py", *flags(corpus, out := tmp_path / "run"), *parallel.split()
    assert "mesh: 4 replicate;" in succeed(*command, **nodes).out
    if parallel == "--dp=hsdp":
        scored = "evaluate.py", out, "--data", corpus, "--dp=hsdp", "--dtype=float64"
        assert succeed(*scored, **nodes).out == succeed(*scored).out
        sizes = "--model=tiny --batch=4 --seq-len=32 --repeats=1".split()
        succeed("bench.py", "compare", "hsdp", *sizes, **nodes)
        own = with_fault(tmp_path / "copy", "processes", "math.gcd(*per_node)", "here")
        differ = launch(*own, *command, "--resume", "--steps=6", **nodes)
        told = "error: the models or their meshes differ between rank 0 and rank "
        lines = error_lines(differ)
        assert all(line.startswith(told) for line in lines) and differ.codes == [2] * 4
        assert len(lines) == 3  # one on each node


def test_replicas_that_begin_differently_are_refused():
    model = Llama(LlamaConfig(**GROUPED))
    parallel = ParallelConfig(dp="hsdp", replicate=2, shard=2)
    for norms, codes, differs in (  # of a base in 4 bits, sums of codes
        ([1.0, 2.0, 1.0, 2.0], [5, 6, 5, 6], None),
        ([1.0, 2.0, 1.0, 2.1], [5, 6, 5, 6], 3),
        ([1.0, 2.0, 1.0, 2.0], [5, 6, 4, 6], 2),
    ):
        rows = torch.tensor([norms, codes]).T
        world = SimpleNamespace(parallel=parallel, all_gather_scalars=lambda _, rows=rows: rows)
        told = rf"ranks \[{differs}\] begin with other weights"
        with pytest.raises(UserError, match=told) if differs else nullcontext():
            check_equal_replicas(model, world)


@pytest.mark.parametrize(
    "sizes, inner, outer",
    [
        (dict(replicate=2, shard=2), "shard", "replicate"),
        (dict(shard=2, tp=2), "tp", "shard"),
    ],
)
def test_neighbours_share_what_talks_most(sizes, inner, outer):
    """As seen from rank 0: tp and shard lie within a node, replicate goes across."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    process = Process(0, 4, local_rank=0, per_node=4, device=torch.device("cpu"))
    world = with_mesh(process, ParallelConfig("hsdp", **sizes))
    groups = f"{inner} groups (0 1) (2 3); {outer} groups (0 2) (1 3)"
    assert describe_mesh(world) == f"mesh: 2 {outer} x 2 {inner}; {groups}"
    assert [world.mesh[dim].mesh.tolist() for dim in (inner, outer)] == [[0, 1], [0, 2]]
    dist.destroy_process_group()


class Largest(Live):
    """Its peak is the number of elements of the largest tensor."""

    def _count_tensors(self, values) -> None:
        whole = (v for v in values if isinstance(v, torch.Tensor) and not isinstance(v, DTensor))
        self.peak = max(self.peak, *(tensor.numel() for tensor in whole), 0)


def test_no_rank_holds_the_logits_of_all_tokens_or_of_the_whole_vocabulary(monkeypatch):
    """Of two ranks the first has the larger part of the vocabulary."""
    monkeypatch.setattr(chunked_loss, "LOSS_CHUNK", 56)
    monkeypatch.setattr(instruments, "Live", Largest)
    model = build_on_meta(LlamaConfig(16, 1, 2, 2, 32, vocab_size=997))
    _, held = instruments.emulate(step_of(model, ParallelConfig(tp=2), 8, 1, 14))
    assert held["peak"] == 56 * 499


def test_a_wrapped_block_is_not_wrapped_again():
    """By us, whether it is compiled or a block of one's own, or by somebody else."""
    for compiled in (False, True):
        model = Llama(LlamaConfig(**ODD))
        model.layers["0"] = type("OwnBlock", (Block,), {})(model.config, 0)
        recompute_and_compile(model, "full", compiled)
        with pytest.raises(UserError, match="block 0 is wrapped already"):
            recompute_and_compile(model, "selective", False)
    wrapped = Llama(LlamaConfig(**ODD))
    wrapped.layers["1"] = checkpoint_wrapper(wrapped.layers["1"])
    with pytest.raises(UserError, match="block 1 is wrapped already"):
        recompute_and_compile(wrapped, "none", False)


@pytest.mark.slow
def test_many_collectives_at_once_do_not_crash():
    """With gloo's own two threads for each group, most runs crash within seconds."""
    succeed("tests/workers/many_collectives.py", 20)
