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

from madmax_lib.timeline import BUSY_KINDS, Timeline
from madmax_lib.timeline.kinds import collective_names
from madmax_lib.traces import calls
from madmax_lib.traces.operators.ops import operator_calls
from madmax_lib.traces.read.values import dtype_bytes

_C10D = re.compile(r"^c10d::+(?!recv)(\w+)")  # a message is counted where it is sent
# torch's attention calls a library's, which is recorded too: the first with any counts
_ATTENTION = (
    r"^aten::_scaled_dot_product_(?:\w+_)?attention",
    r"^aten::_(?:flash|efficient)_attention_(?:forward|backward)$",
    r"flash_attn::_flash_attn_(?:varlen_)?(?:forward|backward)$",
    r"^aten::_softmax(?:_backward_data)?$",  # over scores in memory
)
_SHAPE = "batch heads kv_heads tokens head_dim"


def _product(each):
    # what is added comes first; a third side is the output of an expert's part
    (m, k), (_, n) = each.dims["addmm" in each.name :][:2]
    return [] if each.name == "aten::mm" and len(each.dims) > 2 else [m, k, n]


def _attention(each):
    is_back = "backward" in each.name
    if "softmax" in each.name:  # scores (B, H, S, S) tell no width of a head
        batch, heads, tokens, _ = each.dims[0]
        return [each.start_ns, is_back, batch, heads, heads, tokens, 0]
    # the gradient of the output comes first; others have tokens before heads
    query, key = each.dims[is_back : is_back + 2]
    heads = 1 if "_scaled_dot_product" in each.name else 2
    batch, *_, width = query
    shape = [batch, query[heads], key[heads], query[3 - heads], width]
    return [each.start_ns, is_back, *shape]


# table: names of operators, columns, how they follow from the inputs' dimensions
_TABLES = {
    "products": (r"^aten::(?:mm|addmm|_int_mm|_scaled_mm)$", "m k n", _product),
    "lookups": (
        r"^aten::embedding$",
        "rows samples",
        lambda e: [d[0] for d in e.dims[:2]],
    ),
    "patches": (
        r"^aten::conv2d$",
        "samples edge patch",
        lambda e: (
            [e.dims[0][0], e.dims[0][2], e.dims[1][2]] if e.dims[0][1] == 3 else []
        ),
    ),
    "losses": (
        r"^aten::(?:nll_loss(?:2d)?_forward|cross_entropy_loss)$",
        "classes",
        lambda e: e.dims[0][1:],
    ),
    "routers": (
        r"^aten::topk$",
        "experts active",
        lambda e: [e.dims[0][1], int(json.loads(e.inputs)[1])],
    ),
    # rows of tokens by weights (experts, k, n), forward or of the inputs' gradients
    "grouped": (
        r"^aten::_(?:scaled_)?grouped_mm$",
        "experts k n",
        lambda e: e.dims[1] if len(e.dims[0]) == 2 and len(e.dims[1]) == 3 else [],
    ),
}


@dataclass(frozen=True)
class Observed:
    """One step of a trace, its tables with a column `rank`.

    names: of labels and operators. messages: collective, elements, group_size. The
    others hold the columns of `_TABLES`, attentions start_ns, backward and the shape of
    the queries.
    """

    timeline: Timeline
    names: pd.Series
    messages: pd.DataFrame
    attentions: pd.DataFrame
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
        inputs = {text: json.loads(text or "[]") for text in texts.unique()}
        for text, sides in inputs.items():
            # of a list of tensors the first
            firsts = [s[0] if s and isinstance(s[0], list) else s for s in sides]
            inputs[text] = [side for side in firsts if side]
        dims = texts.map(inputs)
        table = table.assign(name=table["name"].astype(str), dims=dims)
        table = table[dims.map(len) > 0].sort_values(["rank", "start_ns"])
        labels = spans[(spans["kind"] == "annotation") & (spans["stream"] < 0)]
        for pattern in _ATTENTION:
            columns = f"start_ns backward {_SHAPE}"
            attentions = _table(table, pattern, columns, _attention)
            if len(attentions):
                break
        tables = {name: _table(table, *how) for name, how in _TABLES.items()}
        # a distributed tensor's product is recorded around that of its local part
        work, _ = operator_calls(timeline)
        work = table[table["row"].isin(work.loc[work["flops"].notna(), "row"])]
        pattern, *how = _TABLES["products"]
        inner = work[work["name"].str.contains(pattern)]
        tables["products"] = _rows(inner, *how)
        # positions are looked up in a table of their own, once for all samples
        rows = tables["lookups"]["rows"]
        tables["lookups"] = tables["lookups"][rows == rows.max()]
        return cls(
            timeline=timeline,
            names=pd.Series([*labels["name"], *table["name"]], dtype=str),
            messages=_messages(timeline, table, step),
            attentions=attentions,
            **tables,
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


def _table(operators, pattern, columns, read):
    """Rows of the operators with such names, without those inside of one: autocast calls
    an operator again.
    """
    table = operators[operators["name"].str.contains(pattern)]
    ends_ns = table["start_ns"] + table["dur_ns"]
    # latest end of those that began before, on the same rank
    before_ns = ends_ns.groupby(table["rank"]).transform(lambda ns: ns.cummax().shift())
    return _rows(table[~(table["start_ns"] < before_ns)], columns, read)


def _rows(table, columns, read):
    rows = []
    for each in table.itertuples():
        try:
            values = read(each)
        except (ValueError, IndexError, TypeError):
            continue  # an operator of other inputs under the same name
        if values:
            rows.append((each.rank, *values))
    return pd.DataFrame(rows, columns=["rank", *columns.split()])


def _messages(timeline, operators, step):
    """Collectives of the step: rank, collective, elements, group_size.

    On a GPU the calls with their metadata. gloo's rows tell neither groups nor
    reduce-scatters, but c10d's operators have both sides of a message: the larger is as
    many times the smaller as the group has ranks.
    """
    columns = ["rank", "collective", "elements", "group_size"]
    spans = timeline.spans
    launched = operators[operators["name"].str.match(_C10D)]
    if (
        spans["kind"].isin(BUSY_KINDS) & (spans["stream"] >= 0)
    ).any() or launched.empty:
        table = calls(timeline)
        table = table[table["step"] == step]
        each_bytes = table["dtype"].map(lambda dtype: dtype_bytes(dtype) or np.nan)
        return table.assign(elements=table["size_bytes"] / each_bytes)[columns]
    rows = []
    for each in launched.itertuples():
        sizes = [prod(side) for side in each.dims]
        (kind,) = collective_names([f"xccl:{_C10D.match(each.name)[1]}"])
        rows.append((each.rank, kind, max(sizes), max(sizes) // max(min(sizes), 1)))
    return pd.DataFrame(rows, columns=columns)
