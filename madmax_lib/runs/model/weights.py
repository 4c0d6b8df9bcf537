"""Published weights to start a run from: Hugging Face files of GPT-2, Qwen2 and ViT under
this project's names.

A directory as downloaded: model.safetensors, or its shards with
model.safetensors.index.json. The format is read here
[github.com/huggingface/safetensors: eight bytes of header length, a JSON header, raw
tensors], tensor by tensor, so that a rank reads only its own stage. GPT-2 stores
queries, keys and values as one matrix and all matrices transposed.
"""

import json
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from madmax_lib import catalog
from madmax_lib.catalog import Transformer

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# prefix of a model saved with its head around it, name of a layer; names in it stand in
# data/published_weights.csv
_FAMILIES = {
    "gpt2": ("transformer.", "h.{}."),
    "qwen2": ("model.", "layers.{}."),
    "vit": ("vit.", "encoder.layer.{}."),
}
# GPT-2's one matrix has the three of them, in this order
_THIRD = {"attention.query": 0, "attention.key": 1, "attention.value": 2}


class Weights:
    """Published weights of a model. Raises FileNotFoundError if the directory has none."""

    def __init__(self, directory: str | Path, spec: Transformer):
        self.folder = Path(directory)
        self.spec = spec
        self.family = "gpt2" if spec.positions == "learned" else "qwen2"
        if spec.image:
            self.family = "vit"
        files = sorted(self.folder.glob("*.safetensors"))
        if not files:
            raise FileNotFoundError(
                f"{self.folder}: no .safetensors file with weights of {spec.name}"
            )
        prefix, self._layer = _FAMILIES[self.family]
        names = catalog.table("published_weights").set_index("family").loc[self.family]
        self._names = dict(zip(names["ours"], names["theirs"], strict=True))
        self._tensors: dict[str, Tensor] = {}
        for file in files:
            for name, tensor in _tensors_of(file).items():
                self._tensors[name.removeprefix(prefix)] = tensor

    def fill(self, module: nn.Module, prefix: str) -> None:
        """Overwrite the parameters of a module named `prefix` in the whole model.

        A classifier that is missing or has another number of classes is left as it is,
        as for a new task. Raises ValueError for any other missing or misshapen tensor.
        """
        for name, parameter in module.named_parameters():
            published = self._read(f"{prefix}.{name}", parameter)
            if published is not None:
                with torch.no_grad():
                    parameter.copy_(published)

    def _read(self, name, parameter):
        layer = ""
        if name.startswith("layers."):
            _, number, name = name.split(".", 2)
            layer = self._layer.format(number)
        part, _, kind = name.rpartition(".")
        # a row of the table is a parameter, or a module with weight and bias
        theirs = self._names.get(name) or f"{self._names.get(part, part)}.{kind}"
        theirs = layer + theirs
        is_classifier = part == "head" and self.spec.image
        if theirs not in self._tensors:
            if is_classifier:
                return None
            if name == "head.weight" and self.spec.tied:
                return self._read("embedding.tokens.weight", parameter)
            raise ValueError(f"{self.folder}: {theirs} is missing")
        tensor = self._tensors[theirs]
        if self.family == "gpt2" and layer:
            if tensor.ndim == 2:  # its layers are convolutions of width 1: (in, out)
                tensor = tensor.T
            if part in _THIRD:
                tensor = tensor.chunk(3)[_THIRD[part]]
        if is_classifier and tensor.shape != parameter.shape:
            return None
        if tensor.numel() != parameter.numel():
            shapes = f"{tuple(tensor.shape)}, not {tuple(parameter.shape)}"
            raise ValueError(f"{self.folder}: {theirs} is {shapes}")
        return tensor.reshape(parameter.shape)  # ViT's class token is (1, 1, hidden)


def _tensors_of(file):
    """The tensors of a file by name; the disk is read when a tensor is."""
    content = np.memmap(file, mode="c")  # bytes; what is written to them stays here
    first = 8 + int(content[:8].view("<u8")[0])  # offsets count from the header's end
    header = json.loads(content[8:first].tobytes())
    header.pop("__metadata__", None)
    tensors = {}
    for name, about in header.items():
        # masks of attention and the like are in other types
        if dtype := _DTYPES.get(about["dtype"]):
            begin, end = about["data_offsets"]
            part = torch.from_numpy(content[first + begin : first + end])
            tensors[name] = part.view(dtype).reshape(about["shape"])
    return tensors
