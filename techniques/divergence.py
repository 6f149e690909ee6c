"""How far one distribution over the vocabulary is from another: KL divergences of two models.

    KL(p, q) = sum over v of p(v) (log p(v) - log q(v))

It is 0 if both are equal, and large where p is likely and q is not. So a student q that minimizes
KL(teacher, student) spreads over all that the teacher may say, and one that minimizes
KL(student, teacher) keeps to what the teacher thinks likely, perhaps only to some of it.

Logits are of n tokens, [n, V]; with tensor parallelism V are those of a rank's shard. In backward a
sum over V gives a rank the gradient of its own addends alone (ShardedVocabulary of parallel.py). So
no addend may have another sum in it that needs a gradient: the student's logsumexp is added outside
of the sum, or detached. (The teacher's needs none.)
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from model import Vocabulary


def forward_kl(student: Tensor, teacher: Tensor, vocabulary: Vocabulary) -> Tensor:
    """Return KL(teacher, student) [n], whose logits [n, V] are given."""
    log_p = teacher - vocabulary.logsumexp(teacher)[:, None]
    p = log_p.exp()
    mean = vocabulary.sum(p * (log_p - student))
    return mean + vocabulary.logsumexp(student)


def reverse_kl(student: Tensor, teacher: Tensor, vocabulary: Vocabulary) -> Tensor:
    """Return KL(student, teacher) [n], whose logits [n, V] are given."""
    lse = vocabulary.logsumexp(student)
    p = (student - lse.detach()[:, None]).exp()  # its sum is 1, but has a gradient
    mean = vocabulary.sum(p * (student - teacher)) / vocabulary.sum(p)
    return mean - lse + vocabulary.logsumexp(teacher)


def likeliest(logits: Tensor, k: int, vocabulary: Vocabulary) -> tuple[Tensor, Tensor]:
    """Return the k largest logits of each token and their ids in the whole vocabulary, [n, k]."""
    missing = max(0, k - logits.shape[-1])  # a shard may have fewer
    padded = F.pad(logits, (0, missing), value=-torch.inf)
    values, ids = padded.topk(k)
    ids = ids + vocabulary.vocab_start
    values, ids = (vocabulary.all_gather(each) for each in (values, ids))  # [shards, n, k] each
    values = values.movedim(0, 1).flatten(1)  # [n, shards k]
    ids = ids.movedim(0, 1).flatten(1)
    values, places = values.topk(k)
    return values, ids.gather(1, places)


def shares_of(logits: Tensor, ids: Tensor, vocabulary: Vocabulary) -> Tensor:
    """Return log p of the tokens `ids` [n, k] and of all others together: [n, k + 1]."""
    columns = ids - vocabulary.vocab_start
    is_here = (columns >= 0) & (columns < logits.shape[-1])
    columns = torch.where(is_here, columns, 0)
    chosen = torch.where(is_here, logits.gather(1, columns), 0)
    chosen = vocabulary.all_gather(chosen).sum(0)
    counts = torch.zeros_like(logits)
    counts = counts.scatter_add(1, columns, is_here.to(counts.dtype))
    lowest = torch.finfo(logits.dtype).min / 2  # with -inf, a shard of chosen ones would give NaN
    rest = logits.masked_fill(counts > 0, lowest)
    others = vocabulary.logsumexp(rest)
    lse = vocabulary.logsumexp(logits)
    together = torch.cat([chosen, others[:, None]], 1)
    return together - lse[:, None]
