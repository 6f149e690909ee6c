"""parallel.py: the code in its docstrings computes what plain PyTorch does.

What cannot be split is refused. Schedules hold and wait as the formulas here say. Offloading moves
the inputs of blocks, and no weights."""

import re
import textwrap
import xml.etree.ElementTree as ET
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from conftest import changed_copy, error_lines, launch, refused, slow, step_of, succeed, with_fault
from exact import GROUPED, ODD, assert_same, assert_traffic, case, train
from test_train import flags
from torch import nn
from torch._inductor.utils import run_and_get_code
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.testing._internal.distributed.fake_pg import FakeStore
from workers.train_cases import initialize

from config import ParallelConfig
from model import Block, Llama, LlamaConfig
from parallel import ddp, fsdp, parallelize, tensor_parallel, with_mesh
from perf.instruments import build_on_meta, emulate
from plumbing.messages import UserError
from plumbing.processes import Process
from runs.records import describe_mesh
from runs.setup import check_equal_replicas
from techniques import async_tp, offload, schedules, timelines
from techniques.chunked_loss import LOSS_CHUNK
from techniques.offload import offload_activations
from techniques.pipeline import stages_of
from techniques.recompute import recompute_and_compile
from techniques.schedules import SCHEDULES, check_schedule, make_schedule, read_schedule

CPU = torch.device("cpu")
CONFIG = LlamaConfig(**GROUPED)


def test_code_in_docstrings_computes_what_pytorch_does():
    """On rank 0 of two: of the other one collectives know the part."""
    x = torch.randn(3, 4)
    w1 = torch.randn(6, 4)
    w3 = torch.randn(6, 4)
    w2 = torch.randn(4, 6)
    model = nn.Linear(4, 4, bias=False)

    def cubes(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, w).pow(3).sum()

    def run(function, dist: dict, loss=None, **names) -> dict:
        (code,) = re.findall(r"This is all .*?:\n\n(.*?)\n\n", function.__doc__, re.DOTALL)
        names |= dict(
            dist=SimpleNamespace(**dist),
            loss=loss,
            sequences=x,
            n=2,
            torch=torch,
            silu=F.silu,
        )
        found = {}
        exec(textwrap.dedent(code), names, found)
        return found

    w = model.weight.detach()
    gradient = torch.func.grad(cubes)(w, x)  # alike on both ranks
    reduce = dict(all_reduce=lambda x: x.mul_(2))
    run(ddp, reduce, lambda model, x: cubes(model.weight, x), model=model)
    torch.testing.assert_close(model.weight.grad, gradient)

    collectives = dict(
        all_gather_into_tensor=lambda whole, rows: whole.copy_(w),
        reduce_scatter_tensor=lambda rows, whole: rows.copy_(2 * whole[:2]),
    )
    found = run(fsdp, collectives, cubes, D=4, lr=0.1, rows=w[:2].clone())
    expected = w - 0.1 * gradient
    torch.testing.assert_close(found["rows"], expected[:2])

    gated = F.silu(x @ w1.T) * (x @ w3.T)
    of_other_rank = gated[:, 3:] @ w2[:, 3:].T
    reduce = dict(all_reduce=lambda y: y.add_(of_other_rank))
    found = run(tensor_parallel, reduce, x=x, w1=w1[:3], w3=w3[:3], w2=w2[:, :3])
    torch.testing.assert_close(found["y"], gated @ w2.T)


def test_tensor_parallelism_refuses_what_has_no_place():
    def refuses(name: str, part, remedy: str = "add its layer to PLAN.*OfHeads") -> None:
        model = build_on_meta(CONFIG)
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
    world = SimpleNamespace(parallel=ParallelConfig(), device=CPU, mesh=mesh)
    model = Llama(CONFIG)
    model.layers["0"].attention.register_buffer("slopes", torch.ones(4))
    with pytest.raises(UserError, match=r"attention\.slopes is a buffer, which would lose"):
        parallelize(model, world, initialize)
    model = build_on_meta(CONFIG)
    attention = model.layers["0"].attention
    attention.wv.weight = attention.wk.weight
    with pytest.raises(UserError, match=r"layers\.0\.attention\.wv\.weight is shared"):
        parallelize(model, world, initialize)
    smoothed = Llama(CONFIG)
    smoothed.loss = lambda hidden, weight, targets, *_: hidden.sum()
    with pytest.raises(UserError, match=r"not another model\.loss: change loss_of"):
        tensor_parallel(smoothed, mesh=None)


def test_nodes_with_unequal_numbers_of_ranks_agree_on_a_mesh(corpus, tmp_path):
    """Of 2, 1 and 1 ranks no two share a node everywhere. If they did not agree they would wait for
    each other; so they compare their meshes before."""
    nodes = dict(nodes=[2, 1, 1], timeout=60)
    command = "train.py", *flags(corpus, tmp_path / "run"), "--dp=hsdp"
    assert "mesh: 4 replicate;" in succeed(*command, **nodes).out
    fault = "math.gcd(*per_node)", "processes_on_this_node()"
    own = with_fault(tmp_path / "copy", "joining", *fault)
    differ = launch(*own, *command, "--resume", "--steps=6", **nodes)
    told = "error: the models or their meshes differ between rank 0 and rank "
    assert differ.codes == [2] * 4
    lines = error_lines(differ)
    assert len(lines) == 3  # one on each node
    assert all(line.startswith(told) for line in lines)


def test_replicas_that_begin_differently_are_refused():
    model = Llama(CONFIG)
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
    process = Process(0, 4, local_rank=0, per_node=4, device=CPU)
    world = with_mesh(process, ParallelConfig("hsdp", **sizes))
    groups = f"{inner} groups (0 1) (2 3); {outer} groups (0 2) (1 3)"
    assert describe_mesh(world) == f"mesh: 2 {outer} x 2 {inner}; {groups}"
    assert world.mesh[inner].mesh.tolist() == [0, 1]
    assert world.mesh[outer].mesh.tolist() == [0, 2]
    dist.destroy_process_group()


def test_no_rank_holds_the_logits_of_all_tokens_or_of_the_whole_vocabulary():
    """But four tensors of float32: a chunk of tokens by the rank's half of the vocabulary."""
    model = build_on_meta(LlamaConfig(16, 1, 2, 2, 32, vocab_size=100_000))
    work = step_of(model, ParallelConfig(tp=2), 1, 1, 2 * LOSS_CHUNK)
    _, held = emulate(work)
    assert held["peak"] < 4.5 * 4 * LOSS_CHUNK * 50_000


def test_stages_keep_what_a_model_has_derived_from_its_config():
    model = build_on_meta(LlamaConfig(16, 4, 2, 2, 32))
    model.scale = 1 / model.config.n_layers
    for stage in stages_of(model, 0, p=2, v=2):
        assert stage.scale == model.scale


def test_a_wrapped_block_is_not_wrapped_again():
    """By us, whether it is compiled or a block of one's own, or by somebody else."""

    class OwnBlock(Block):
        pass

    for compiled in (False, True):
        model = Llama(LlamaConfig(**ODD))
        model.layers["0"] = OwnBlock(model.config, 0)
        recompute_and_compile(model, "full", compiled)
        with pytest.raises(UserError, match=r"block 0 .* is wrapped already"):
            recompute_and_compile(model, "selective", False)
    wrapped = Llama(LlamaConfig(**ODD))
    wrapped.layers["1"] = checkpoint_wrapper(wrapped.layers["1"])
    with pytest.raises(UserError, match=r"block 1 .* is wrapped already"):
        recompute_and_compile(wrapped, "none", False)


@pytest.mark.slow
def test_many_collectives_at_once_do_not_crash():
    """With gloo's own two threads for each group, most runs crash within seconds."""
    succeed("tests/workers/many_collectives.py", 20)


# ---------------------------------------------------------------- asynchronous tensor parallelism

WIDE = dict(dim=64, n_layers=2, n_heads=4, n_kv_heads=4, ffn_dim=128, vocab_size=101)
OPERATORS = {
    "all_to_all_single.default(": "send",
    "wait_tensor.default(": "wait",
    "extern_kernels.": "product",
}


def order_of(code: str) -> str:
    """Return the messages, waits and products of compiled code, in the order of its lines."""
    order = []
    _, body = code.split("def call(", 1)
    for line in body.splitlines():
        line = re.sub("#.*", "", line)
        for text, name in OPERATORS.items():
            if text in line:
                order.append(name)
    return " ".join(order)


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", ["none", "selective"])
def test_compiled_blocks_multiply_while_messages_travel(checkpointing):
    """In the code that torch.compile writes for a block of four ranks, forward and backward. It has
    as many messages as are predicted."""
    torch._dynamo.reset()
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    process = Process(1, 4, local_rank=1, per_node=4, device=CPU)
    parallel = ParallelConfig(tp=4, async_tp=True, compile=True, checkpointing=checkpointing)
    world = with_mesh(process, parallel)
    model = build_on_meta(LlamaConfig(768, 1, 8, 4, 2304, vocab_size=64))
    runner = parallelize(model, world, initialize)
    tokens = torch.zeros(2, 2048, dtype=torch.int64)

    def step() -> None:
        runner(tokens, targets=tokens).backward()

    _, codes = run_and_get_code(step)
    dist.destroy_process_group()
    forward, backward = map(order_of, codes)
    assert "send wait" not in forward
    assert ("send wait" in backward) == (checkpointing == "selective")  # of a repeated gather
    work = step_of(model, parallel, 2, 1, 2048)
    *_, (_, _, messages, _) = async_tp.sends(model, work)
    assert (forward + backward).count("send") == messages


# One process that rounds as each rank does: a chunk of tokens, and its part of a matrix, at a time.
BY_CHUNKS = """
        parts, chunks = 2, []
        for chunk in x.split(x.shape[1] // parts, 1):
            if self.by_rows:
                pairs = zip(chunk.chunk(parts, 2), self.weight.chunk(parts, 1))
                chunks.append(sum(self.product(c, w.contiguous()) for c, w in pairs))
            else:
                products = [self.product(chunk, w) for w in self.weight.chunk(parts, 0)]
                chunks.append(torch.cat(products, 2))
        return torch.cat(chunks, 1)
"""


@pytest.mark.parametrize("recipe", ["tensorwise", slow("rowwise"), slow("mxfp8")])
def test_8_bits_are_those_of_each_chunk_and_part(tmp_path, recipe):
    layer = "model.set_submodule(name, Float8Linear(layer, world.parallel.float8))"
    by_rows = f"{layer}; model.get_submodule(name).by_rows = name.endswith(('wo', 'w2'))"
    edits = {"        return self.product(x, self.weight)\n": BY_CHUNKS, layer: by_rows}
    within = changed_copy(tmp_path / "copy", edits=edits, file="float8")
    options = {"seq": 64, "steps": 2}
    alone = case(WIDE, 2, float8=recipe) | options
    split = case(WIDE, 2, float8=recipe, tp=2, async_tp=True) | options
    expected = train(tmp_path, 0, {"": alone}, within=within)[""]
    found = train(tmp_path, 2, {"": split})[""]
    assert_same(found, expected)
    assert_traffic(found, split, 2)


# ----------------------------------------------------------------------------------- pipelines

# What each schedule's docstring says: how many microbatches a rank holds.
HOLDS = {
    "gpipe": lambda rank, p, m, v: m,
    "1f1b": lambda rank, p, m, v: min(m, p - rank),
    "interleaved": lambda rank, p, m, v: min(m * v, 2 * (p - 1 - rank) + (v - 1) * p + 1),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_hold_and_wait_as_they_say(name):
    """For up to 8 ranks, 32 microbatches and 4 stages of a rank; check_schedule proves each."""
    for p in range(1, 9):
        for m in range(1, 33):
            if name == "interleaved" and m % p:
                continue
            for v in range(1, 5) if name == "interleaved" else (1,):
                schedule = make_schedule(name, p, m, v)
                timeline = check_schedule(schedule, m, p * v)
                for rank, order in enumerate(schedule):
                    held = schedules.held(order)
                    assert held == HOLDS[name](rank, p, m, v)
                    assert held == schedules.most_held(name, p, m, v, rank)
                end = max(spans[-1].end for spans in timeline)  # ticks of a v-th of a stage each
                assert end == 3 * m * v + 3 * (p - 1)
                assert schedules.bubble(timeline) == pytest.approx(1 - 3 * m * v / end)


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_picture_in_a_docstring_is_the_schedule(name):
    m, v = (2, 2) if name == "interleaved" else (4, 1)
    lines = re.findall(r"^ +(rank .*)$", SCHEDULES[name].__doc__, re.MULTILINE)
    timeline = check_schedule(make_schedule(name, 2, m, v), m, 2 * v)
    assert lines == timelines.draw_text(timeline).splitlines()


@pytest.mark.parametrize(
    "m, lines, says",
    [
        (1, ["F0 B0", "F0 B0 F1"], "rank 1, position 3: F1@1 is not for this rank"),
        (1, ["F0 B0 B0", "F0 B0"], "rank 0, position 3: B0@0 was there before"),
        (1, ["B0 F0", "F0 B0"], "rank 0, position 1: B0@0 comes before F0@0"),
        (1, ["F0 B0 W0", "F0 W0 B0"], "rank 1, position 2: W0@1 comes before B0@1"),
        (1, ["F0 B0", "F0"], "rank 1, position 2: B0@1 is missing"),
        (1, ["F0 B0 W0", "F0 B0"], "rank 1, position 3: W0@1 is missing"),
        (1, ["F0 B0@1", "F0 B0"], "rank 0, position 2: B0@1 is not for this rank"),
        (1, ["F0 B-1", "F0 B0"], "rank 0, position 2: 'B-1' is no action such as F0 or B0@2"),
        # Rank 0 wants a gradient before it sends microbatch 1, and rank 1 this before that.
        (2, ["F0 B0 F1 B1", "F0 F1 B0 B1"], "position 2: B0@0 waits for B0@1, which rank 1"),
    ],
)
def test_wrong_schedules_are_told(m, lines, says):
    with pytest.raises(ValueError, match=re.escape(says)):
        check_schedule(read_schedule(lines), m, 2)


def test_the_command_draws(tmp_path):
    file = tmp_path / "a & b.txt"
    picture = tmp_path / "x.svg"
    given = ["--stages", 2, "--microbatches", 2, "--schedule", file]
    file.write_text("# Warmup\nF0 F1 B0 W0 B1 W1\nF0 B0 W0 F1 B1 W1  # the last stage\n")
    result = launch("techniques/schedules.py", *given, "--plot", picture)
    assert result.out.startswith("rank 0 F0 F1 .  B0 W0 .  B1 W1\n"), result.out
    assert "25.0% of the time is waiting" in result.out
    assert "hold 2, 1 microbatches" in result.out
    rectangles = ET.parse(picture).findall("{http://www.w3.org/2000/svg}rect")
    assert len(rectangles) == 12
    wrong = launch("techniques/schedules.py", "--stages", 3, "--schedule", file)
    refused(wrong, "has 2 lines, and 3 ranks")


# ----------------------------------------------------------------------- offloaded activations


@pytest.mark.parametrize("compile", [False, slow(True)])
def test_inputs_of_blocks_are_offloaded_and_no_weights(monkeypatch, compile):
    """Compiled, also attention's output, and the logsumexp of its scores: [B, H, T]."""
    monkeypatch.setattr(offload, "MIN_BYTES", 1)  # checkpoints of torch 2.11 save an empty tensor
    torch._dynamo.reset()
    model, tokens = Llama(CONFIG), torch.arange(12).view(1, 12)
    recompute_and_compile(model, "full", compile)
    offload_activations(model, SimpleNamespace(device=CPU))
    offloaded, to_cpu = [], offload.SavedByBlock.to_cpu

    def noted(block: offload.SavedByBlock) -> None:
        to_cpu(block)
        offloaded.append([tuple(saved.on_cpu.shape) for saved in block.tensors])

    monkeypatch.setattr(offload.SavedByBlock, "to_cpu", noted)
    model(tokens, targets=tokens).backward()
    D, H, E = model.config.dim, model.config.n_heads, model.config.head_dim
    of_attention = [(1, H, 12, E), (1, H, 12)]
    assert offloaded == [[(1, 12, D), *of_attention * compile]] * model.config.n_layers


def test_a_change_in_place_is_refused_as_without(monkeypatch):
    """Hooks switch off PyTorch's own check: without another, gradients would be wrong."""
    monkeypatch.setattr(offload, "MIN_BYTES", 0)

    def forward(self, x, *rest):
        h = (x * 2).exp()
        return x + h.mul_(3)  # exp has saved h

    monkeypatch.setattr(Block, "forward", forward)
    model = Llama(CONFIG)
    tokens = torch.arange(12).view(1, 12)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        model(tokens, targets=tokens).backward()
    offload_activations(model, SimpleNamespace(device=CPU))
    with pytest.raises(RuntimeError, match="changed in place a tensor"):
        model(tokens, targets=tokens).backward()
