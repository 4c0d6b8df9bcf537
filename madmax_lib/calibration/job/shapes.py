"""Shapes of the model on one rank, from the products and the attention of a step.

Of a weight (k, n) three products of tokens T are made in a step: T k n forward, T n k for
the gradient of the input, n T k for that of the weight; a fourth where the forward pass
is computed again. Their dimensions are the same three numbers, so that counts of these
sets, over those of attention's backward pass, are how often a layer uses a weight:

    uses = products / (passes x attentions backward)
"""

from collections import Counter
from dataclasses import dataclass

from madmax_lib.calibration.job.observed import Observed

_ADAPTER = 1 / 4  # of the hidden channels: narrower pairs may be LoRA's


@dataclass(frozen=True)
class Shapes:
    """Sizes on one rank: as tensor and context parallelism leave them.

    rows: tokens of a micro-batch in the products. batch, heads, kv_heads, tokens,
    head_dim: of attention. hidden, ffn, gated: of the products. attentions:
    backward passes of attention on a rank. backward: false where only forward passes
    were traced. rank: of adapters, 0 without. head: channels of the last product.
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

    @property
    def cp(self) -> int:
        """Ranks that share a sequence: attention sees all tokens of fewer heads."""
        return max(round(self.batch * self.tokens / self.rows), 1)


def shapes_of(seen: Observed) -> Shapes | None:
    """Shapes of a transformer; None where attention or products were not recorded."""
    attention = seen.attentions
    table = seen.products
    if attention.empty or table.empty:
        return None
    # the last micro-batch may be short
    full = attention[attention["batch"] == attention["batch"].max()]
    names = ["batch", "heads", "kv_heads", "tokens", "head_dim"]
    core = dict(zip(names, map(int, full[names].mode().iloc[0]), strict=True))
    flops = table["m"] * table["k"] * table["n"]
    rows = int(flops.groupby(table["m"]).sum().idxmax())
    rank = attention["rank"].value_counts().idxmax()
    is_back = attention.loc[attention["rank"] == rank, "backward"]
    backward = int(is_back.sum())
    forward = len(is_back) - backward
    pairs = _pairs(table[table["rank"] == rank], rows)
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
    context = max(round(core["batch"] * core["tokens"] / rows), 1)
    width = core["head_dim"] * context
    projections = (core["heads"] * width, core["kv_heads"] * width)
    adapter = _adapter(sizes, hidden, {*projections, *seen.routers["experts"]})
    passes = 1 if not backward else 2 if adapter else 3
    # an FFN has two products, or three with a gate; of a mixture other operators tell
    choices = [passes, passes + 1] if again else [passes]
    fits = []
    for count in choices:
        uses = {size: n / count / attentions for size, n in sizes.items()}
        left = _left(uses, *projections)
        # heads are used once in a step, routers once in a layer
        others = {adapter, *seen.routers["experts"]}
        inner = {s: n for s, n in left.items() if s not in others and n > 0.7}
        missed = sum(abs(n - round(n)) for n in left.values())
        fits.append((_inner(inner) is None, missed, count, _inner(inner) or (0, False)))
    *_, count, (ffn, gated) = min(fits)
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
    )


def _pairs(table, rows: int):
    """Counts of the products of `rows` tokens by the other two sizes, smaller first."""
    pairs = Counter()
    for sides, count in table.groupby(["m", "k", "n"]).size().items():
        rest = sorted(sides)
        if rows in rest:
            rest.remove(rows)
            pairs[tuple(rest)] += int(count)
    return pairs


def _adapter(sizes: Counter, hidden: int, others: set[int]):
    """Rank of LoRA's adapters: the narrow size that is used as much as any."""
    narrow = {
        size: count
        for size, count in sizes.items()
        if size <= hidden * _ADAPTER and size not in others
    }
    most = max(sizes.values())
    best = max(narrow, key=narrow.get, default=0)
    # A and B of several projections: as many products as those have
    return int(best) if best and narrow[best] >= most / 2 else 0


def _left(uses: dict, queries: int, keys: int):
    """Uses of each size that attention's projections leave over."""
    left = dict(uses)
    fused = queries + 2 * keys
    if round(uses.get(fused, 0)) == 1:
        taken = [(fused, 1), (queries, 1)]
    else:
        taken = [(queries, 2), (keys, 2)]
    for size, count in taken:
        if size in left:
            left[size] -= count
    return left


def _inner(inner: dict):
    """Channels of the feed-forward part and whether it has a gate; None for uses that
    no such part has.

    Two products, or three with a gate; a gate that is computed with the other half is
    one product of twice the channels. A mixture's are no products of two matrices.
    """
    counts = {round(count) for count in inner.values()}
    size = int(min(inner, default=0))
    if len(inner) == 2 and counts == {1} and inner.get(2 * size):
        return size, True
    if len(inner) > 1 or not counts <= {2, 3}:
        return None
    return size, counts == {3}
