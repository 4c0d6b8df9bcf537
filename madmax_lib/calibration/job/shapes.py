"""Shapes of the model on one rank, from the products and the attention of a step.

Of a weight (k, n) three products of tokens T are made in a step: T k n forward, T n k for
the gradient of the input, n T k for that of the weight; a fourth where the forward pass
is computed again. Their dimensions are the same three numbers, so that counts of these
sets, over those of attention's backward pass, are how often a layer uses a weight:

    uses = products / (passes x attentions backward)
"""

from collections import Counter
from dataclasses import dataclass
from itertools import product

from madmax_lib.calibration.job.observed import Observed

# share of gradients in the products of trained weights: a third, with a fourth pass less
_TRAINED = 1 / 8


@dataclass(frozen=True)
class Shapes:
    """Sizes on one rank: as tensor and context parallelism leave them.

    rows: tokens of a micro-batch in the products. batch, heads, kv_heads, tokens,
    head_dim: of attention. hidden, ffn, gated: of the products. attentions:
    backward passes of attention on a rank. backward: false where only forward passes
    were traced. adapter: rank of LoRA's adapters, 0 without. cp: ranks that share the
    tokens of attention.
    """

    rows: int
    batch: int
    heads: int
    kv_heads: int
    tokens: int
    head_dim: int
    hidden: int
    ffn: int
    gated: bool
    attentions: int
    backward: bool
    recompute: str
    adapter: int
    cp: int


def shapes_of(seen: Observed) -> Shapes | None:
    """Shapes of a transformer; None where attention or products were not recorded."""
    attention = seen.attentions
    table = seen.products
    if attention.empty or table.empty:
        return None
    # the last micro-batch may be short
    full = attention[attention["batch"] == attention["batch"].max()]
    names = ["batch", "heads", "kv_heads", "tokens", "head_dim"]
    core = full[names].mode().iloc[0].astype(int).to_dict()
    flops = table["m"] * table["k"] * table["n"]
    rows = int(flops.groupby(table["m"]).sum().idxmax())
    rank = attention["rank"].value_counts().idxmax()
    is_back = attention.loc[attention["rank"] == rank, "backward"]
    backward = int(is_back.sum())
    forward = len(is_back) - backward
    table = table[table["rank"] == rank]
    pairs = _pairs(table, rows)
    shared = Counter()
    for pair, count in pairs.items():
        shared |= {size: shared[size] + count for size in pair}
    hidden = int(max(shared, key=shared.get))
    sizes = Counter()
    for (one, other), count in pairs.items():
        if hidden in (one, other):
            sizes[one + other - hidden] += count
    again = backward > 0 and forward >= 1.5 * backward
    attentions = backward or forward
    cp = max(round(core["batch"] * core["tokens"] / rows), 1)
    core["head_dim"] = core["head_dim"] or hidden // core["heads"]
    width = core["head_dim"] * cp
    queries = core["heads"] * width
    keys = _key_channels(core["kv_heads"] * width, queries, width, sizes)
    core["kv_heads"] = keys // width
    # queries, keys and values are one product, or three
    fused = queries + 2 * keys
    others = {queries, keys, *seen.routers["experts"]}
    adapter = _adapter_rank(table, rows, hidden, sizes, others)
    passes = 1 if not backward else 2 if adapter else 3
    # an FFN has two products, or three with a gate; of a mixture other operators tell
    choices = [passes, passes + 1] if again else [passes]
    fits = []
    for count, is_fused in product(choices, (False, True)):
        uses = {size: n / count / attentions for size, n in sizes.items()}
        projected = Counter([fused, queries] if is_fused else [queries, keys] * 2)
        left = {size: uses.get(size, 0) - projected[size] for size in uses | projected}
        # heads are used once in a step, routers once in a layer
        others = {adapter, *seen.routers["experts"]}
        inner = {s: n for s, n in left.items() if s not in others and n > 0.7}
        missed = sum(abs(n - max(round(n), 0)) for n in left.values())
        # no feed-forward part has four products
        is_strange = max(inner.values(), default=0) > 3.5
        fits.append((is_strange, missed, count, len(inner), *_inner(inner)))
    _, _, count, _, ffn, gated = min(fits)
    recompute = "none"
    if again:
        recompute = "full" if count > passes else "selective"
    return Shapes(
        **core,
        rows=rows,
        hidden=hidden,
        ffn=ffn,
        gated=gated,
        attentions=attentions,
        backward=backward > 0,
        recompute=recompute,
        adapter=adapter,
        cp=cp,
    )


def _key_channels(channels, queries, width, sizes):
    """Channels of keys: attention shows all heads where keys and values were repeated,
    but these two have the width that is used as often as the two of queries and output.
    """
    used = sizes[queries]
    if channels != queries or sizes[3 * queries] == used:
        return channels
    often = [size for size in sizes if 0.8 * used < sizes[size] < 1.2 * used]
    divisors = [size for size in often if size % width == 0 == queries % size]
    return int(min(divisors, default=queries))


def _adapter_rank(table, rows, hidden, sizes, others):
    """Rank of LoRA's A and B of several projections: a narrow size that is used as much
    as any; 0 without.
    """
    most = max(sizes.values())
    narrow = [s for s in {*sizes} - others if s <= hidden / 4 and sizes[s] >= most / 2]
    # beside adapters the wide weights are frozen: next to none has a gradient n T k
    wide = table[~table[["m", "n"]].isin(narrow).any(axis=1)]
    is_gradient = (wide["k"] == rows) & (wide["m"] != rows)
    return 0 if is_gradient.mean() > _TRAINED else int(max(narrow, default=0))


def _pairs(table, rows):
    """Counts of the products of `rows` tokens by the other two sizes, smaller first."""
    pairs = Counter()
    for sides, count in table.groupby(["m", "k", "n"]).size().items():
        rest = sorted(sides)
        if rows in rest:
            rest.remove(rows)
            pairs[tuple(rest)] += int(count)
    return pairs


def _inner(inner):
    """Channels of the feed-forward part and whether it has a gate.

    Two products, or three with a gate; a gate that is computed with the other half is
    one product of twice the channels. A mixture's are no products of two matrices.
    """
    least = min(inner, default=0)
    if len(inner) == 2 and inner.get(2 * least, 2) < 1.5:
        return int(least), True
    size = max(inner, key=lambda size: size * inner[size], default=0)
    return int(size), round(inner.get(size, 0)) == 3
