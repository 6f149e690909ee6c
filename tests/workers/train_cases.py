"""Train cases. Arguments: a JSON file of cases, and a file for the results.

A case has "parallel" (fields of ParallelConfig), "config" (see config_of) and "packed"; it may
have "microbatch", "seq" (tokens of a row), "steps", "generate", "backend" of
torch.compile, "own_loss", and "lora" (fields of LoRA, and base_bits), with which the learning rate
is a tenth. "objective" is a loss of preferences.py, which then trains on rows of pairs, or
"rewards", for answers with advantages, or one of DISTILLED, a divergence of distill.py. With
"may_be_refused", train.py's checks come first."""

import copy
import functools
import json
import math
import sys
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist

import distill
import model as model_py
import parallel as parallel_py
import rewards
import techniques.chunked_loss as chunked_loss
import techniques.expert_parallel as expert_parallel
import techniques.offload as offload
from config import ParallelConfig, Work
from costs.page import sends
from data import batch_of as batch_of_rows
from distill import Distillation, Distilling
from files.adapters import gather_adapters
from lora import LoRA, adapters, init_adapters, quantize_base
from model import IGNORE, Llama, LlamaConfig, generator_for, initial_value_of
from models.family import families
from models.own_file import load_file
from parallel import parallelize, weights_gathered, with_mesh
from perf.instruments import Counted, Training, build_on_meta
from plumbing import host_reads
from plumbing.joining import init_distributed
from plumbing.messages import UserError
from plumbing.processes import run
from plumbing.shards import assign_shard, to_local
from preferences import Preferences, Preferring
from rewards import Rewarding, Rewards
from runs.answers import Answers
from runs.changed import notes
from runs.equal import check_model, whole_tensor
from runs.rules import check_parallel, check_work
from runs.task import Task
from techniques.context_parallel import share_sequences
from techniques.decoding import generate
from techniques.optimizers import make_optimizer, optimizer_parameters
from techniques.recompute import is_attention
from text.batch import Batch
from text.order import Order, Steps
from text.packing import Packed
from train import accumulate

BATCH, SEQ, VOCAB = 8, 13, 101
CLIP = 0.02  # below all norms, so that clipping is seen to work


def steps_of(case: dict) -> int:
    """Return how many steps a case trains; what the last one sends is counted. The second goes on
    from the first's weights and moments. With DDP, it also sends which buckets gradients are in."""
    parallel = ParallelConfig(**case["parallel"])
    has_buckets = parallel.strategy.wrapper == "ddp" and parallel.size > 1
    return case.get("steps", 3 if has_buckets else 2)


def batch_of(packed: bool, seq: int = SEQ, seed: int = 0) -> Batch:
    """Return rows with 1 to `seq` targets. If packed, a row of SEQ tokens has documents of 4 and 9
    tokens; a longer one, documents of 1 to 7 tokens, the first of which begins before the row."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCAB, (BATCH, seq + 1), generator=generator)
    targets = tokens[:, 1:].clone()
    for row in range(BATCH):
        targets[row, 1 + (seq - 1) * row // 7 :] = IGNORE
    positions = None
    if packed and seq == SEQ:
        positions = torch.tensor([[*range(4), *range(9)]] * BATCH)
    elif packed:
        rows = []
        for lengths in torch.randint(1, 8, (BATCH, seq), generator=generator).tolist():
            row = [2, 3]
            for length in lengths:
                row += range(length)
            rows.append(row[:seq])
        positions = torch.tensor(rows)
    return Batch(tokens[:, :-1].contiguous(), targets, positions, text_bytes=1)


BETA, KL = 0.3, 0.7
DISTILLED, TOP_K = ("forward", "top_k", "reverse"), 7


def packed_pairs() -> Packed:
    """Return rows of 24 tokens with one to three pairs. The last of the BATCH + 1 rows is not
    trained on, but evaluated with the others."""
    generator = torch.Generator().manual_seed(0)
    samples = []
    for i in range(20):
        lengths = 1 + torch.randint(4, (3,), generator=generator)
        prompt, *answers = lengths.tolist()
        for answer in answers:
            answer += i % 2 * 2
            ids = torch.randint(VOCAB, (prompt + answer,), generator=generator)
            samples.append((ids.tolist(), [False] * prompt + [True] * answer))
    tokenizer = SimpleNamespace(special={}, count_bytes=lambda targets: 1)
    return Packed(samples, 24, tokenizer, together=2)


def scored_answers() -> tuple[list, list, torch.Tensor, torch.Tensor]:
    """Return BATCH prompts of packed_pairs, answers, another sampler's log p, and advantages."""
    prompts = []
    answers = []
    for ids, is_target in packed_pairs().samples[:BATCH]:
        length = len(ids) - sum(is_target)
        prompts.append([*ids[:length]])
        answers.append([*ids[length:]])
    log_p = torch.linspace(-5, -4, BATCH * 8, dtype=torch.float64).view(BATCH, 8)
    advantages = torch.linspace(-1, 2, BATCH, dtype=torch.float64)
    return prompts, answers, log_p, advantages


def before_updates(sampled_log_p: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return by name log p of tokens by the weights before the first update, and by the base, which
    stand for other weights. 0 where there is no token."""
    old = sampled_log_p + torch.cos(7 * sampled_log_p)
    base = sampled_log_p + torch.sin(9 * sampled_log_p) / 2
    is_token = sampled_log_p != 0
    return {"old_log_p": old * is_token, "base_log_p": base * is_token}


@dataclass(frozen=True)
class JobOfTask:
    """What a task reads of a Job."""

    model: Llama
    train_set: Packed
    val_set: Packed


def make_task(case: dict, model: Llama, world, work: Work) -> Task:
    """Return the task of a case with an objective, which has begun."""
    job = JobOfTask(model, packed_pairs(), packed_pairs())
    if case["objective"] == "rewards":
        run = Rewarding(reward=Path(__file__).parents[2] / "docs/sums.py", kl=KL)
        return Rewards(run, job, world, work, None)
    if case["objective"] in DISTILLED:
        distill.load_teacher = functools.partial(split_teacher, case)
        run = Distilling(
            top_k=TOP_K if case["objective"] == "top_k" else 0,
            on_policy=case["objective"] == "reverse",
            eval_windows=BATCH + 1,
        )
        return Distillation(run, job, world, work, None)
    run = Preferring(
        beta=BETA,
        loss=case["objective"],
        eval_windows=BATCH + 1,
        all_weights="lora" not in case,
    )
    task = Preferences(run, job, world, work, None)
    order = Order(BATCH + 1, work.seq_len, seed=0)  # reads all rows
    task.begin(Steps(0, 1, (), order))
    return task


def teacher_config(case: dict) -> dict:
    """Return the configuration of a case's teacher: another Llama or, with experts over ranks, one
    with more layers."""
    layers = case["config"]["n_layers"] + 1
    if case["parallel"].get("ep", 1) > 1:
        return case["config"] | dict(n_layers=layers, tie_embeddings=False)
    return dict(dim=48, n_layers=layers, n_heads=4, n_kv_heads=4, ffn_dim=64, vocab_size=VOCAB)


@torch.no_grad()
def initialize_teacher(model: Llama) -> None:
    """Let a teacher be surer than a model that begins, so that their divergence is large."""
    model.init_weights(seed=9, assign=assign_shard)
    if model.output:
        to_local(model.output.weight).mul_(30)


def split_teacher(case: dict, run: Distilling, world) -> Llama:
    model = build(teacher_config(case)).requires_grad_(False)
    parallelize(model, world, initialize_teacher)
    return model.eval()


def capped(hidden, weight):
    return 3 * torch.tanh(hidden @ weight.T / 3)


def own_loss(logits, targets, vocabulary):
    """Smoothed labels, focal weights and a z-loss at once, as a student would write it in model.py;
    plain.py has PyTorch's formulas."""
    loss = vocabulary.cross_entropy(logits, targets)
    lse = vocabulary.logsumexp(logits)
    mean = vocabulary.sum(logits) / vocabulary.size
    smoothed = 0.9 * loss + 0.1 * (lse - mean)
    focal = (1 - torch.exp(-loss)) ** 2 * smoothed
    return focal + 1e-2 * lse**2


def merge_stages(values: dict, parallel: ParallelConfig) -> dict:
    """Merge dictionaries of all ranks: a stage of a pipeline has the names of its own layers."""
    if parallel.pp == 1:
        return values
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, values)
    merged = {}
    for part in parts:
        merged |= part
    return merged


def profiled_attentions(profile: torch.profiler.profile) -> int:
    """Return how many attention forwards a profile has."""
    events = profile.key_averages()
    return sum(event.count for event in events if is_attention(event.key))


SIZES_OF_FILES = {  # of tests/changes, so that each does what it is for on a few tokens
    "windowed.py": dict(window=4, full_every=2),
    "shared_expert.py": dict(n_experts=4),
    "nope.py": dict(rope_every=3),
}


def config_of(values: dict) -> LlamaConfig:
    """Return a configuration from its fields, and "family" for another than Llama's: the name of a
    file of models/, or the path of a student's file."""
    rest = dict(values)
    name = rest.pop("family", "llama")
    family = load_file(name) if name.endswith(".py") else families()[name]
    return family.config(**rest)


def build(config: dict, lora: dict | None = None) -> Llama:
    """Return a model on meta; `lora` has fields of LoRA, and base_bits."""
    settings = dict(lora or {})
    bits = settings.pop("base_bits", 16)
    adapter = LoRA(**settings) if lora else None
    return build_on_meta(config_of(config), adapter, base_bits=bits)


@torch.no_grad()
def initialize(model: Llama) -> None:
    """Initialize a model as if trained for a while: LoRA's B is not zero, or A would have no
    gradient; nor are biases and norms that start at 0; and DoRA's magnitudes are not the norms of
    the base's rows."""
    model.init_weights(seed=3, assign=assign_shard)
    for name, parameter in model.named_parameters():
        path, _, attribute = name.rpartition(".")
        if initial_value_of(model.get_submodule(path), attribute) == 0.0:
            generator = generator_for(name, 0, torch.device("cpu"))
            value = torch.randn(parameter.shape, generator=generator)
            if "router" in name:  # which is added to probabilities; two experts have no tokens
                value = value / 20
                value[:2] = -9
            assign_shard(parameter, value)

    def matrix(name: str) -> torch.Tensor:
        layer = model.get_submodule(name.removesuffix(".weight"))
        generator = generator_for(name, 0, torch.device("cpu"))
        return torch.randn(layer.out_features, layer.in_features, generator=generator) / 20

    quantize_base(model, matrix, assign_shard)
    init_adapters(model, seed=4, assign=assign_shard)
    for name, parameter in adapters(model).items():
        if name.endswith("lora_B"):
            torch.manual_seed(len(name) + sum(map(ord, name)))
            value = torch.randn(parameter.shape, dtype=torch.float64) / 10
            assign_shard(parameter, value)
        if name.endswith("lora_magnitude"):
            to_local(parameter).mul_(1.3)


def train(process, case: dict) -> dict:
    """Train one case and return what the tests compare."""
    world = with_mesh(process, ParallelConfig(**case["parallel"], dtype=torch.float64))
    model = build(case["config"], case.get("lora"))
    share = BATCH // world.parallel.data_size
    seq = case.get("seq", SEQ)
    microbatch = case.get("microbatch", share)
    work = Work(copy.deepcopy(model), world.parallel, BATCH, microbatch, seq)
    predicted = sends(work, pp_rank=0)
    runner = parallelize(model, world, initialize)
    first = {name: whole_tensor(p) for name, p in model.named_parameters()}
    optimizer = make_optimizer(model, world, lr=1e-3 if "lora" in case else 1e-2)
    gradients = {}

    def keep_first_gradients(*_):
        if gradients:
            return
        scale = getattr(optimizer, "gradient_scale", None)  # that it still has to multiply by
        if scale is None:
            scale = 1
        for name, p in optimizer_parameters(model).items():
            gradients[name] = whole_tensor(p.grad) * scale

    optimizer.register_step_pre_hook(keep_first_gradients)
    rows = []  # of each step: mean loss, number of targets, gradient norm, measures
    task = make_task(case, model, world, work) if "objective" in case else None
    own = slice(world.data_rank * share, (world.data_rank + 1) * share)
    if not task:
        batch = batch_of(case["packed"], seq).microbatches(share)[world.data_rank]
        batch = share_sequences(batch, world)
    elif isinstance(task, Preferences | Distillation):
        totals = task.evaluate()
        measures = task.finish_measures(totals)
        rows.append((totals.mean_loss, *measures.values()))
        batch = task.job.train_set.batch([*range(BATCH)[own]])
        batch = share_sequences(batch, world)
    else:
        are_counted = [True] * BATCH
        given = (*scored_answers(), are_counted)
        answers = Answers(*(each[own] for each in given), packed_pairs().tokenizer)
        batch = batch_of_rows(answers, range(share), world)
        batch.target_values |= before_updates(batch.target_values["sampled_log_p"])
    # Counted is a dispatch mode, in which compiled blocks would run eagerly: they are profiled.
    compiled = world.parallel.compile
    counter = torch.profiler.profile() if compiled else Counted(world)
    of_task = dict(loss_of=task.loss, count_of=task.count) if task else {}
    training = Training(world, model, runner, optimizer, None, microbatch, CLIP, **of_task)
    steps = steps_of(case)
    reads = []  # of the last step, where the host waits for what experts get

    def read(counts):
        reads.append(counts)
        return counts.tolist()

    for step in range(1, steps + 1):
        if isinstance(task, Preferences):
            batch = task.with_base(batch)
        elif isinstance(task, Distillation):
            batch = task.with_teacher(batch)
        elif task:
            task.measured = task.seconds = {}
        count = counter if step == steps else nullcontext()
        host_reads.READERS[0] = read if step == steps else torch.Tensor.tolist
        with count:
            totals = training.update(training.accumulate(batch), batch)
        measures = task.finish_measures(totals).values() if task else ()
        rows.append((totals.mean_loss, totals.count, totals.grad_norm, *measures))
    host_reads.READERS[0] = torch.Tensor.tolist
    sent = None if compiled else counter.sent
    to_experts = "ep", "all-to-all"
    if sent and to_experts in sent:  # depends on the routing: the sum over ep does not
        calls, nbytes = sent[to_experts]
        total = torch.tensor(nbytes)
        dist.all_reduce(total, group=world.own_groups["ep"])
        sent[to_experts] = calls, total.item() / world.parallel.ep
    tokens = None
    sampling = Counted(world)
    if "generate" in case:
        with torch.compiler.set_stance("force_eager"):  # as train.py does
            tokens = generate(model, [[1, 2, 3]], 4, temperature=0)
            with sampling, weights_gathered(model, world.parallel):
                assert tokens == generate(model, [[1, 2, 3]], 4, temperature=0)
    gathers, _ = sampling.sent.get(("shard", "all-gather"), (0, 0))
    saving = Counted(world)
    with saving:
        saved = gather_adapters(model)
    last = {name: whole_tensor(p) for name, p in model.named_parameters()}
    counters = torch._dynamo.utils.counters
    return {
        "rows": rows,
        "gradients": merge_stages(gradients, world.parallel),
        "first": merge_stages(first, world.parallel),
        "last": merge_stages(last, world.parallel),
        "tokens": tokens,
        "sampling_gathers": gathers,
        "adapters": saved,
        "saving_bytes": sum(nbytes for _, nbytes in saving.sent.values()),
        "predicted": predicted,
        "sent": sent,
        "layers": len(model.layers),
        "reads": len(reads) / max(expert_parallel.mixtures_of(model), 1),
        "attentions": profiled_attentions(counter) if compiled else counter.attentions,
        "graphs": dict(counters["stats"]),
        "breaks": dict(counters["graph_break"]),
    }


def train_if_it_starts(process, case: dict) -> dict:
    """Return what `train` does, with the notes of train.py's start; or {"refused": the line with
    which it ends a run there}."""
    world = with_mesh(process, ParallelConfig(**case["parallel"], dtype=torch.float64))
    model = build(case["config"])
    work = Work(model, world.parallel, BATCH, case["microbatch"], case["seq"])
    try:
        check_parallel(work, None, process)
        check_work(work)
        check_model(model.config, work.seq_len, world, accumulate)
    except UserError as error:
        return {"refused": str(error)}
    return train(process, case) | {"notes": notes(model, world.parallel)}


def main():
    process = init_distributed()
    offload.MIN_BYTES = 0  # the tensors here are small
    # The log p of scored_answers is that of another sampler.
    rewards.TOLERANCE = dict.fromkeys(rewards.TOLERANCE, math.inf)
    chunked_loss.LOSS_CHUNK = 20  # tokens: a loss of several chunks
    # DTensor remembers results by meshes, and takes equal ones for one: so equal ones are one here.
    one_mesh = functools.cache(parallel_py.init_device_mesh)
    parallel_py.init_device_mesh = expert_parallel.init_device_mesh = one_mesh
    cases = json.loads(Path(sys.argv[1]).read_text())
    plain = dict(logits_of=model_py.logits_of, loss_of=model_py.loss_of)
    own = dict(logits_of=capped, loss_of=own_loss)
    results = []
    compile = torch.compile
    for case in cases:
        backend = case.get("backend", "inductor")
        torch.compile = functools.partial(compile, backend=backend)
        if case["parallel"].get("compile"):
            torch._dynamo.reset()
            torch._dynamo.utils.counters.clear()
        vars(model_py).update(own if "own_loss" in case else plain)
        train_case = train_if_it_starts if "may_be_refused" in case else train
        results.append(train_case(process, case))
        if process.rank == 0:
            print(f"{len(results)}/{len(cases)} {case}", file=sys.stderr, flush=True)
    if process.rank == 0:
        torch.save(results, sys.argv[2])


if __name__ == "__main__":
    run(main)
