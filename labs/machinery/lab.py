"""What the checks of all labs share.

A lab is a folder with a page, README.md, its picture, and answer.py: the solution between marks,
from which the starter is made, its reasons, and answers to the page's questions. wrong.txt has
patches of it (answers.py), and known.json what they give (known.py). Its check.py has:

    FUNCTION    name of the student's function
    SIZES       numbers of ranks to check it on
    HINTS       three: where to look, what to count, the shape of the code; no numbers
    ABOUT, NEEDS, POINT    the lab's cells of the tables in labs/README.md
    LEADS_TO    file and function of the project that do the same; its docstring names the lab. What
                went is in "FILE of commit HASH"
    ERRORS      (may be left out) part of an exception's message -> the sentence for that mistake
    BARRED      (may be left out) "module.name" of what the function is to replace
    NEEDS_BARRIERS    (may be left out) True where a barrier is no mistake
    on_rank     (load, size, seed, rank) -> what the student's function gave, sent and held there;
                load() returns the function
    properties  (results, size, seed) -> yields a Property for each line of the report. Where ranks
                return dicts, `results` has for each name a list of what the ranks have
    picture     (may be left out) the same -> a text that is shown below these lines
    drawing     (may be left out) the same -> an SVG for --plot, or ""
    facts       (may be left out) (size) -> what sentences of wrong.txt say in {braces}

run.py lists the labs in ORDER.
"""

from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import parallel
from config import ParallelConfig
from model import IGNORE, Llama, LlamaConfig
from parallel import World, with_mesh
from plumbing.processes import Process
from techniques.recompute import is_attention
from text.batch import Batch

CONFIG = LlamaConfig(16, 2, 4, 2, 24, vocab_size=101, tie_embeddings=True)
ROWS, SEQ = 12, 13  # of a step's batch; 2, 3 and 4 ranks divide the rows


def world_of(rank: int, size: int) -> World:
    """Return the ranks as replicas, on this machine."""
    process = Process(rank, size, rank, size, torch.device("cpu"))
    # gloo needs no calls that connect groups; they would count as the student's.
    with mock.patch.object(parallel, "connect"):
        return with_mesh(process, ParallelConfig(dtype=torch.float64, replicate=size))


def small_model(seed: int) -> Llama:
    """Return a model in float64, the same on each rank."""
    model = Llama(CONFIG).double()
    model.init_weights(seed)
    return model


def batch_of(seed: int) -> Batch:
    """Return a step's batch, in whose rows 1 to 13 tokens count."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(CONFIG.vocab_size, (ROWS, SEQ + 1), generator=generator)
    targets = tokens[:, 1:].clone()
    for row in range(ROWS):
        targets[row, 1 + row % SEQ :] = IGNORE
    return Batch(tokens[:, :-1].contiguous(), targets, None, text_bytes=1)


def share_of(batch: Batch, rank: int, size: int) -> Batch:
    """Return a rank's rows. Those of the last rank have most targets."""
    return batch.microbatches(ROWS // size)[rank]


def summed_gradients(model: Llama, batch: Batch) -> tuple[float, int, dict[str, Tensor]]:
    """Return the sum of a batch's losses, its number of targets, and the gradient of the sum."""
    model.zero_grad()
    loss = model(*batch.inputs)
    loss.backward()
    count = int((batch.targets != IGNORE).sum())
    named = model.named_parameters()
    return loss.item(), count, {name: p.grad.clone() for name, p in named if p.requires_grad}


def gradient_of(tensor: Tensor) -> Tensor:
    """Return a tensor's gradient, zeros where backward gave it none."""
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad


def norm_of(gradients: dict[str, Tensor]) -> float:
    """Return the norm of all gradients together."""
    return torch.stack([g.norm() for g in gradients.values()]).norm().item()


class LargestTensor(TorchDispatchMode):
    """A context that notes the shape of the largest tensor that an operator returns, the bytes of
    the largest that one makes, and which kernels of attention run."""

    def __init__(self):
        super().__init__()
        self.shape, self.nbytes, self.kernels = torch.Size([0]), 0, set()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        result = op(*args, **(kwargs or {}))
        if is_attention(op._opname):
            self.kernels.add(op._opname)
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.shape = max(self.shape, leaf.shape, key=torch.Size.numel)
                self.nbytes = max(self.nbytes, leaf.untyped_storage().nbytes())
        return result


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return causal attention, with all scores at once."""
    each = q.shape[1] // k.shape[1]  # heads of q for one of k
    k, v = (tensor.repeat_interleave(each, 1) for tensor in (k, v))
    later = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).triu(1)
    scores = q.shape[3] ** -0.5 * (q @ k.mT)
    return scores.masked_fill(later, -torch.inf).softmax(-1) @ v


def plural(n: int, noun: str) -> str:
    """Return a number with its noun, such as "1 block" or "2 microbatches"."""
    ending = "" if n == 1 else "es" if noun.endswith("ch") else "s"
    return f"{n} {noun}{ending}"


def drawn(seed: int, *shapes: tuple[int, ...]) -> list[Tensor]:
    """Return tensors of these shapes with normal numbers in float64."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
