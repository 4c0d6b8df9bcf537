"""Work of an operator from its recorded inputs: FLOPs, bytes and dtype of one call, from
shapes and types.

FLOPs count as torch.utils.flop_counter does: 2 per multiply-add of matrix products,
convolutions and attention (causal attention counted dense), nothing else. Bytes are the
inputs' plus the outputs' where these follow from the shapes: what a kernel moves that
reads and writes every tensor once: one that is expanded, or whose windows overlap, has
no more bytes than its strides span. Caches and repeated reads are not seen, and of
reductions only the inputs count. Traces have shapes when they were made with
`record_shapes=True`.
"""

import json
from functools import cache, partial
from math import nan, prod
from typing import NamedTuple

import numpy as np
import pandas as pd

from madmax_lib import catalog
from madmax_lib.traces.read.values import dtype_bytes, recorded_dtype

_ARITHMETIC = {
    "double": "fp64",
    "float": "fp32",
    "half": "fp16",
    "bfloat16": "bf16",
    "char": "int8",
}
# a third input of others is the output, given as out=
_THREE_INPUTS = ("addcmul", "addcdiv", "where", "lerp", "clamp")


class _Cost(NamedTuple):
    """Work of one call. flops and moved_bytes: NaN where unknown. dtype: of the
    arithmetic, as in `specs.Device`.
    """

    flops: float = nan
    moved_bytes: float = nan
    dtype: str = ""


class _Inputs(NamedTuple):
    """Inputs of a call: shape and bytes per element of each (0 for what is no tensor),
    numbers as recorded, strides.
    """

    shapes: list
    sizes: list[int]
    inputs: list[str]
    strides: list

    def elements(self, position):
        is_tensor = position < len(self.shapes) and self.sizes[position]
        return prod(self.shapes[position]) if is_tensor else 0

    def bytes(self, *positions):
        """Bytes of the inputs at some positions, of all inputs where none is named."""
        there = range(len(self.shapes))
        stored = (
            self._stored(position) * self.sizes[position]
            for position in positions or there
            if position in there
        )
        return float(sum(stored))

    def like(self, *positions):
        """Bytes of new tensors of the shapes and types of some inputs."""
        return float(
            sum(
                self.elements(position) * self.sizes[position] for position in positions
            )
        )

    def _stored(self, position):
        """Elements in memory: an expanded dimension has stride 0, and windows that
        overlap share theirs.
        """
        shape = self.shapes[position]
        strides = self.strides[position] if position < len(self.strides) else []
        elements = self.elements(position)
        if not elements or not _is_shape(strides) or len(strides) != len(shape):
            return elements
        # Stride 0 repeats one element: such dimensions take no memory.
        pairs = [pair for pair in zip(shape, strides, strict=True) if pair[1]]
        # Windows that overlap span less than their elements: from the first to the last
        # element is 1 + sum (length - 1) stride.
        span = 1 + sum((length - 1) * stride for length, stride in pairs)
        return min(prod(length for length, _ in pairs), span)

    def number(self, position, default=None):
        """A recorded number, flag or list of them; the default where the operator has
        no such input.
        """
        if position is None:
            return default
        return json.loads(self.inputs[position].lower())

    def per_dimension(self, position, default, rank):
        """One recorded number per dimension; torch lets one stand for all."""
        value = self.number(position, default)
        values = value if isinstance(value, list) else [value]
        return values if len(values) == rank else values * rank


def _operator_cost(name, shapes, types="", inputs="", strides=""):
    """Work of one call of an operator from the JSON texts of
    `Timeline.side_tables["operators"]`.

    All NaN for an operator without formula or with inputs that do not fit it; a
    convolution needs `inputs` (strides).

    >>> _operator_cost("aten::mm", "[[4,8],[8,2]]", '["c10::Half","c10::Half"]')
    _Cost(flops=128.0, moved_bytes=112.0, dtype='fp16')
    """
    # Operators of other libraries may have the same bare name and other inputs.
    library, _, bare = name.rpartition("::")
    if library not in ("aten", "flash_attn") or bare not in _rules():
        return _Cost()
    try:
        call, dtype = _read(shapes, types, inputs, strides)
        flops, moved_bytes = _rules()[bare](bare, call)
        return _Cost(
            float(flops), float(moved_bytes) if dtype is not None else nan, dtype or ""
        )
    except (
        ValueError,
        TypeError,
        IndexError,
        AttributeError,
        ArithmeticError,
        RecursionError,
        StopIteration,
    ):
        return _Cost()


def operator_costs(table: pd.DataFrame) -> pd.DataFrame:
    """flops, moved_bytes and dtype (n,) of calls (name, shapes, types, inputs,
    strides), on the same index.

    Each distinct call is worked out once: a long trace repeats a few hundred of them.
    """
    columns = ["name", "shapes", "types", "inputs", "strides"]
    texts = table[columns].astype(object).fillna("").astype("category")
    call = texts.groupby(columns, sort=False, observed=True).ngroup()
    distinct = texts.drop_duplicates().itertuples(index=False)
    costs = [_operator_cost(*map(str, each)) for each in distinct]
    costs = pd.DataFrame(costs, columns=_Cost._fields)
    costs = costs.astype({"flops": float, "moved_bytes": float, "dtype": object})
    return costs.iloc[call].set_index(table.index)


def _read(shapes, types, inputs="", strides=""):
    """A call's inputs and its dtype: of the first tensor of floating point, None where
    types are not recorded.
    """
    sides = [side if _is_shape(side) else [] for side in json.loads(shapes)]
    kinds = [_dtype(kind) for kind in json.loads(types)] if types else []
    sizes = [size for _, size in kinds] if types else [1] * len(sides)
    dtype = next((kind for kind, _ in kinds if kind), "") if types else None
    numbers, steps = (json.loads(text) if text else [] for text in (inputs, strides))
    return _Inputs(sides, sizes, numbers, steps), dtype


def _dtype(kind):
    """Dtype of the arithmetic and bytes per element of a recorded type, 0 for what is
    no tensor.

    >>> _dtype("c10::Float8_e4m3fn"), _dtype("long int"), _dtype("ScalarList")
    (('fp8', 1), ('', 8), ('', 0))
    """
    name = recorded_dtype(str(kind))
    arithmetic = "fp8" if name.startswith("float8") else _ARITHMETIC.get(name, "")
    return arithmetic, int(dtype_bytes(name)) if name else 0


def _is_shape(side):
    return isinstance(side, list) and all(
        isinstance(length, int) and length >= 0 for length in side
    )


def _product(left, right):
    """Multiply-adds and output elements of a matrix product, broadcast over leading
    dimensions as torch.matmul does.
    """
    *batch, m, k = left if len(left) > 1 else [1, *left]
    *batch_right, k_right, n = right if len(right) > 1 else [*right, 1]
    if k != k_right:
        raise ValueError(f"inner dimensions {k} and {k_right} differ")
    # Batches that differ broadcast: a batch of 1 is repeated.
    outer = prod(np.broadcast_shapes(tuple(batch), tuple(batch_right)))
    return outer * m * n * k, outer * m * n


def _matrices(name, call):
    """Products of two matrices, of batches of them, and linear layers."""
    if name == "linear":
        *rows, features = call.shapes[0]
        work, out = _product([prod(rows), features], call.shapes[1][::-1])
        return 2 * work, call.bytes() + out * call.sizes[0]
    # What stands before the factors (of addmm) is added to the product: read, not
    # multiplied.
    first = _places()[name]["first"]
    work, out = _product(call.shapes[first], call.shapes[first + 1])
    size = call.sizes[first]
    if name == "_int_mm":
        size = 4  # int8 factors are summed in int32
    elif "scaled" in name:
        size = 2  # fp8 products come out as bf16
    return 2 * work, call.bytes(*range(first + 2)) + out * size


def _grouped(name, call):
    """Products of groups: of rows, of columns or of a summed dimension (two-dimensional
    sides), or one of each.

    Every row counts as a row of some group; where the last offset leaves rows out, they
    are padding.
    """
    left, right = call.shapes[:2]
    if left[-1] != right[-2]:
        raise ValueError(f"inner dimensions {left[-1]} and {right[-2]} differ")
    both = len(left) == len(right) == 3
    neither = len(left) == len(right) == 2
    groups = 1
    if both:
        groups = left[0]
    elif neither:  # the summed dimension is cut by as many offsets as there are groups
        groups = call.shapes[4 if "scaled" in name else 2][0]
    out = left[-2] * right[-1]
    # fp8 factors, bf16 output
    size = 2 if "scaled" in name else call.sizes[0]
    flops = 2 * out * left[-1] * (groups if both else 1)
    return flops, call.bytes(0, 1) + out * groups * size


def _convolution(name, call):
    """Every output element is a product over the kernel and the channels of its group."""
    where = _places()[name]
    weight = call.shapes[1]
    rank = len(weight) - 2
    image = call.shapes[0]
    image = image if len(image) == rank + 2 else [1, *image]
    if call.number(where.get("transposed"), False):
        return 2 * image[0] * prod(image[2:]) * prod(weight), nan
    stride = call.per_dimension(where["stride"], 1, rank)
    padding = call.per_dimension(where["padding"], 0, rank)
    dilation = call.per_dimension(where.get("dilation"), 1, rank)
    sides = zip(image[2:], weight[2:], stride, padding, dilation, strict=True)
    # out = (side + 2 padding - dilation (kernel - 1) - 1) / stride + 1, rounded down
    #                                                              [torch.nn.Conv2d]
    out = [
        (side + 2 * pad - dil * (kernel - 1) - 1) // step + 1
        for side, kernel, step, pad, dil in sides
    ]
    windows = image[0] * prod(out)
    out_bytes = windows * weight[0] * call.sizes[0]
    return 2 * windows * prod(weight), call.bytes() + out_bytes


def _convolution_backward(_, call):
    """Gradients of the input and of the weight cost what the forward pass does, each.

    FlopCounterMode counts the weight's as if groups were 1; here it is divided by them,
    as the input's.
    """
    to_input, to_weight, _ = call.number(10)
    gradient, image, weight = call.shapes[:3]
    # Output elements are windows; of a transposed convolution, those of the input are.
    windows = image if call.number(7) else gradient
    once = 2 * windows[0] * prod(windows[2:]) * prod(weight)
    out_bytes = call.like(1) * to_input + call.like(2) * to_weight
    return once * (to_input + to_weight), call.bytes() + out_bytes


def _attention(name, call):
    """Two products forward, five backward (the scores are made again), over all pairs
    of tokens.
    """
    backward = name.endswith("_backward")
    heads_first = name.startswith("_scaled_dot_product")
    if name.startswith("_efficient") and call.elements(6 if backward else 4):
        raise ValueError("sequences of unknown lengths, packed into one")
    # Backward calls have the gradient of the output first.
    query, key, value = call.shapes[backward : backward + 3]
    batch, heads, tokens, width = query  # or tokens and heads
    # Multiply-adds of a query-key pair count 2; the width of the heads comes below.
    pairs = 2 * batch * heads * tokens * key[2 if heads_first else 1]
    if backward:
        return pairs * (3 * width + 2 * value[-1]), call.bytes() + call.like(1, 2, 3)
    out_bytes = batch * heads * tokens * value[-1] * call.sizes[0]
    return pairs * (width + value[-1]), call.bytes() + out_bytes


def _rows(name, call):
    """Looking up rows reads and writes those rows only; the gradient of a table is
    written whole.
    """
    if name == "embedding_dense_backward":
        return nan, call.bytes() + call.number(2) * call.shapes[0][-1] * call.sizes[0]
    index = 1 if name == "embedding" else 2
    if name == "index_select":
        axis = call.number(1)
        row = call.elements(0) // call.shapes[0][axis]
    else:
        row = call.shapes[0][-1]
    return nan, call.bytes(index) + 2 * call.elements(index) * row * call.sizes[0]


def _elements(name, call, out_size=0):
    """One pass over the elements: every input is read, the output has the shape they
    broadcast to. out_size: bytes of its elements, where they are not the inputs'.
    """
    count = 3 if name in _THREE_INPUTS else 2
    tensors = [number for number, size in enumerate(call.sizes) if size][:count]
    shapes = [tuple(call.shapes[number]) for number in tensors]
    # A tensor without dimensions, a number, does not decide about the type.
    sizes = [call.sizes[n] for n in tensors if call.shapes[n] or len(tensors) == 1]
    size = out_size or max(sizes)
    return nan, call.bytes(*tensors) + prod(np.broadcast_shapes(*shapes)) * size


def _like_first(_, call):
    """One pass that writes a tensor like the first; inputs are read."""
    first = next(number for number, size in enumerate(call.sizes) if size)
    return nan, call.bytes() + call.like(first)


# rules by the words of the table: (name, inputs) -> (FLOPs, bytes)
_RULES = {
    "matrix product": _matrices,
    "grouped product": _grouped,
    "convolution backward": _convolution_backward,
    "attention": _attention,
    "rows": _rows,
    "broadcast": _elements,
    "broadcast to bool": partial(_elements, out_size=1),
    "like first": _like_first,
    "inputs": lambda _, call: (nan, call.bytes()),
}


@cache
def _places():
    """Places of the first factor, or of a convolution's numbers, among the inputs of
    each operator, by `data/operator_inputs.csv`.
    """
    table = catalog.table("operator_inputs").set_index("operator")
    return {
        operator: {name: int(text) for name, text in row.items() if text.isdigit()}
        for operator, row in table.iterrows()
    }


@cache
def _rules():
    """Rules by operator: those of matrices and convolutions by the places of their inputs,
    of others by `data/operator_bytes.csv`.
    """
    table = catalog.table("operator_bytes")
    moves = dict(zip(table["operator"], table["moves"], strict=True))
    rules = {operator: _RULES[what] for operator, what in moves.items()}
    # In place, such as add_: the inputs are read, the first is written.
    pointwise = [name for name, what in moves.items() if what.startswith("broadcast")]
    rules |= {f"{name}_": _like_first for name in pointwise}
    for operator, places in _places().items():
        rules[operator] = _matrices if "first" in places else _convolution
    return rules
