"""Steps to compare flatllama's with: bare products and attention, and transformers' with peft's.

bare_step and transformers_step take what make_step takes, so that bench.py compare and limit run
them in turns with ours.
"""

from collections.abc import Callable, Iterator

import torch
from torch import nn

from config import Work
from files.formats import HF_FIELDS
from lora import adapter_settings
from model import Llama, LlamaConfig, attend
from parallel import World
from perf.instruments import LEARNING_RATE
from plumbing.messages import UserError
from techniques.optimizers import make_optimizer
from text.batch import Batch


def products(work: Work) -> Iterator[tuple[int, int, int]]:
    """Yield the sizes (m, k, n) of the matrix products [m, k] x [k, n] of a microbatch.

    A weight [out, in] is in three: for the output, for the gradient of the input, and for its own.
    With LoRA it is frozen and has none; instead, its factors A [r, in] and B [out, r] are in three
    products each. As in training, the output matrix has no adapter. Raise UserError for a model
    with experts."""
    tokens = work.microbatch * work.seq_len
    lora = adapter_settings(work.model)
    for name, layer in work.model.named_modules():
        if hasattr(layer, "used"):  # stacked matrices
            raise UserError("bare leaves mixtures out: name other contestants, such as one")
        if not isinstance(layer, nn.Linear):
            continue
        width = layer.in_features
        out = layer.out_features
        yield tokens, width, out
        yield tokens, out, width
        if not lora:
            yield out, tokens, width
        elif name != "output":
            low = lora.rank
            for high in (width, out):
                yield tokens, high, low
                yield tokens, low, high
                yield low, tokens, high


def bare_step(work: Work, world: World, batch: Batch) -> Callable[[], object]:
    """Return a function that runs only the matrix products and the attention of a training step.
    The time that a training step takes beyond this is overhead."""
    c = work.model.config
    sizes = list(products(work))

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=world.device, dtype=world.parallel.dtype)

    def random_heads(n: int) -> torch.Tensor:
        return random(work.microbatch, work.seq_len, n, c.head_dim)

    operands = {}
    for m, k, n in sizes:
        for shape in ((m, k), (k, n)):
            if shape not in operands:
                operands[shape] = random(*shape)
    qkv = [random_heads(n).requires_grad_() for n in (c.n_heads, c.n_kv_heads, c.n_kv_heads)]
    grad = random_heads(c.n_heads)  # of attention's output

    def step() -> None:
        for _ in range(len(batch.tokens) // work.microbatch):
            for m, k, n in sizes:
                torch.mm(operands[m, k], operands[k, n])
            for _ in range(c.n_layers):
                torch.autograd.grad(attend(*qkv, None), qkv, grad)

    return step


def transformers_model(model: Llama, device: torch.device) -> nn.Module:
    """Return transformers' LlamaForCausalLM of the same configuration, with weights of its own.
    Raise UserError where it is not installed, or the model is no Llama."""
    try:
        import transformers
    except ImportError:
        raise UserError(
            "this command compares with transformers and peft: pip install -r requirements-dev.txt"
        )
    if not all(parameter.is_floating_point() for parameter in model.parameters()):
        raise UserError("transformers' model is not made in 4 bits: leave out one of the two")
    config = model.config
    if type(config) is not LlamaConfig:
        raise UserError("transformers' model is a Llama: give --model llama3.2-1b or the like")
    fields = {theirs: getattr(config, ours) for ours, theirs in HF_FIELDS.items()}
    described = transformers.LlamaConfig(**fields, attn_implementation="sdpa", use_cache=False)
    with torch.device(device):
        return transformers.LlamaForCausalLM(described)


def transformers_step(work: Work, world: World, batch: Batch) -> Callable[[], object]:
    """Return the same step on transformers' LlamaForCausalLM, with peft's adapters beside the
    seven matrices of each block where the model has them. In bfloat16 it computes under autocast,
    with float32 weights, but for a frozen base."""
    device = world.device
    model = transformers_model(work.model, device)
    lora = adapter_settings(work.model)
    autocasts = world.parallel.dtype == torch.bfloat16
    dtype = torch.bfloat16 if lora and autocasts else torch.float32
    model.to(device, dtype)
    if lora:
        import peft

        options = dict(r=lora.rank, lora_alpha=lora.alpha, use_dora=lora.dora)
        options |= dict(target_modules="all-linear", task_type="CAUSAL_LM")
        model = peft.get_peft_model(model, peft.LoraConfig(**options))
    optimizer = make_optimizer(model, world, LEARNING_RATE)
    parts = batch.microbatches(work.microbatch)

    def step() -> None:
        for part in parts:
            # shift_labels are taken as they are; labels alone would be shifted by one more token.
            labels = dict(labels=part.targets, shift_labels=part.targets)
            with torch.autocast(device.type, torch.bfloat16, enabled=autocasts):
                out = model(input_ids=part.tokens, **labels)
            (out.loss / len(parts)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        out.loss.item()  # as train.py waits for it

    return step
