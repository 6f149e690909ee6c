"""`bench.py limit`: how far a training step is from what the machine can do.

    python bench.py limit           beside transformers' step and the bare matrix products of a step
    python bench.py limit --lora    the same for adapters, beside peft's

bare_step and transformers_step take what make_step takes: so bench.py compare runs them, too.
Letters: N tokens of a microbatch; in, out widths of a weight; r rank of an adapter.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from lora import adapter_settings
from model import attend
from parallel import World, with_mesh
from perf.instruments import (
    Task,
    build_on_meta,
    make_step,
    random_batch,
    time_interleaved,
    timing_table,
)
from plumbing.processes import UserError
from text.batch import Batch


def measure_limit(task: Task, repeats: int, compile: bool) -> str:
    """Return a table of the times of a training step: the bare products, others' step and ours. A
    task with adapters also has our step of all weights, and `compile` adds compiled blocks."""
    world, lora = task.start_world(), adapter_settings(task.model)
    batch = random_batch(task.model.config, task.batch, task.seq_len).to(world.device)
    steps = {
        "bare matrix products and attention": bare_step(task, world, batch),
        "peft" if lora else "transformers": transformers_step(task, world, batch),
        "flatllama": make_step(task, world, batch),
    }
    if lora:
        all_weights = replace(task, model=build_on_meta(task.model.config))
        steps["flatllama, all weights"] = make_step(all_weights, world, batch)
    if compile:
        compiled = with_mesh(world, replace(world.parallel, compile=True))
        steps["flatllama, compiled blocks"] = make_step(task, compiled, batch)
    seconds = time_interleaved(steps, repeats)
    return "\n".join(timing_table(seconds, task.batch * task.seq_len))


def bare_step(task: Task, world: World, batch: Batch) -> Callable[[], object]:
    """Return a function that runs only the matrix products and the attention of a training step.

    The time that a training step takes beyond this is overhead. Each weight [out, in] is in three
    products: output = x Wᵀ, gradient of x = gradient of output W, and gradient of W. With LoRA W is
    frozen and has no gradient; instead, its factors A [r, in] and B [out, r] are in three products
    each. As in training, the output matrix has no adapter."""
    config, lora = task.model.config, adapter_settings(task.model)
    B, T, rank = task.microbatch, task.seq_len, lora.rank if lora else 0
    linears = [m for m in task.model.modules() if isinstance(m, nn.Linear)]
    random = partial(torch.randn, device=world.device, dtype=world.parallel.dtype)
    weights = [random(linear.out_features, linear.in_features) for linear in linears]
    widths = {width for weight in weights for width in weight.shape} | {rank}
    # Random operands by width: activations or gradients [N, width], factors [r, width].
    rows = {width: random(B * T, width) for width in widths}
    factors = {width: random(rank, width) for width in widths}
    q, k, v, attention_grad = (
        random(B, T, n, config.head_dim).requires_grad_()
        for n in (config.n_heads, config.n_kv_heads, config.n_kv_heads, config.n_heads)
    )

    def compute_microbatch() -> None:
        for i, weight in enumerate(weights):
            x, grad = rows[weight.shape[1]], rows[weight.shape[0]]  # [N, in], [N, out]
            # With LoRA the input of the first wq, wk and wv needs no gradient: what computed it,
            # the embedding, is frozen.
            x_needs_grad = not rank or i >= 3
            torch.mm(x, weight.T)
            if x_needs_grad:
                torch.mm(grad, weight)
            if not rank:
                torch.mm(grad.T, x)
            elif i < len(weights) - 1:  # the last weight is the output matrix
                A, B_transposed = factors[weight.shape[1]], factors[weight.shape[0]]
                low_rank = rows[rank]  # x Aᵀ or its gradient [N, r]
                # Forward, gradients of the inputs, gradients of the factors; each product in the
                # order of operands that is fastest.
                torch.mm(x, A.T)
                torch.mm(low_rank, B_transposed)
                torch.mm(grad, B_transposed.T)
                if x_needs_grad:
                    torch.mm(low_rank, A)
                torch.mm(low_rank.T, x)
                torch.mm(low_rank.T, grad)
        for _ in range(config.n_layers):
            torch.autograd.grad(attend(q, k, v, None), (q, k, v), attention_grad)

    return lambda: [compute_microbatch() for _ in range(len(batch.tokens) // B)]


def transformers_step(task: Task, world: World, batch: Batch) -> Callable[[], float]:
    """Return the same step on transformers' LlamaForCausalLM, with peft's adapters beside the
    seven matrices of each block where the task has them, and these in bitsandbytes' 4 bits. In
    bfloat16 it computes under autocast, with float32 weights, but for a frozen base."""
    try:
        import peft
        import transformers
    except ImportError:
        raise UserError(
            "this command compares with transformers and peft: pip install -r requirements-dev.txt"
        )
    config, lora = task.model.config, adapter_settings(task.model)
    described = transformers.LlamaConfig(
        hidden_size=config.dim,
        num_hidden_layers=config.n_layers,
        num_attention_heads=config.n_heads,
        num_key_value_heads=config.n_kv_heads,
        intermediate_size=config.ffn_dim,
        vocab_size=config.vocab_size,
        tie_word_embeddings=config.tie_embeddings,
        attn_implementation="sdpa",
        use_cache=False,
    )
    with torch.device(world.device):
        model = transformers.LlamaForCausalLM(described)
    low, device = world.parallel.dtype == torch.bfloat16, world.device
    dtype = torch.bfloat16 if lora and low else torch.float32
    model.to(device, dtype)
    if any(p.dtype == torch.uint8 for p in task.model.parameters()):
        into_4_bits(model, dtype)
    if lora:
        options = dict(r=lora.rank, lora_alpha=lora.alpha, use_dora=lora.dora)
        options |= dict(target_modules="all-linear", task_type="CAUSAL_LM")
        model = peft.get_peft_model(model, peft.LoraConfig(**options))
    optimizer, parts = task.optimizer_of(model), batch.microbatches(task.microbatch)

    def step() -> float:
        for part in parts:
            # shift_labels are taken as they are; labels alone would be shifted by one more token.
            labels = dict(labels=part.targets, shift_labels=part.targets)
            with torch.autocast(device.type, torch.bfloat16, enabled=low):
                out = model(input_ids=part.tokens, **labels)
            (out.loss / len(parts)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return out.loss.item()

    return step


def into_4_bits(model: nn.Module, dtype: torch.dtype) -> None:
    """Replace the matrices of transformers' blocks by bitsandbytes' in NF4, as peft expects."""
    try:
        from bitsandbytes.nn import Linear4bit, Params4bit
    except ImportError:
        raise UserError("a base in 4 bits is compared with bitsandbytes: pip install bitsandbytes")
    for name, layer in list(model.model.named_modules()):
        if isinstance(layer, nn.Linear):
            new = Linear4bit(*layer.weight.shape[::-1], False, dtype, quant_type="nf4")
            new.weight = Params4bit(layer.weight.data, requires_grad=False, quant_type="nf4")
            parent, _, attribute = name.rpartition(".")
            setattr(model.model.get_submodule(parent), attribute, new.to(layer.weight.device))
    model.is_loaded_in_4bit = True
