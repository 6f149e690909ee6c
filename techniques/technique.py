"""A technique's answers to what other files ask, so that these need not know it by its name.

A technique changes layers, the loss or the optimizer, and has a record TECHNIQUE. So have ZeRO-1,
and tensor, context, expert and pipeline parallelism. They divide a training over ranks, which
changes sizes everywhere, as parallel.py says; their records say what they refuse and when they
help. The other files of this folder help these, or generation. To add a technique, write its file,
put its record into a list of parallel.py, and give it a field in config.py. Here `world` is not
annotated, since parallel.py imports this.

What a layer may say of itself. Techniques know no names of layers; these attributes of its class,
or methods, tell them what they have to know. In a model's file:

    writes_to_stream  names of its layers whose output is added to the residual stream, () for none.
                      A module with a Linear in it must have it. These layers start smaller, PLAN
                      says ROWS for them, and checkpointing keeps an output of theirs only if
                      saved_products names it
    saved_products    names of its layers whose output selective checkpointing keeps
    initial_value     where its parameters start, a number or "normal"; a bias starts at 0 in any
                      case (Llama.init_weights)
    matrices          names of its parameters that are matrices, or stacks of them, where it is no
                      Linear or Embedding: weight decay is for these
    norms_outputs     True: a block that normalizes what attention and feed-forward return, so that
                      backward needs w2's output, too. If that is not kept, ranks along tp sum it up
                      again
    token_layers      names of its linear layers that PLAN makes OwnTokens(): Muon's costs ask

In the files of techniques, of experts and of adapters:

    set_later         names of its parameters that Llama.init_weights leaves to another file
    by_token          True: it computes each token by itself, so that --tp need not gather tokens
    shapes_vary       True: its shapes change from batch to batch, so that it is not compiled
    has_kernel        False: on a GPU, too, it is computed by parts that are not compiled
    keeps_choices     whether forward keeps in `chosen` [N, K] what it chooses for each token; with
                      choices that are `given` it computes these (rewards.py sets both)
    no_slope          names of parameters whose gradient is not the slope of the loss
    used              how many of its stacked matrices a token is multiplied by
    sharded_dims      (dim) -> the dimension on which --tp shards each parameter if it shards the
                      weight on `dim`, for a layer with more parameters than weight and bias
    product           what forward computes with its parameters, which --tp replaces
    shard_product     (mesh): called when its parameters have become shards
    weight_dim        of a style in PLAN: the dimension of a layer's weight that it shards
    attention         of what is given as a mask: it computes attention itself
    sums              of a style in PLAN: how many numbers of a token ranks sum up (costs/)
    only_for          of a style in PLAN: the classes of layers that it is for

What is set on objects of others, by one file for another:

    model.loss        chunked_loss.py computes it in chunks
    model.vocabulary  parallel.py makes it that of a shard
    module.forward    replaced by what recomputes, compiles, sends or computes by stages
    layer.product     replaced by that of shards, of chunks of the tokens, or of a rank's tokens
    module.all_tokens  more_layers.py: all-gathers features of a rank's tokens
    layer.saves_chunks  recompute.py: whether the layer marks its chunks itself
    layer.local_part  expert_parallel.py: this rank's part of a parameter of experts
    parameter.has_slope        optimizers.py: whether its gradient is the slope of the loss
    parameter.optimizer_slice  zero1.py: this rank's slice of it, which the optimizer updates
    parameter.copies  pipeline.py: in how many stages it is, for the norm of the gradient
    optimizer.gradient_scale  optimizers.py: what BFloat16AdamW multiplies gradients by in a step
"""

from collections.abc import Callable
from typing import NamedTuple

# Operators that return a matrix product (all_to_all_single: a sum of products that are sent in
# chunks). Techniques add theirs.
PRODUCTS = {"mm", "addmm", "bmm", "_scaled_mm", "all_to_all_single"}


class Technique(NamedTuple):
    """The answers of one technique. Each has a default, which changes nothing."""

    flag: str  # the field of ParallelConfig that asks for it; "": whoever lists it uses it
    apply: Callable = lambda model, world: None  # (Llama on meta, World): before FSDP
    refuses: Callable = lambda work: ""  # (Work): why a step cannot use it, or ""
    # (a rank's Llama, Work): what the rank holds beyond costs/page.py, or less if negative.
    # `saved`: elements in the compute dtype, per token and block. Others are bytes: the state that
    # the `optimizer` reads, what else is `kept` between steps, what only an `update` needs.
    holds: Callable = lambda model, work: {}
    # (a rank's Llama, Work): tuples (mesh dimension, collective, calls in a step, bytes of a call).
    # Negative calls take back what costs/page.py says.
    sends: Callable = lambda model, work: ()
    gain: float = 1.0  # speedup of the blocks' matrix products
    about: Callable = lambda model, world: ""  # (whole Llama, World): a line at a run's start
    suggests: Callable = lambda facts: ""  # (Facts of perf/verdict.py): advice to try it, or ""
    only_linear: bool = False  # it changes nn.Linear, and not the stacked matrices of experts
    value: str = ""  # of the field, if one value asks for it; "": any but the default

    def is_used(self, parallel) -> bool:
        """Return whether a ParallelConfig asks for this technique."""
        if not self.flag:
            return True
        asked = getattr(parallel, self.flag)
        if self.value:
            return asked == self.value
        return asked != getattr(type(parallel), self.flag)
