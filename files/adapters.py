"""Save, open, load and merge adapters in the format of PEFT, Hugging Face's adapter library.

    adapter_config.json           rank, alpha, dropout, and the matrices that have an adapter
    adapter_model.safetensors     A and B of every such matrix, and DoRA's magnitudes

So peft and transformers load adapters trained here, and theirs load here. In these files matrices
have Hugging Face's names, and B and magnitudes of wq and wk have Hugging Face's order of rows.
"""

import json
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from files.formats import all_names, check_weights, hf_name, to_hf_rows, to_meta_rows
from files.safetensors import StoredTensor, Weights, open_safetensors, save_safetensors
from lora import LoRA, adapter_settings, adapters, add_adapters, all_matrices, merged_weight
from model import Llama, LlamaConfig
from models.family import family_of
from plumbing.json_files import JsonFile
from plumbing.messages import UserError
from techniques.nf4 import rounded

PEFT_FILES = ("adapter_config.json", "adapter_model.safetensors")

# Parts of names that wrappers add, and that say nothing of a tensor.
WRAPPERS = "default module _orig_mod _fsdp_wrapped_module _checkpoint_wrapped_module".split()
# The accepted values of settings in adapter_config.json. Most of these settings belong to features
# that lora.py does not have, and must be off.
ACCEPTED = dict(
    peft_type=("LORA",),
    bias=("none",),
    use_rslora=(False, True, None),
    use_dora=(False, True, None),
    # Other initializations, such as pissa, change the base model.
    init_lora_weights=(True, False, "gaussian", "orthogonal", "eva"),
    **dict.fromkeys(
        "lora_bias fan_in_fan_out rank_pattern alpha_pattern modules_to_save "
        "layer_replication trainable_token_indices target_parameters use_qalora "
        "alora_invocation_tokens arrow_config use_bdlora".split(),
        (None, False, {}, []),
    ),
)


def peft_name(name: str, config: LlamaConfig) -> str:
    """Return PEFT's name of an adapter's parameter. Raise UserError where PEFT's files have none.

    layers.3.attention.wq.lora_A ->
    base_model.model.model.layers.3.self_attn.q_proj.lora_A.weight"""
    matrix, kind = name.rsplit(".", 1)
    kind = "lora_magnitude_vector" if kind == "lora_magnitude" else f"{kind}.weight"
    try:
        in_file = hf_name(f"{matrix}.weight", all_names(config)).removesuffix("weight")
        return f"base_model.model.{in_file}{kind}"
    except UserError as error:
        advice = f"leave {matrix.split('.')[-1]} out of --targets"
        raise UserError(f"{error}, so no file holds its adapter: {advice}")


def canonical_name(name: str) -> str:
    """Return PEFT's name of a tensor that was saved with other parts around it: without PEFT's own,
    or with those that torch.compile, DDP, FSDP, checkpointing or PEFT's models in memory add.

    model.layers.3.self_attn.q_proj.lora_A.default.weight ->
    base_model.model.model.layers.3.self_attn.q_proj.lora_A.weight"""
    parts = [part for part in name.split(".") if part not in WRAPPERS]
    if "layers" in parts:
        layers = parts.index("layers")
        if set(parts[:layers]) <= {"base_model", "model"}:
            parts[:layers] = ["base_model", "model", "model"]
    return ".".join(parts).replace("lora_magnitude_vector.weight", "lora_magnitude_vector")


def _peft_target(target: str, config: LlamaConfig) -> str:
    """Return PEFT's name of a target: wq -> q_proj."""
    names = all_names(config).items()
    return next(hf for ours, hf in names if ours.endswith(f".{target}")).split(".")[-1]


# ----------------------------------------------------------------------------------------- saving


@torch.no_grad()
def gather_adapters(
    model: Llama, holders: Iterable[int] = (0,), group: dist.ProcessGroup | None = None
) -> dict[str, Tensor]:
    """All-gather every factor and return copies on the CPU, by name. All ranks call it together.

    In a pipeline a rank returns those of its layers, but rank 0 all of them: `holders` are ranks
    that together have all, and send theirs to it."""
    factors = {}
    for name, parameter in adapters(model).items():
        full = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        factors[name] = full.to("cpu", copy=True)
    for holder in holders:
        box = [factors]
        if holder > 0 and dist.get_rank() == holder:
            dist.send_object_list(box, 0, group)
        elif holder > 0 and dist.get_rank() == 0:
            dist.recv_object_list(box, holder, group)
            factors |= box[0]
    return factors


def save_adapter(
    directory: Path, lora: LoRA, config: LlamaConfig, factors: dict[str, Tensor], base: str
) -> None:
    """Write PEFT's two files. `base` is the path of the model the adapter was trained on."""
    stored = {}
    for name, factor in factors.items():
        stored[peft_name(name, config)] = StoredTensor.of(to_hf_rows(name, config, factor))
    save_safetensors(directory / PEFT_FILES[1], stored, {"format": "pt"})
    content = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": int(lora.alpha) if lora.alpha == int(lora.alpha) else lora.alpha,
        "lora_dropout": lora.dropout,
        "use_rslora": lora.rslora,
        "use_dora": lora.dora,
        "target_modules": [_peft_target(target, config) for target in lora.targets],
        "bias": "none",
        "inference_mode": True,
    }
    (directory / PEFT_FILES[0]).write_text(json.dumps(content, indent=1), "utf-8")


# ---------------------------------------------------------------------------------------- loading


def is_adapter(directory: Path) -> bool:
    return (directory / PEFT_FILES[0]).is_file()


def open_adapter(directory: Path, config: LlamaConfig) -> tuple[LoRA, Weights]:
    """Return an adapter's settings and its factors, with lora.py's names and Meta's order of rows.

    Raises UserError if it does not fit a Llama of this configuration, or is not plain LoRA on the
    seven matrices of a block."""
    path, file = (directory / name for name in PEFT_FILES)
    if not path.is_file() or not file.is_file():
        raise UserError(f"no adapter in '{directory}': it has no {' and '.join(PEFT_FILES)}")
    content = JsonFile(path)
    found: Weights = {}
    for stored_as, tensor in open_safetensors(file).items():
        name = canonical_name(stored_as)
        if name in found:
            raise UserError(f"{file} has {name} by two names, one of which is {stored_as}")
        found[name] = tensor
    for key, values in ACCEPTED.items():
        value = content.get(key, values[0])
        if value not in values:
            raise UserError(f"{path} has {key} {value!r:.80}: here only LoRA and DoRA work")

    adapted = set()  # matrices that have factors in the file
    for name in found:
        parts = name.split(".")
        if outside := {"embed_tokens", "lm_head"}.intersection(parts):
            raise UserError(
                f"{file} changes {min(outside)}: here an adapter changes matrices of blocks, and "
                f"its base has the vocabulary that it was made with"
            )
        matrix, is_factor, _ = name.partition(".lora_")
        if is_factor:
            adapted.add(matrix)
    in_file = {matrix.split(".")[-1] for matrix in adapted}  # q_proj, k_proj, ...
    possible = family_of(config).targets(config)
    targets = {_peft_target(target, config): target for target in possible}  # q_proj -> wq
    listed = content.get("target_modules")
    for name in listed if isinstance(listed, list) else []:
        matrix = str(name).split(".")[-1]
        if matrix in (*targets, "lm_head") and matrix not in in_file:
            raise UserError(f"{file} has no factors for {matrix}")
    dropout = content.get("lora_dropout")
    lora = LoRA(
        rank=content.checked("r", content["r"], int),
        alpha=content.checked("lora_alpha", content["lora_alpha"], float),
        dropout=content.checked("lora_dropout", dropout, float, limit=1) if dropout else 0.0,
        rslora=bool(content.get("use_rslora")),
        dora=bool(content.get("use_dora")),
        targets=tuple(target for name, target in targets.items() if name in in_file),
    )
    with torch.device("meta"):
        model = config.build()
        add_adapters(model, lora)
    shapes = {name: tuple(factor.shape) for name, factor in adapters(model).items()}
    # A matrix without factors is not adapted: they are zero. But DoRA's magnitudes would not be.
    for name, shape in shapes.items():
        if peft_name(name, config).partition(".lora_")[0] not in adapted:
            if lora.dora:
                raise UserError(f"{file} has no {name}: here DoRA is on all layers")
            found[peft_name(name, config)] = StoredTensor.of(torch.zeros(shape))
    named = {name: peft_name(name, config) for name in shapes}
    check_weights(found, {named[name]: shape for name, shape in shapes.items()}, file)
    factors = {}
    for name in shapes:
        factors[name] = found[named[name]].map(partial(to_meta_rows, name, config))
    return lora, factors


def metadata_file(directory: Path) -> Path:
    """Return the file with the metadata of a checkpoint: run.json beside an adapter, where
    transformers would take config.json for a model's."""
    return directory / ("run.json" if is_adapter(directory) else "config.json")


def bits_of_base(directory: Path) -> int:
    """Return in how many bits the base was when an adapter was trained beside it. Our checkpoints
    say it, PEFT's files do not."""
    return recorded(directory, "flags").get("base_bits", 16)


def recorded(directory: Path, what: str) -> dict:
    """Return the "flags" or "facts" of the run that trained an adapter; none in PEFT's files."""
    path = metadata_file(directory)
    found = JsonFile(path).get(what) if path.is_file() else None
    return found if isinstance(found, dict) else {}


@torch.no_grad()
def load_adapter(model: Llama, directory: str | Path) -> None:
    """Load an adapter into a model that holds the base's weights, in place.

    Layers of other types than LoRALinear become adapters' layers. Their weights are rounded to what
    the adapter saw, if the base was in 4 bits when it was trained."""
    lora, stored = open_adapter(Path(directory), model.config)
    if adapter_settings(model) != lora:
        if bits_of_base(Path(directory)) == 4:
            for name, layer in model.named_modules():
                if name.rpartition(".")[2] in all_matrices(model.config):
                    layer.weight.copy_(rounded(layer.weight))
        add_adapters(model, lora)
    for name, factor in adapters(model).items():
        factor.copy_(stored[name].read())


def merged_weights(weights: Weights, adapter: Path, config: LlamaConfig) -> Weights:
    """Return the weights of a base with an adapter added; a matrix is merged when it is read.

    The base is what the adapter saw in training: rounded, if it was in 4 bits. Merged matrices are
    rounded to the base's dtype. In bfloat16 that loses a part of what the adapter changes."""
    lora, stored = open_adapter(adapter, config)
    in_4_bits = bits_of_base(adapter) == 4
    kinds = ["lora_A", "lora_B", "lora_magnitude"] if lora.dora else ["lora_A", "lora_B"]

    def merge(layer: str, weight: Tensor) -> Tensor:
        base = weight.to(torch.promote_types(weight.dtype, torch.float32))
        if in_4_bits:
            base = rounded(base)
        if layer.rpartition(".")[2] in lora.targets:
            factors = [stored[f"{layer}.{kind}"].read() for kind in kinds]
            base = merged_weight(base, lora.scale, *factors)
        return base.to(weight.dtype)

    matrices = all_matrices(config)
    merged = {}
    for name, weight in weights.items():
        layer = name.removesuffix(".weight")
        if layer.rpartition(".")[2] in matrices:
            weight = weight.map(partial(merge, layer))
        merged[name] = weight
    return merged
