"""Who holds the vocabulary?

The logits of a language model are its largest activation: a number for each token and each entry of
the vocabulary. In tensor parallelism each rank computes those of its part of the vocabulary. Most
targets lie in another rank's part, and a softmax needs all logits of a token. Yet no rank needs to
see another's: a few numbers a token are enough.

Read: `ShardedVocabulary` in parallel.py; for the gradient, `CrossEntropy` in techniques/passes.py.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from model import IGNORE


def cross_entropy(logits: Tensor, targets: Tensor, vocab_start: int) -> Tensor:
    """Return the sum over targets of -log softmax(logits of all ranks)[target], a scalar, the same
    on all ranks. Let backward give logits their gradient. Each rank calls this.

    logits [N, v]: of N tokens and this rank's part of the vocabulary, the entries from vocab_start
        to vocab_start + v - 1. The last rank may have fewer than the others.
    targets [N]: entries of the whole vocabulary, the same on all ranks. IGNORE, -100, is none.
    Logits may be as large as 1e4. No tensor has more elements than the first rank's logits, and a
    rank sends at most 4 numbers a token.
    """
    raise NotImplementedError("about 27 lines")
