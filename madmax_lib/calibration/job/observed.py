"""What one traced step did: products, attention, lookups, losses and messages, with their
shapes.

Only what PyTorch itself records is read: operators with shapes, labels, collectives. A
trace without shapes (`record_shapes=False`) gives empty tables.
"""

import json
import re
from dataclasses import dataclass
from math import prod

import numpy as np
import pandas as pd

from madmax_lib.timeline.kinds import collective_names
from madmax_lib.timeline.timeline import BUSY_KINDS, Timeline
from madmax_lib.traces.comm.collectives import calls
from madmax_lib.traces.operators.ops import operator_calls
from madmax_lib.traces.read.values import dtype_bytes

_C10D = re.compile(r"^c10d::+(?!recv)(\w+)")  # a message is counted where it is sent
# torch's attention calls a library's, which is recorded too: the first with any counts
_ATTENTION = (
    r"^aten::_scaled_dot_product_(?:\w+_)?attention",
    r"^aten::_(?:flash|efficient)_attention_(?:forward|backward)$",
    r"flash_attn::_flash_attn_(?:varlen_)?(?:forward|backward)$",
)
_SHAPE = ["batch", "heads", "kv_heads", "tokens", "head_dim"]


def _product(each):
    # what is added comes first; a third side is the output of an expert's part
    (m, k), (_, n) = each.dims["addmm" in each.name :][:2]
    return () if each.name == "aten::mm" and len(each.dims) > 2 else (m, k, n)


def _patches(each):
    (samples, channels, edge, _), (_, _, patch, _), *_ = each.dims
    return (samples, edge, patch) if channels == 3 else ()


def _grouped(each):
    # rows of tokens by weights (experts, k, n), forward or of the inputs' gradients
    (_, _), (experts, k, n), *_ = each.dims
    return experts, k, n


def _router(each):
    return each.dims[0][1], int(json.loads(each.inputs)[1])


# table: names of operators, columns, how they follow from the inputs' dimensions
_TABLES = {
    "products": (r"^aten::(?:mm|addmm|_int_mm|_scaled_mm)$", "m k n", _product),
    "lookups": (r"^aten::embedding$", "rows samples", lambda e: [d[0] for d in e.dims[:2]]),
    "patches": (r"^aten::conv2d$", "samples edge patch", _patches),
    "losses": (r"^aten::(?:nll_loss(?:2d)?_forward|cross_entropy_loss)$", "classes", lambda e: e.dims[0][1:]),
    "routers": (r"^aten::topk$", "experts active", _router),
    "grouped": (r"^aten::_(?:scaled_)?grouped_mm$", "experts k n", _grouped),
}


@dataclass(frozen=True)
class Observed:
    """One step of a trace, its tables with a column `rank`.

    names: of labels and operators. messages: collective, elements, group_size. in_memory:
    attention is a softmax over scores. The others hold the columns of `_TABLES`,
    attentions start_ns, backward and the shape of the queries.
    """

    timeline: Timeline
    names: pd.Series
    messages: pd.DataFrame
    attentions: pd.DataFrame
    in_memory: bool
    products: pd.DataFrame
    lookups: pd.DataFrame
    patches: pd.DataFrame
    losses: pd.DataFrame
    routers: pd.DataFrame
    grouped: pd.DataFrame

    @classmethod
    def of(cls, timeline: Timeline) -> "Observed":
        """The last step of a timeline, all of it where no steps are marked."""
        step = (timeline.steps or [-1])[-1]
        spans = timeline.spans[timeline.spans["step"] == step]
        table = timeline.side_tables["operators"][["row", "shapes", "inputs"]]
        columns = ["rank", "name", "start_ns", "dur_ns"]
        table = table.join(spans[columns], on="row", how="inner")
        texts = table["shapes"].astype(str)
        dims = texts.map({text: _dims(text) for text in texts.unique()})
        table = table.assign(name=table["name"].astype(str), dims=dims)
        table = table[dims.map(len) > 0].sort_values(["rank", "start_ns"])
        labels = spans[(spans["kind"] == "annotation") & (spans["stream"] < 0)]
        fused = [table[table["name"].str.contains(each)] for each in _ATTENTION]
        fused = next((each for each in fused if len(each)), fused[0])
        found = {name: _table(table, *how) for name, how in _TABLES.items()}
        # a distributed tensor's product is recorded around that of its local part
        work, _ = operator_calls(timeline)
        work = table[table["row"].isin(work.loc[work["flops"].notna(), "row"])]
        pattern, *how = _TABLES["products"]
        inner = work[work["name"].str.contains(pattern)]
        found["products"] = _rows(inner, *how)
        # positions are looked up in a table of their own, once for all samples
        rows = found["lookups"]["rows"]
        found["lookups"] = found["lookups"][rows == rows.max()]
        return cls(
            timeline=timeline,
            names=pd.concat([labels["name"].astype(str), table["name"]]),
            messages=_messages(timeline, table, step),
            attentions=_fused(fused) if len(fused) else _from_scores(table),
            in_memory=fused.empty,
            **found,
        )

    @property
    def world(self) -> int:
        """Ranks of the job."""
        return max(self.timeline.meta.world_size, len(self.timeline.ranks), 1)

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a step: passes through an end of the model."""
        ends = (self.lookups, self.patches, self.losses)
        counts = [table["rank"].value_counts().max() for table in ends if len(table)]
        return int(counts[0]) if counts else 1


def _dims(text: str):
    """Dimensions of each input that is a tensor, of a list of tensors the first's."""
    sides = json.loads(text) if text else []
    first = [side[0] if side and isinstance(side[0], list) else side for side in sides]
    return [side for side in first if side]


def _table(operators: pd.DataFrame, pattern: str, columns: str, read):
    """Rows of the operators with such names, without those inside of one: autocast calls
    an operator again.
    """
    table = operators[operators["name"].str.contains(pattern)]
    ends_ns = table["start_ns"] + table["dur_ns"]
    # latest end of those that began before, on the same rank
    before_ns = ends_ns.groupby(table["rank"]).transform(lambda ns: ns.cummax().shift())
    return _rows(table[~(table["start_ns"] < before_ns)], columns, read)


def _rows(table: pd.DataFrame, columns: str, read):
    rows = []
    for each in table.itertuples():
        try:
            values = read(each)
        except (ValueError, IndexError, TypeError):
            continue  # an operator of other inputs under the same name
        if values:
            rows.append((each.rank, *values))
    return pd.DataFrame(rows, columns=["rank", *columns.split()])


def _fused(table: pd.DataFrame):
    """Attention in one kernel."""

    def read(each):
        is_back = "_backward" in each.name
        # the gradient of the output comes first
        query, key = each.dims[is_back : is_back + 2]
        # others have tokens before heads
        heads = 1 if "_scaled_dot_product" in each.name else 2
        batch, *_, width = query
        shape = batch, query[heads], key[heads], query[3 - heads], width
        return each.start_ns, is_back, *shape

    return _rows(table, " ".join(["start_ns", "backward", *_SHAPE]), read)


def _from_scores(table: pd.DataFrame):
    """Attention as products with a softmax over scores (B, H, S, S) between them."""
    widths = {}
    # queries (B x H, S, d)
    for each in table[table["name"] == "aten::bmm"].itertuples():
        batch, tokens, width = each.dims[0]
        widths.setdefault((batch, tokens), width)

    def read(each):
        batch, heads, tokens, _ = each.dims[0]
        shape = batch, heads, heads, tokens, widths[batch * heads, tokens]
        return each.start_ns, each.name.endswith("backward_data"), *shape

    table = table[table["name"].str.contains(r"^aten::_softmax(?:_backward_data)?$")]
    is_square = table["dims"].map(lambda dims: len(dims[0]) == 4)
    return _rows(table[is_square], " ".join(["start_ns", "backward", *_SHAPE]), read)


def _messages(timeline: Timeline, operators: pd.DataFrame, step: int):
    """Collectives of the step: rank, collective, elements, group_size.

    On a GPU the calls with their metadata. gloo's rows tell neither groups nor
    reduce-scatters, but c10d's operators have both sides of a message: the larger is as
    many times the smaller as the group has ranks.
    """
    columns = ["rank", "collective", "elements", "group_size"]
    spans = timeline.spans
    launched = operators[operators["name"].str.match(_C10D)]
    if (spans["kind"].isin(BUSY_KINDS) & (spans["stream"] >= 0)).any() or launched.empty:
        table = calls(timeline)
        table = table[table["step"] == step]
        width = {dtype: dtype_bytes(dtype) for dtype in table["dtype"].unique()}
        each_bytes = table["dtype"].map(width).astype(float).replace(0, np.nan)
        return table.assign(elements=table["size_bytes"] / each_bytes)[columns]
    rows = []
    for each in launched.itertuples():
        sizes = [prod(side) for side in each.dims]
        (kind,) = collective_names([f"xccl:{_C10D.match(each.name)[1]}"])
        rows.append((each.rank, kind, max(sizes), max(sizes) // max(min(sizes), 1)))
    return pd.DataFrame(rows, columns=columns)
