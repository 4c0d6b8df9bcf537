"""Published weights to start a run from: Hugging Face files of GPT-2, Qwen2 and ViT under
this project's names.

A directory as downloaded: model.safetensors, or its shards with
model.safetensors.index.json. The format is read here
[github.com/huggingface/safetensors: eight bytes of header length, a JSON header, raw
tensors], tensor by tensor, so that a rank reads only its own stage. GPT-2 stores
queries, keys and values as one matrix and all matrices transposed.
"""

import json
import struct
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from madmax_lib import catalog
from madmax_lib.catalog.models import Transformer

__all__ = ["Weights"]

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


@dataclass(frozen=True)
class _Entry:
    """A tensor in a file: its dtype in the format's words, its shape, and the bytes it
    takes.
    """

    file: Path
    dtype: str
    shape: list[int]
    begin: int
    end: int

    def read(self):
        with self.file.open("rb") as stream:
            stream.seek(self.begin)
            content = bytearray(stream.read(self.end - self.begin))
        values = torch.frombuffer(content, dtype=_DTYPES[self.dtype])
        return values.reshape(self.shape)  # the file has them row by row


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
        self._entries: dict[str, _Entry] = {}
        for file in files:
            for name, entry in _header(file).items():
                self._entries[name.removeprefix(prefix)] = entry

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
        if theirs not in self._entries:
            if is_classifier:
                return None
            if name == "head.weight" and self.spec.tied:
                return self._read("embedding.tokens.weight", parameter)
            raise ValueError(f"{self.folder}: {theirs} is missing")
        tensor = self._entries[theirs].read()
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


def _header(file):
    """The tensors of a file by name."""
    with file.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        header = json.loads(stream.read(length))
    header.pop("__metadata__", None)
    first = 8 + length  # offsets count from the end of the header
    entries = {}
    for name, tensor in header.items():
        begin, end = (first + offset for offset in tensor["data_offsets"])
        entries[name] = _Entry(file, tensor["dtype"], tensor["shape"], begin, end)
    return entries
