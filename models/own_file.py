"""Load a student's file: a model that is none of this folder's (models/family.py says how)."""

import hashlib
import importlib.util
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from models.family import Family, families, own_fields
from plumbing.messages import UserError


def load_file(path: str) -> Family:
    """Return the family of a student's file. A bare name is also looked for beside model.py.

    Raises UserError if there is no such file, no MODEL with presets in it, a class of layers that
    no preset's model has (a Llama would be trained in its place), or a field that no checkpoint can
    hold."""
    beside_model = Path(__file__).resolve().parent.parent / path
    file = next((file for file in (Path(path), beside_model) if file.is_file()), None)
    if file is None:
        raise UserError(f"there is no file {path}, in this folder or beside model.py")
    if file.name in families():
        return families()[file.name]
    if file.stem in sys.modules:
        raise UserError(f"{path} has the name of a module that is loaded already: rename it")
    spec = importlib.util.spec_from_file_location(file.stem, file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module  # which dataclasses and pickle look for
    try:
        model = run_file(path, spec, module)
    except UserError:
        del sys.modules[file.stem]  # so that it can be mended and loaded again
        raise
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    family = replace(model, name=file.name, digest=digest)
    families()[file.name] = family
    return family


def run_file(path: str, spec, module) -> Family:
    """Run a file as a module, and return its MODEL. Raise UserError if it has none that works."""
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise UserError(f"{path} cannot be run: {type(error).__name__}: {error}") from error
    model = getattr(module, "MODEL", None)
    if not isinstance(model, Family) or not model.presets:
        raise UserError(f"{path} is no model: it needs MODEL = Family(...) with presets")
    check_classes(path, module, model)
    check_fields(path, model)
    return model


def check_classes(path: str, module, model: Family) -> None:
    """Raise UserError for a preset of another class than the family's, and for a class of layers
    that no preset's model has."""
    for name, preset in model.presets.items():
        if type(preset) is not model.config:
            ours, theirs = model.config.__name__, type(preset).__name__
            raise UserError(f"{path}: preset {name} is a {theirs}, and its Family is of {ours}")
    try:
        unused = unused_classes(module, model)
    except Exception as error:
        raise UserError(f"{path} builds no model: {type(error).__name__}: {error}") from error
    if unused:
        raise UserError(
            f"{path}: no preset's model has a {unused[0]}: name it in attention_type, "
            f"feed_forward_type, block_type or the configuration's build, or remove it"
        )


def unused_classes(module, model: Family) -> list[str]:
    """Return the classes of layers in a file that occur in no model of its presets."""
    used = set()
    with torch.device("meta"):
        for preset in model.presets.values():
            used |= {type(part) for part in preset.build().modules()}
    found = []
    for name, kind in vars(module).items():
        is_layer = isinstance(kind, type) and issubclass(kind, nn.Module)
        if is_layer and kind.__module__ == module.__name__:
            if not any(issubclass(part, kind) for part in used):
                found.append(name)
    return found


def check_fields(path: str, model: Family) -> None:
    """Raise UserError for a value of a field that a checkpoint could not give back."""
    for preset in model.presets.values():
        for name in sorted(own_fields(type(preset))):
            if not can_be_kept(getattr(preset, name)):
                problem = f"{path}: a checkpoint cannot hold {name} = {getattr(preset, name)!r:.50}"
                raise UserError(f"{problem}: write a number, a string or a bool")


def can_be_kept(value: Any) -> bool:
    """Return whether a checkpoint's config.json gives back this value of a field."""
    if isinstance(value, float):
        return math.isfinite(value)
    return value is None or isinstance(value, int | str)
