"""On one GPU, gradients and generated tokens are those of the CPU, peak memory is what
costs/page.py predicts, and a checkpoint is of its step: `pytest -m gpu`.

One process goes the same way there as any number of them. With GPU_TESTS_ON_CPU=1 in front, the
command runs on a CPU what can run there, to try the tests themselves."""

import functools
import gc
import itertools
import os
from dataclasses import replace
from itertools import product

import pytest
import torch
import torch.distributed as dist
from conftest import finish, like, metrics, start, step_of
from test_decoding import PROMPTS
from test_documents import random_positions
from test_formats import our_model

import checkpoint
import model as model_py
from config import ParallelConfig
from costs.page import holds
from generate import compile_blocks
from lora import LoRA
from model import LlamaConfig, rope_frequencies, rotation_by
from parallel import parallelize, with_mesh
from perf.instruments import Training, build_on_meta, make_step, random_batch
from plumbing.joining import init_distributed
from plumbing.shards import assign_shard, to_local
from techniques import cuda_graph, recompute
from techniques.decoding import generate
from techniques.optimizers import make_optimizer
from text.batch import Batch
from text.tokenizer import load_tokenizer
from train import accumulate

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
TRIED_ON_CPU = "GPU_TESTS_ON_CPU" in os.environ
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not (ON_GPU or TRIED_ON_CPU), reason="needs a GPU"),
]
needs_gpu = pytest.mark.skipif(not ON_GPU, reason="needs a GPU")

SMALL = LlamaConfig(256, 3, 4, 2, 512, vocab_size=1000)
MIXTURE = like(SMALL, "mixtral")
# Each token uses all experts: else those of some would change with the rounding of bfloat16.
DENSE_MIXTURE = like(SMALL, "mixtral", n_experts=4, top_k=4, balance="none")
FLOAT64, FLOAT32, LOW = torch.float64, torch.float32, torch.bfloat16
TOLERANCES = {FLOAT64: 1e-10, FLOAT32: 1e-4, LOW: 0.05}
ADAPTERS = LoRA(8, alpha=32)


@pytest.fixture(scope="module")
def process():
    torch.use_deterministic_algorithms(True, warn_only=True)  # so that repetitions are bit-equal
    yield init_distributed()
    dist.destroy_process_group()
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def same_rotation(monkeypatch):
    """Let RoPE be computed on the CPU: a GPU's differs in the last bit of float32, also beside
    float64."""

    def frequencies(config, device) -> torch.Tensor:
        return rope_frequencies(config, torch.device("cpu")).to(device)

    def rotation(frequencies, positions) -> torch.Tensor:
        return rotation_by(frequencies.cpu(), positions.cpu()).to(positions.device)

    monkeypatch.setattr(model_py, "rope_frequencies", frequencies)
    monkeypatch.setattr(model_py, "rotation_by", rotation)


def weights_of(config, lora=None) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    weights = {}
    for name, parameter in build_on_meta(config, lora).named_parameters():
        if parameter.ndim == 1:
            weights[name] = torch.ones(parameter.shape)
        else:
            weights[name] = torch.randn(parameter.shape) / 20
    return weights


def built(process, config=SMALL, lora=None, **parallel) -> tuple:
    """Return a model with the weights_of its configuration, what a step calls, and its world."""
    world, values = with_mesh(process, ParallelConfig(**parallel)), weights_of(config, lora)
    model = build_on_meta(config, lora)

    def initialize(model) -> None:
        for name, parameter in model.named_parameters():
            full = values[name].to(to_local(parameter).device, parameter.dtype)
            assign_shard(parameter.detach(), full)

    return model, parallelize(model, world, initialize), world


def batch_of(rows: int, length: int, packed: bool, config=SMALL) -> Batch:
    batch = random_batch(config, rows, length)
    if packed:
        torch.manual_seed(0)
        positions = random_positions(rows, length, within=True)
        batch = Batch(batch.tokens, batch.targets, positions, 1)
    return batch


def gradients(model, runner, batch, world, microbatch=2) -> dict[str, torch.Tensor]:
    """Return the loss and each gradient of a batch."""
    found = {"loss": accumulate(runner, batch.to(DEVICE), microbatch, world)}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            found[name] = to_local(parameter.grad)
    return found


@functools.cache
def on_the_cpu(lora=None, packed=False, config=SMALL) -> dict[str, torch.Tensor]:
    """Return the loss and gradients of a plain model on the CPU, in float64."""
    model = build_on_meta(config, lora).to_empty(device="cpu").double()
    model.load_state_dict(weights_of(config, lora))
    batch = batch_of(4, 96, packed)
    loss = model(batch.tokens, batch.targets, batch.positions)
    loss.backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    return {"loss": loss.detach()} | found


def close(found, expected, tolerance: float) -> None:
    """Assert that tensors, by name or in a tuple, are within a tolerance of their norm."""
    if isinstance(expected, tuple):
        found = dict(enumerate(found))
        expected = dict(enumerate(expected))
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        ours = found[name].detach().double().cpu()
        theirs = value.detach().double().cpu()
        error = (ours - theirs).norm() / theirs.norm()
        assert error < tolerance, (name, float(error))


# ------------------------------------------------------------------- the gradients of the CPU

SPLITS = {
    "ddp": {},
    "zero1": dict(dp="zero1"),
    "fsdp": dict(dp="fsdp"),
    "hsdp": dict(dp="hsdp"),
    "selective": dict(checkpointing="selective"),
    "fsdp full": dict(dp="fsdp", checkpointing="full"),
    "offload": dict(dp="fsdp", offload=True),
    "full offloaded": dict(checkpointing="full", offload_activations=True),
    "fsdp full offloaded": dict(dp="fsdp", checkpointing="full", offload_activations=True),
}
OTHERS = {
    "compiled": dict(compile=True),
    "compiled selective": dict(compile=True, checkpointing="selective"),
    "compiled full": dict(compile=True, checkpointing="full"),
}
ADAPTED = {"fsdp adapters": dict(dp="fsdp", reshard="adapters")}
PACKED = False, True
HIGH = FLOAT64, FLOAT32
OF_EXPERTS = "ddp", "selective", "fsdp full"
CASES = [
    *product(SPLITS, PACKED, HIGH, [None], [SMALL]),
    *product(["ddp", "fsdp adapters"], [False], HIGH, [ADAPTERS], [SMALL]),
    *product(OTHERS, [False], [FLOAT32], [None], [SMALL]),
    *product(
        ["ddp", "fsdp full", "selective", "compiled"], PACKED, [LOW], [None, ADAPTERS], [SMALL]
    ),
    *product([*OF_EXPERTS, "fsdp full offloaded"], [False], HIGH, [None], [MIXTURE]),
    *product([*OF_EXPERTS, *OTHERS], [False], [LOW], [None], [DENSE_MIXTURE]),
]


def case_id(given) -> str:
    named = {ADAPTERS: "lora", SMALL: "", MIXTURE: "experts", DENSE_MIXTURE: "all experts"}
    return named.get(given, str(given))


@pytest.mark.parametrize("name, packed, dtype, lora, config", CASES, ids=case_id)
def test_gradients_are_those_of_the_cpu(process, request, name, packed, dtype, lora, config):
    if config is DENSE_MIXTURE and not ON_GPU:
        pytest.skip("needs the kernel of all experts")
    if dtype != LOW:
        request.getfixturevalue("same_rotation")
    torch._dynamo.reset()
    split = (SPLITS | OTHERS | ADAPTED)[name]
    model, runner, world = built(process, config, lora, **split, dtype=dtype)
    if world.parallel.offload:
        assert all(p.device.type == "cpu" for p in model.parameters())
    if config is DENSE_MIXTURE and world.parallel.compile:
        assert not recompute.about(model, world)  # blocks are compiled as a whole
    found = gradients(model, runner, batch_of(4, 96, packed), world)
    close(found, on_the_cpu(lora, packed, config), TOLERANCES[dtype])


# ------------------------------------------------------------------------------------- memory


@needs_gpu
@pytest.mark.parametrize("options", [{}, dict(dp="fsdp"), dict(compile=True)])
def test_offloaded_activations_change_no_bit(process, options):
    config, found = LlamaConfig(512, 10, 8, 4, 1536, vocab_size=1000), []
    batch = batch_of(2, 1024, True, config)
    for offload in (False, True):
        offloading = dict(dtype=LOW, checkpointing="full", offload_activations=offload)
        model, runner, world = built(process, config, **options, **offloading)
        of_batch = gradients(model, runner, batch, world, 2)
        found.append({name: value.cpu() for name, value in of_batch.items()})
    for name, value in found[0].items():
        assert torch.equal(found[1][name], value), name


BIG = LlamaConfig(1024, 8, 16, 4, 4096, vocab_size=32_000)
FULL, SELECTIVE = dict(checkpointing="full"), dict(checkpointing="selective")
OFFLOADING = dict(offload_activations=True)
MEMORY = {  # parallel, in bfloat16 if not said; microbatches of 4 x 1,024 tokens; adapters
    "float32": (dict(dtype=FLOAT32), 1, None),
    "autocast": ({}, 1, None),
    "autocast accumulating": ({}, 3, None),
    "autocast selective": (SELECTIVE, 1, None),
    "autocast full": (FULL, 1, None),
    "autocast compiled": (dict(compile=True), 1, None),
    "autocast compiled selective": (dict(compile=True) | SELECTIVE, 1, None),
    "fsdp": (dict(dp="fsdp"), 1, None),
    "fsdp full": (dict(dp="fsdp") | FULL, 1, None),
    "moments": (dict(moments="bfloat16") | FULL, 1, None),
    "offloaded": (OFFLOADING | FULL, 1, None),
    "offloaded compiled": (OFFLOADING | FULL | dict(compile=True), 1, None),
    "adapters": ({}, 1, ADAPTERS),
}


@needs_gpu
@pytest.mark.parametrize("name", MEMORY)
def test_memory_is_predicted_within_a_tenth(process, name):
    torch._dynamo.reset()
    options, microbatches, lora = MEMORY[name]
    parallel = ParallelConfig(**dict(dtype=LOW) | options)
    work = step_of(build_on_meta(BIG, lora), parallel, 4, microbatches, 1024, on_gpu=True)
    predicted = holds(work)["peak"]
    gc.collect()  # what earlier tests have left
    before = torch.cuda.memory_allocated()
    batch = random_batch(BIG, 4 * microbatches, 1024).to(DEVICE)
    step = make_step(work, with_mesh(process, parallel), batch)
    for _ in range(2):
        step()
    torch.cuda.reset_peak_memory_stats()
    step()
    measured = torch.cuda.max_memory_allocated() - before
    print(f"{name}: predicted {predicted / 1e9:.3f} GB, measured {measured / 1e9:.3f}")
    assert predicted == pytest.approx(measured, rel=0.1)


# ----------------------------------------------------------------------------------- checkpoints


@pytest.mark.parametrize("parallel", [{}, dict(dp="fsdp", offload=True)])
def test_a_checkpoint_written_in_the_background_is_of_its_step(process, tmp_path, parallel):
    """Training goes on while it is written, and nothing of that is in it."""
    tokenizer = load_tokenizer("bytes")
    config = replace(SMALL, vocab_size=tokenizer.vocab_size)
    model, runner, world = built(process, config, **parallel)
    optimizer = make_optimizer(model, world, lr=1e-2)
    batch = batch_of(4, 32, False, config).to(DEVICE)
    step = Training(world, model, runner, optimizer, itertools.repeat(batch), microbatch=2)

    def state_of(model, optimizer) -> list[torch.Tensor]:
        """Return copies of the weights and of the moments."""
        moments = [optimizer.state[p]["exp_avg"] for p in model.parameters()]
        return [to_local(t.detach()).clone() for t in (*model.parameters(), *moments)]

    for _ in range(2):
        step()
    flags = {"async_save": True}
    with checkpoint.Saver(tmp_path, model, optimizer, tokenizer, flags, {}) as saver:
        expected = state_of(model, optimizer)
        saver.save(2)
        for _ in range(3):
            step()
    again, _, _ = built(process, config, **parallel)
    its_optimizer = make_optimizer(again, world, lr=1e-2)
    assert checkpoint.resume(tmp_path / "step-00000002", again, its_optimizer, tokenizer) == 2
    assert all(map(torch.equal, state_of(again, its_optimizer), expected))


# ------------------------------------------------------------------------------- whole commands


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("family", ["llama", "olmo3", "mixtral"])
def test_a_repeated_step_draws_the_tokens_of_the_cpu(family, compiled, monkeypatch):
    """In float64. Rows end at different times, so that a step is recorded again. The experts'
    products wait for the host here: their steps run kernel by kernel."""
    config = dict(llama=SMALL, olmo3=like(SMALL, "olmo3", window=9), mixtral=MIXTURE)[family]
    model = our_model(config, torch.float64, factor=3)
    options = dict(max_new_tokens=40, temperature=3.0)
    free = generate(model, PROMPTS, **options)
    stop = (free[1][20],)
    expected = generate(model, PROMPTS, stop=stop, **options)
    recorded = []
    record = cuda_graph.record
    monkeypatch.setattr(cuda_graph, "record", lambda step: recorded.append(step) or record(step))
    model.to(DEVICE)
    if compiled:
        compile_blocks(model)
    assert generate(model, PROMPTS, stop=stop, compiled=compiled, **options) == expected
    assert bool(recorded) == (ON_GPU and family != "mixtral")


@needs_gpu
def test_defaults_train_fine_tune_and_measure(tmp_path, monkeypatch):
    """What the README's reader types first, with the defaults of a GPU: bfloat16, compiled."""
    monkeypatch.chdir(tmp_path)
    for command in (
        "train.py --steps=30 --eval-every=30",
        "train.py --steps=30 --document-mask --out=out/packed --eval-every=0",
        "finetune_lora.py --init=out/tiny --steps=10 --eval-every=10",
        "generate.py out/tiny --prompt def",
        "bench.py step --repeats=3 --batch=4",
        "bench.py compare --repeats=2",
        "bench.py limit --model=small --dtype=bfloat16 --repeats=3",
    ):
        result = finish(start(*command.split()), timeout=200)
        assert result.code == 0, (command, result.err)
    assert metrics(tmp_path / "out/tiny")[-1]["loss"] < 7
