"""Cut a model into the stages of a pipeline (pipeline.py), and make what passes between them.

Stage s of p v stages lies on rank s % p, where p is the number of ranks and v that of the stages of
each. With tied embeddings the last rank keeps the embedding too, as its output.
"""

import copy
import warnings
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from model import Llama
from plumbing.processes import UserError
from plumbing.shards import chunk_of

# FSDP warns of views because changing them in place would be an error, and nothing here does.
warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")


def check_combination(parallel, strategy, splits_backward: bool) -> None:
    """Raise UserError for a ParallelConfig whose parts do not combine. `strategy` is its entry of
    STRATEGIES, None while that is not chosen; `splits_backward` tells of its schedule."""
    flag = "--tp" if parallel.tp > 1 else "--pp"
    if parallel.tp * parallel.pp > 1 and strategy and not strategy.splits_layers:
        raise UserError(f"--dp {parallel.dp} does not combine with {flag}: use --dp fsdp")
    if parallel.pp > 1 and (parallel.offload or parallel.offload_activations):
        raise UserError("--pp does not combine with offloading: give one of them")
    if splits_backward and parallel.compile:
        raise UserError("compiled blocks cannot split backward: give --no-compile")
    if splits_backward and (parallel.async_tp or parallel.float8 != "none"):
        flag = "--async-tp" if parallel.async_tp else "--float8"
        raise UserError(
            f"a backward in two parts does not combine with {flag}: use --schedule 1f1b"
        )
    if parallel.async_tp and parallel.tp == 1:
        raise UserError("--async-tp is for --tp 2 or more: give --tp, or leave it out")
    if parallel.optimizer == "muon" and (parallel.moments or parallel.offload):
        flag = "--offload" if parallel.offload else "--moments bfloat16"
        raise UserError(f"{flag} is for AdamW: give --optimizer adamw, too")
    if splits_backward and parallel.reshard == "all":
        raise UserError("--reshard all does not combine with a backward in two parts: leave it out")


def layers_of(stage: int, stages: int, n_layers: int) -> range:
    """Return the layers of a stage: consecutive ones, as many as in the others or one more."""
    each, more = divmod(n_layers, stages)
    first = stage * each + min(stage, more)
    return range(first, first + each + (stage < more))


def cut(model: Llama, rank: int, p: int, v: int) -> None:
    """Leave of a model what a rank of a pipeline needs; names stay those of the whole model. Raises
    UserError for a parameter of which no stage would know."""
    stages = p * v
    own = {str(i) for s in range(rank, stages, p) for i in layers_of(s, stages, len(model.layers))}
    parts = {"tok_embeddings", "layers", "norm", "output"}
    for name, _ in model.named_parameters():
        if name.split(".")[0] not in parts:
            raise UserError(f"{name} belongs to no stage of a pipeline: move it into a block")
    for stage in range(stages):
        blocks = [model.layers[str(i)] for i in layers_of(stage, stages, len(model.layers))]
        if not any(p.requires_grad for block in blocks for p in block.parameters()):
            raise UserError(f"stage {stage} has nothing to train: use fewer stages, or --pp 1")
    for name in model.layers.keys() - own:
        del model.layers[name]
    is_last = rank == p - 1
    if rank > 0 and not (is_last and model.config.tie_embeddings):
        model.tok_embeddings = None
    if not is_last:
        model.norm = model.output = None


def part_of(model: Llama, rank: int, p: int, v: int) -> Llama:
    """Return what `cut` would leave of a model, which stays whole; the two share their modules."""
    part = copy.copy(model)
    part._modules = dict(model._modules) | {"layers": nn.ModuleDict(model.layers)}
    cut(part, rank, p, v)
    return part


def stages_of(model: Llama, rank: int, p: int, v: int) -> list[Llama]:
    """Return a rank's stages as modules of their own, which share the parts of `model`."""
    stages, made = p * v, []
    for s in range(rank, stages, p):
        with torch.device("meta"):
            stage = type(model)(replace(model.config, n_layers=0))
        own = layers_of(s, stages, model.config.n_layers)
        stage.layers = nn.ModuleDict({str(i): model.layers[str(i)] for i in own})
        stage.tok_embeddings = model.tok_embeddings if s in (0, stages - 1) else None
        stage.norm, stage.output = (model.norm, model.output) if s == stages - 1 else (None, None)
        stage.config, stage.loss = model.config, model.loss
        # FSDP puts a hook on the tensor that a module returns. The last block and the stage would
        # return the same one, so that W, which needs the stage's hook alone, would all-gather the
        # block for nothing. A view is another tensor.
        stage.register_forward_hook(lambda stage, inputs, output: output.view_as(output))
        made.append(stage)
    return made


def empty_stream(tokens: Tensor, tp: DeviceMesh, width: int, dtype: torch.dtype) -> Tensor:
    """Return memory for this rank's shard of the residual stream of tokens [B, T]."""
    own = chunk_of(tokens, tp, 0, dim=1)
    return own.new_empty(*own.shape, width, dtype=dtype)


def as_stream(x: Tensor, tokens: Tensor, tp: DeviceMesh) -> Tensor:
    """Return x, a shard of the residual stream or the tokens themselves, as a stage takes it: under
    tensor parallelism, the stream is a DTensor sharded by tokens."""
    if tp.size() == 1 or x is tokens:
        return x
    B, T, D = *tokens.shape, x.shape[2]
    shape, stride = torch.Size((B, T, D)), (T * D, D, 1)
    return DTensor.from_local(x, tp, [Shard(1)], shape=shape, stride=stride)
