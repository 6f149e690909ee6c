"""parallel.py: what is refused, what stays small, and what a split saves, samples and tells."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from conftest import step_of, succeed
from exact import GROUPED, ODD, RANK_3, TIED, assert_case, assert_traffic, case, train
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils._python_dispatch import TorchDispatchMode
from workers.train_cases import initialize

from costs.memory import predict_memory
from model import Attention, Block, FeedForward, Llama, LlamaConfig, rope_angles
from parallel import ParallelConfig, parallelize, tensor_parallel
from perf.instruments import build_on_meta
from plumbing.processes import UserError
from runs.check_model import check_equal_replicas
from techniques.recompute import recompute_and_compile

# What more is asked of a few splits than test_exact.py asks of all.
TWO = {
    "ddp in buckets": case(ODD | dict(dim=240, ffn_dim=1400), dp="ddp", replicate=2),
    "fsdp tied": case(ODD | TIED, 1, packed=True, dp="fsdp", shard=2) | {"generate": True},
    "lora ddp": case(ODD | TIED, 1, lora=RANK_3, dp="ddp", replicate=2),
    "lora fsdp": case(ODD, 1, lora=RANK_3, dp="fsdp", shard=2),
}
FOURFOLD = {
    "hsdp": case(ODD | TIED, 1, packed=True, dp="hsdp", replicate=2, shard=2),
    "ddp tp": case(GROUPED, 1, dp="ddp", replicate=2, tp=2),
    "fsdp tp": case(GROUPED, packed=True, dp="fsdp", shard=2, tp=2) | {"generate": True},
    "lora fsdp tp": case(GROUPED | TIED, 1, lora=RANK_3, dp="fsdp", shard=2, tp=2),
}


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return train(tmp_path_factory.mktemp("two"), 2, TWO)


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    return train(tmp_path_factory.mktemp("four"), 4, FOURFOLD)


def test_many_buckets_are_reduced(two):
    assert_case(two["ddp in buckets"], TWO["ddp in buckets"], 2)


def test_saving_gathers_adapters_and_no_more(two, four):
    for results, name in ((two, "lora ddp"), (two, "lora fsdp"), (four, "lora fsdp tp")):
        result = results[name]
        size = 0
        for key, factor in result["adapters"].items():
            assert torch.equal(factor, result["last"][key])
            size += factor.nbytes
        assert result["saving"] <= (0 if name == "lora ddp" else 2.2 * size)  # rounded up twice


def test_samples_gather_weights_once(two, four):
    """FSDP gathers each of two blocks once for four tokens; it has gathered the root before."""
    assert two["fsdp tied"]["sampling"] == four["fsdp tp"]["sampling"] == 2


def test_tensor_parallelism_refuses_what_has_no_place():
    def refuses(name: str, model: Llama, remedy: str = "add its layer to PLAN in") -> None:
        with pytest.raises(UserError, match=f"--tp cannot shard {name}: {remedy}"):
            tensor_parallel(model, mesh=None)
        with pytest.raises(UserError, match=f"--tp cannot shard {name}"):
            predict_memory(step_of(model, ParallelConfig(tp=2), 1, 1, 13))  # before it is built

    def attention(model: Llama) -> nn.Module:
        return model.layers["0"].attention

    def new_model() -> Llama:
        return build_on_meta(LlamaConfig(**GROUPED))

    with torch.device("meta"):
        attention(model := new_model()).q_norm = nn.RMSNorm(10)
        refuses("layers.0.attention.q_norm.weight", model)
        attention(model := new_model()).wq = nn.Linear(40, 40, bias=True)
        refuses("layers.0.attention.wq.bias", model, "PLAN shards the weight of its layer alone")
        attention(model := new_model()).gate = nn.Parameter(torch.ones(4))
        refuses("layers.0.attention.gate", model, "move it into a module of its own")
        (model := new_model()).positions = nn.Embedding(13, 40)
        refuses("positions.weight", model)
        (model := new_model()).scale = nn.Parameter(torch.ones(40))
        refuses("scale", model, "move it into a module of its own")


def test_what_the_model_was_built_with_is_not_lost_or_replaced():
    world = SimpleNamespace(parallel=ParallelConfig(), device="cpu", mesh=SimpleNamespace())
    world.mesh.get_local_rank = lambda dim: 0
    model = Llama(LlamaConfig(**GROUPED))
    model.layers["0"].attention.register_buffer("slopes", torch.ones(4))
    with pytest.raises(
        UserError, match=r"layers\.0\.attention\.slopes is a buffer, which would lose"
    ):
        parallelize(model, world, initialize)
    model = build_on_meta(LlamaConfig(**GROUPED))
    model.layers["0"].attention.wv.weight = model.layers["0"].attention.wk.weight
    with pytest.raises(UserError, match=r"layers\.0\.attention\.wv\.weight is shared"):
        parallelize(model, world, initialize)
    smoothed = Llama(LlamaConfig(**GROUPED))
    smoothed.loss = lambda hidden, weight, targets, *_: hidden.sum()
    with pytest.raises(UserError, match=r"not another model\.loss: change loss_of"):
        tensor_parallel(smoothed, mesh=None)


def test_replicas_that_begin_differently_are_refused():
    model = Llama(LlamaConfig(**GROUPED))
    for norms, codes, message in (  # of a base in 4 bits, sums of codes
        ([1.0, 2.0, 1.0, 2.0], [5, 6, 5, 6], None),
        ([1.0, 2.0, 1.0, 2.1], [5, 6, 5, 6], "rank 3 begins with other weights than rank 1"),
        ([1.0, 2.0, 1.0, 2.0], [5, 6, 4, 6], "rank 2 begins with other weights than rank 0"),
    ):
        sums = torch.tensor([norms, codes]).T
        world = SimpleNamespace(
            parallel=ParallelConfig(dp="hsdp", replicate=2, shard=2),
            all_gather_scalars=lambda _, sums=sums: sums,
        )
        with pytest.raises(UserError, match=message) if message else nullcontext():
            check_equal_replicas(model, world)


class Products(TorchDispatchMode):
    """A context that counts the matrix products that run in it."""

    count = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.count += op.__name__ == "mm.default"
        return op(*args, **(kwargs or {}))


@pytest.mark.parametrize("saved, recomputed", [(("wk", "wo"), 4), (("wq", "wk", "wv"), 3), ((), 6)])
def test_selective_checkpointing_saves_what_a_module_says(saved, recomputed, monkeypatch):
    """Of the seven products of a block, backward never needs the output of w2."""
    monkeypatch.setattr(Attention, "saved_products", saved)
    monkeypatch.setattr(FeedForward, "saved_products", ())
    y = run_block(compile=False)
    with Products() as products:
        y.sum().backward()
    assert products.count == 2 * 7 + recomputed


@pytest.mark.slow
def test_compiled_selective_checkpointing_saves_the_same():
    shapes = []

    def note(saved: torch.Tensor) -> torch.Tensor:
        shapes.append(tuple(saved.shape))
        return saved

    with torch.autograd.graph.saved_tensors_hooks(note, lambda saved: saved):
        run_block(compile=True)
    wide = [shape for shape in shapes if shape[0] == 13 and shape[1] in (20, 46)]
    assert wide.count((13, 20)) == 1  # wk
    assert wide.count((13, 46)) == 1  # w3
    assert shapes.count((13, 40)) >= 1  # wo


def run_block(compile: bool) -> torch.Tensor:
    """Return the output of one block under selective checkpointing."""
    torch._dynamo.reset()
    model = Llama(LlamaConfig(**GROUPED))
    model.init_weights()
    recompute_and_compile(model, "selective", compile)
    x = torch.randn(1, 13, 40, requires_grad=True)
    return model.layers["0"](x, *rope_angles(model.config, torch.arange(13)[None]))


def test_the_mesh_is_told(two, four):
    assert two["lora ddp"]["mesh"] == "mesh: 2 replicate; replicate groups (0 1)"
    assert four["fsdp tp"]["mesh"] == (
        "mesh: 2 shard x 2 tp; tp groups (0 1) (2 3); shard groups (0 2) (1 3)"
    )


def test_neighbours_share_what_talks_most(four):
    """As seen from rank 0: tp and shard lie within a node of two, replicate goes across."""
    one = {"pp": [0]}
    assert four["hsdp"]["ranks"] == one | {"replicate": [0, 2], "shard": [0, 1], "tp": [0]}
    assert four["fsdp tp"]["ranks"] == one | {"replicate": [0], "shard": [0, 2], "tp": [0, 1]}
    assert four["ddp tp"]["ranks"] == one | {"replicate": [0, 2], "shard": [0], "tp": [0, 1]}


# ------------------------------------------------------------------------------- what stays small


def test_no_rank_holds_the_logits_of_all_tokens_or_of_the_whole_vocabulary():
    out = succeed("tests/workers/largest_tensor.py", nproc=2).out
    assert out.split() == [
        str(52 * 499),
        str(52 * 498),
    ]  # tokens in a chunk x vocabulary shard of the rank


def test_a_wrapped_block_is_not_wrapped_again():
    for compiled in (False, True):
        model = Llama(LlamaConfig(**ODD))
        recompute_and_compile(model, "full", compiled)
        with pytest.raises(UserError, match="block 0 is wrapped already"):
            recompute_and_compile(model, "selective", False)
    own = Llama(LlamaConfig(**ODD))
    own.layers["0"] = type("OwnBlock", (Block,), {})(own.config, 0)
    recompute_and_compile(own, "full", False)
    wrapped = Llama(LlamaConfig(**ODD))
    wrapped.layers["1"] = checkpoint_wrapper(wrapped.layers["1"])
    with pytest.raises(UserError, match="block 1 is wrapped already"):
        recompute_and_compile(wrapped, "none", False)


def test_traffic_in_bfloat16_is_as_predicted(tmp_path):
    """FSDP gathers half the bytes, tensor parallelism sends half; sums of gradients are float32."""
    cases = {
        "fsdp": case(ODD, 1, dp="fsdp", shard=2),
        "zero1": case(ODD, 1, dp="zero1", replicate=2),
        "tp": case(GROUPED, dp="fsdp", tp=2),
        "tp accumulating": case(GROUPED, 2, dp="fsdp", tp=2),
        "lora ddp": case(ODD | TIED, 1, lora=RANK_3, dp="ddp", replicate=2),
        "lora fsdp": case(ODD, 1, lora=RANK_3, dp="fsdp", shard=2),
        "lora fsdp adapters": case(ODD, 1, lora=RANK_3, dp="fsdp", shard=2, reshard="adapters"),
        "lora tp": case(GROUPED, 2, lora=RANK_3, dp="fsdp", tp=2),
    }
    for options in cases.values():
        options["dtype"] = "bfloat16"
    for name, result in train(tmp_path, 2, cases).items():
        assert_traffic(result, cases[name], 2)
        lora, last = "lora" in name, result["last"]
        assert last["norm.weight"].dtype == (torch.bfloat16 if lora else torch.float32)
        assert not lora or last["layers.0.attention.wq.lora_A"].dtype == torch.float32


@pytest.mark.slow
def test_many_collectives_at_once_do_not_crash():
    """With gloo's own two threads for each group, most runs crash within seconds."""
    succeed("tests/workers/many_collectives.py", 20)
