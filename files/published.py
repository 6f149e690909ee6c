"""Tell changed code by the logits of a family's small model with fixed weights.

A changed activation, norm or mask leaves names and shapes of the weights as they were. So an export
compares the logits with those of transformers, which the family's file has (tests/test_export.py),
and a checkpoint keeps those of the code that trained it: whoever goes on with other code is told.
"""

import functools
import sys
import zlib
from pathlib import Path

import torch

from model import Llama, LlamaConfig
from models.family import Family, family_of
from plumbing.messages import UserError, print_rank_zero
from plumbing.shards import assign_shard

TOKENS = torch.arange(600)[None] ** 2 % 61  # [1, T]; longer than a short sliding window


def family_for_others(config: LlamaConfig) -> Family:
    """Return the family of a configuration. Raise UserError if other programs do not know it."""
    family = family_of(config)
    if family.published is None:
        raise UserError(f"no other program knows the models of {family.name}, or could load them")
    if reason := family.published.unpublished(config):
        raise UserError(reason)
    return family


@functools.cache
@torch.no_grad()
def small_logits(family: Family) -> list[float] | None:
    """Return the logits of vocabulary entries 0 to 3 after TOKENS, which the small model of a
    family computes here; None where it cannot compute them."""
    try:
        model = with_fixed_weights(family.small_config.build().double())
        return model(TOKENS)[0, -1, :4].tolist()
    except Exception:  # whatever a change does: it must not stop a run from being saved
        return None


def computes(logits: tuple | list | None, family: Family) -> bool:
    """Return whether a family computes these logits here, or could not either if they are None.
    Rounding is far below 1e-4, and the changes that were tried are 1e-2 or more."""
    if (found := small_logits(family)) is None or logits is None:
        return found is logits
    return len(found) == len(logits) and all(abs(a - b) <= 1e-4 for a, b in zip(found, logits))


@functools.cache
def warn_of_other_code(
    directory: Path, family: Family, logits: tuple[float, ...] | None, digest: str
) -> None:
    """Warn, once, if a family computes other logits than the code that wrote a checkpoint, and say
    if a student's file is another than it was, though it computes the same."""
    file = family.name if family.digest else "model.py"
    if not computes(logits, family):
        told = "computes other logits from the same weights than the code that trained"
        print_rank_zero(f"warning: {file} {told} {directory}", file=sys.stderr)
    elif digest != family.digest:
        told = "was changed since it trained"
        print_rank_zero(
            f"note: {file} {told} {directory}, and computes the same logits", file=sys.stderr
        )


@torch.no_grad()
def with_fixed_weights(model: Llama) -> Llama:
    """Set weights by name and shape, large enough for nonlinearity, and turn off dropout."""
    for name, parameter in model.named_parameters():
        phase, shape = zlib.crc32(name.encode()) % 1000, parameter.shape
        waves = (torch.arange(shape.numel(), dtype=torch.float64) ** 2 + phase).sin().view(shape)
        assign_shard(parameter, waves / 2 if parameter.ndim > 1 else 1 + waves / 2)
    return model.eval()
