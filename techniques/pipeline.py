r"""Pipeline parallelism: each rank has some of the layers, and microbatches pass through the ranks.

    torchrun --nproc-per-node 4 train.py --pp 4 --microbatch 1 --out out/pp

A model is split into *stages* of consecutive layers. A stage sends its output to the next one, and
in backward the gradient of its input to the one before. A rank without work waits: the *bubble*. To
keep all ranks busy, a batch is split into microbatches. A *schedule* orders each rank's actions: F,
a stage's forward of a microbatch, and B, its backward (schedules.py):

    rank 0 F0 F1 F2 .  .  .  .  B0 B0 F3 B1 B1 .  B2 B2 .  B3 B3
    rank 1 .  F0 F1 .  .  B0 B0 F2 B1 B1 F3 B2 B2 .  B3 B3 .  .
    rank 2 .  .  F0 B0 B0 F1 B1 B1 F2 B2 B2 F3 B3 B3 .  .  .  .

Stage s lies on rank s % p. Letters: p ranks of a pipeline, v stages of a rank, m microbatches;
B, T, D, V as in model.py; w bytes of an element of the residual stream, g of a gradient.
Communication, of the ranks of a pipeline together, a step: 2 m (v p - 1) messages of B T D w bytes.
With tied embeddings the first and the last rank also exchange gradients of V D g bytes.
Use over slow links, where FSDP's all-gathers would take longer than these messages. Avoid with few
microbatches: with v = 1 ranks wait (p - 1) / (m + p - 1) of the time.

torch.distributed.pipelining also has schedules that split backward and wait less: zero-bubble, and
those whose stages lie in a V (ZBV, DualPipeV). But in torch 2.13 its zero-bubble loses gradients
under FSDP, without an error, and its 1F1B refuses fewer microbatches than stages.
"""

import copy
import functools
from collections import defaultdict
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from model import Llama
from plumbing.messages import UserError
from plumbing.shards import chunk_of, to_local
from techniques.parallel_layers import sharded_by_tokens
from techniques.schedules import (
    SCHEDULES,
    Action,
    check_schedule,
    enough,
    make_schedule,
    splits_backward,
)
from techniques.technique import Technique

# ------------------------------------------------------------------------------------------- stages
# With tied embeddings the last rank keeps the embedding too, as its output.


def refuses(work) -> str:
    """Return why a step cannot pass through a pipeline, in a line, or ""."""
    parallel = work.parallel
    if parallel.pp == 1:
        return ""
    if parallel.offload:
        return "--pp does not combine with --offload: give one of them"
    layers = work.model.config.n_layers
    stages = parallel.pp * parallel.stages_per_rank
    if stages > layers:
        return (
            f"--pp {parallel.pp} makes {stages} stages, and the model has {layers} layers: give "
            "fewer by --pp or --stages-per-rank"
        )
    name = parallel.schedule
    m = enough(name, parallel.pp, work.microbatches)
    try:
        schedule = make_schedule(name, parallel.pp, m, parallel.stages_per_rank)
    except UserError as error:
        return str(error)
    if name not in SCHEDULES and splits_backward(schedule):
        return f"--schedule {name} has W, and a run computes a backward whole: leave W out"
    return ""


def suggests(facts) -> str:
    levers = []
    if facts.work.sequences > facts.work.microbatches:
        levers.append("a smaller --microbatch makes more microbatches")
    if facts.parallel.schedule in ("gpipe", "1f1b"):
        levers.append("--schedule interleaved, with several stages on each rank, waits less")
    if not levers:
        levers.append("a larger --batch makes more microbatches")
    return facts.waits("pp", "other stages", *levers)


def layers_of(stage: int, stages: int, n_layers: int) -> range:
    """Return the layers of a stage: consecutive ones, as many as in the others or one more."""
    each, more = divmod(n_layers, stages)
    first = stage * each + min(stage, more)
    return range(first, first + each + (stage < more))


def blocks_of(model: Llama, stage: int, stages: int) -> nn.ModuleDict:
    """Return the blocks of a stage by their names in the whole model."""
    blocks = nn.ModuleDict()
    for i in layers_of(stage, stages, model.config.n_layers):
        blocks[str(i)] = model.layers[str(i)]
    return blocks


def keep_own_stages(model: Llama, rank: int, p: int, v: int) -> None:
    """Remove from a model what a rank of a pipeline does not need; names stay those of the whole
    model. Raises UserError for a parameter that belongs to no stage."""
    for name, _ in model.named_parameters():
        if name.partition(".")[0] not in ("tok_embeddings", "layers", "norm", "output"):
            raise UserError(
                f"{name} belongs to no stage of a pipeline: move it into a block or, if it follows "
                f"the last one, let keep_own_stages and stages_of of techniques/pipeline.py treat "
                f"it as `output`"
            )
    trains = any(parameter.requires_grad for parameter in model.parameters())
    own = nn.ModuleDict()
    for stage in range(p * v):
        blocks = blocks_of(model, stage, p * v)
        if trains and not any(parameter.requires_grad for parameter in blocks.parameters()):
            raise UserError(f"stage {stage} has nothing to train: use fewer stages, or --pp 1")
        if stage % p == rank:
            own.update(blocks)
    model.layers = own
    is_last = rank == p - 1
    if rank > 0 and not (is_last and model.config.tie_embeddings):
        model.tok_embeddings = None
    if not is_last:
        model.norm = model.output = None


@functools.lru_cache(256)
def part_of(model: Llama, rank: int, p: int, v: int) -> Llama:
    """Return what keep_own_stages would leave of a model, which stays whole; the two share their
    modules."""
    if p == 1:
        return model
    part = copy.copy(model)
    part._modules = dict(model._modules)
    keep_own_stages(part, rank, p, v)
    return part


def stages_of(model: Llama, rank: int, p: int, v: int) -> list[Llama]:
    """Return a rank's stages as modules of their own, which share the parts of `model`; the model
    itself, if it has one stage."""
    if p == 1:
        return [model]
    last = p * v - 1

    def follow_mode(stage: Llama, inputs: tuple) -> None:
        stage.train(model.training)  # for dropout

    stages = []
    for s in range(rank, p * v, p):
        stage = copy.copy(model)  # with all that its class has derived from its config
        nn.Module.__init__(stage)  # without hooks, and for now without children
        stage._modules = dict(model._modules)
        stage.layers = blocks_of(model, s, p * v)
        stage.tok_embeddings = model.tok_embeddings if s in (0, last) else None
        stage.norm = model.norm if s == last else None
        stage.output = model.output if s == last else None
        stage.loss = lambda *given: model.loss(*given)  # evaluation may replace model.loss
        stage.register_forward_pre_hook(follow_mode)
        stages.append(stage)
    return stages


def as_stream(x: Tensor, tokens: Tensor, tp: DeviceMesh) -> Tensor:
    """Return x, a shard of the residual stream or the tokens themselves, as a stage takes it: under
    tensor parallelism, the stream is a DTensor sharded by tokens."""
    if tp.size() == 1 or x is tokens:
        return x
    return sharded_by_tokens(x, tp, tokens.shape[1])


# ----------------------------------------------------------------------------------------- runner


class Pipeline(nn.Module):
    """One rank of a pipeline, which computes the steps of training by a schedule.

    A *tick* is a moment at which actions end. Before anyone waits, all ranks post the sends and
    receives of a tick in one order, in which NCCL runs them: no two ranks wait for each other."""

    def __init__(self, model: Llama, stages: list[Llama], world, gradient_sync: Callable):
        """`stages` are those of `model`, as stages_of returns them, sharded by FSDP. `world` is a
        World of parallel.py. gradient_sync(parallel, stage, last), also of that file, is a context
        for a backward, which communicates gradients if it is the last of a step."""
        super().__init__()
        self.parallel = world.parallel
        self.gradient_sync = gradient_sync
        self.group = world.mesh.get_group("pp")
        self.tp = world.mesh["tp"]
        self.message = partial(dist.P2POp, group=self.group)
        self.p = self.parallel.pp
        self.rank = dist.get_rank(self.group)
        n_stages = self.p * len(stages)
        self.stages = dict(zip(range(self.rank, n_stages, self.p), stages))
        self.last_stage = n_stages - 1  # of all
        self.model = model
        embedding = model.tok_embeddings  # on the first rank and, if tied, on the last
        self.tied = model.config.tie_embeddings and embedding and embedding.weight.requires_grad
        if self.tied:
            embedding.weight.copies = 2  # each counts half in the gradient norm
        model.forward = self.forward  # for evaluation and generation; training calls `accumulate`
        for stage in stages:
            # In backward FSDP prefetches the block whose forward came before. For block 0 that
            # would be a block of another microbatch. So it prefetches itself, which does nothing.
            blocks = list(stage.layers.values())
            for before, block in zip([blocks[0], *blocks], blocks):
                block.set_modules_to_backward_prefetch([before])
        self.ticks = functools.cache(self.make_ticks)

    def make_ticks(self, m: int) -> list[dict[int, Action]]:
        """Return the ticks in order, each as rank -> the action that ends."""
        schedule = make_schedule(self.parallel.schedule, self.p, m, len(self.stages))
        ticks = defaultdict(dict)  # time -> rank -> action
        for rank, spans in enumerate(check_schedule(schedule, m, self.last_stage + 1)):
            for action, _, end in spans:
                ticks[end][rank] = action
        return [ticks[end] for end in sorted(ticks)]

    def accumulate(self, microbatches: list, task_loss: Callable | None = None) -> Tensor:
        """Run forward and backward of all microbatches (text/batch.py); gradients add up. All
        ranks of a pipeline have the same microbatches. `task_loss` is as for train.accumulate.
        Returns the sum of the losses on the rank with the last stage, 0 on the others."""
        self.microbatches, self.task_loss = microbatches, task_loss
        self.kept = {}  # (microbatch, stage) -> input and output of its forward, for backward
        self.inbox = {}  # action -> what it needs of another rank, and the works to wait for
        self.loss = torch.zeros((), dtype=torch.float64, device=microbatches[0].tokens.device)
        self.unfinished = dict.fromkeys(self.stages, len(microbatches))  # backwards to come
        posted = []
        for tick in self.ticks(len(microbatches)):
            action = tick.get(self.rank)
            received, works = self.inbox.pop(action, (None, []))
            wait(works)
            result = action and self.compute(action, received)
            posted.append(self.exchange(tick, result))
            if len(posted) > self.p:  # sent long ago: waiting only frees the tensors
                wait(posted.pop(0))
        for works in posted:
            wait(works)
        if self.tied:
            self.sum_tied_gradients()
        return self.loss

    def compute(self, action: Action, received: Tensor | None) -> Tensor | None:
        """Run an action on what another rank has sent for it. Return what the next stage, or the
        one before, waits for."""
        kind, i, stage = action
        microbatch, module = self.microbatches[i], self.stages[stage]
        microbatch.prepare()
        if kind == "F":
            x = microbatch.tokens if stage == 0 else received.requires_grad_()
            targets = microbatch.targets if stage == self.last_stage else None
            stream = as_stream(x, microbatch.tokens, self.tp)
            y = module(stream, targets, microbatch.positions, documents=microbatch.documents)
            root = to_local(y)  # of backward
            if stage == self.last_stage:
                root = self.task_loss(y, microbatch) if self.task_loss else y
                self.loss += root.detach()
            self.kept[i, stage] = x, root
            return root.detach()

        x, root = self.kept.pop((i, stage))
        self.unfinished[stage] -= 1
        is_final = self.unfinished[stage] == 0
        with self.gradient_sync(self.parallel, module, is_final):
            # FSDP keeps embedding and output unsharded until the last microbatch has used them.
            module.set_reshard_after_backward(is_final, recurse=False)
            root.backward(received)
        return x.grad  # None for tokens: stage 0 sends it to nobody

    def exchange(self, tick: dict[int, Action], result: Tensor | None) -> list[dist.Work]:
        """Send this rank's result of a tick, and receive what others computed for it."""
        operations = []
        expected = {}  # action -> the tensor that arrives for it
        for rank, (kind, i, stage) in sorted(tick.items()):
            to_stage = stage + 1 if kind == "F" else stage - 1
            if not 0 <= to_stage <= self.last_stage:
                continue
            to_rank = to_stage % self.p
            if rank == self.rank:
                operations.append(self.message(dist.isend, result.contiguous(), group_peer=to_rank))
            elif to_rank == self.rank:
                buffer = self.empty_stream(self.microbatches[i].tokens)
                operations.append(self.message(dist.irecv, buffer, group_peer=rank))
                expected[Action(kind, i, to_stage)] = buffer
        works = dist.batch_isend_irecv(operations) if operations else []
        self.inbox |= {action: (buffer, works) for action, buffer in expected.items()}
        return works

    def empty_stream(self, tokens: Tensor) -> Tensor:
        """Return memory for this rank's shard of the residual stream of tokens [B, T]."""
        own = chunk_of(tokens, self.tp, 0, dim=1)
        return own.new_empty(*own.shape, self.model.config.dim, dtype=self.parallel.dtype)

    @torch.no_grad()
    def sum_tied_gradients(self) -> None:
        """Add the gradients of the embedding, on the first rank, and of the output, on the last."""
        own = to_local(self.model.tok_embeddings.weight.grad)
        other = torch.empty_like(own)
        peer = self.p - 1 - self.rank
        sending = self.message(dist.isend, own.contiguous(), group_peer=peer)
        receiving = self.message(dist.irecv, other, group_peer=peer)
        wait(dist.batch_isend_irecv([sending, receiving]))
        own += other

    @torch.no_grad()
    def forward(self, tokens, targets=None, positions=None, cache=None, documents=None) -> Tensor:
        """Compute what the whole model would, stage by stage, for evaluation and generation. All
        ranks have the logits; the rank with the last stage has the loss, the others 0. Messages are
        batched, since for single ones NCCL would make a communicator of each two ranks."""
        x = tokens
        for stage in range(self.last_stage + 1):
            here = stage % self.p
            there = (stage + 1) % self.p
            if here == self.rank:
                stream = as_stream(x, tokens, self.tp)
                its_targets = targets if stage == self.last_stage else None
                part = cache and cache.parts[stage]
                x = self.stages[stage](stream, its_targets, positions, part, documents)
                if stage < self.last_stage:
                    x = to_local(x).contiguous()
                    wait(dist.batch_isend_irecv([self.message(dist.isend, x, group_peer=there)]))
            elif there == self.rank and stage < self.last_stage:
                x = self.empty_stream(tokens)
                wait(dist.batch_isend_irecv([self.message(dist.irecv, x, group_peer=here)]))
        is_last = self.last_stage in self.stages
        if targets is not None:
            return x if is_last else torch.zeros((), dtype=torch.float64, device=tokens.device)
        if not is_last:  # with a cache, logits are those of the last token
            T = tokens.shape[1] if cache is None else 1
            shape = len(tokens), T, self.model.config.vocab_size
            x = torch.empty(shape, dtype=self.parallel.dtype, device=tokens.device)
        dist.broadcast(x, group=self.group, group_src=self.p - 1)
        return x


def wait(works: list[dist.Work]) -> None:
    """Wait for works, and remove them from their list, so that none is waited for twice: gloo would
    take the second wait for that of another message."""
    while works:
        works.pop().wait()


TECHNIQUE = Technique("pp", refuses=refuses, suggests=suggests)
