"""FLOPs of training under the conventions of frameworks and papers, term by term: MFUs of
two programs compare only where their numerators do.

`data/flops_conventions.csv` has a row per convention, with what it counts and its
source.
"""

from dataclasses import dataclass

import pandas as pd

from madmax_lib.base.fields import require_int, require_type
from madmax_lib.catalog.models import Model, Transformer
from madmax_lib.catalog.tables import model as model_of, table


@dataclass(frozen=True)
class Flops:
    """FLOPs of training on one sample, forward and backward.

    >>> flops("gpt2-large", convention="palm").per_token / 6e9
    0.86840192
    """

    model: str
    convention: str
    sequence: int  # tokens of the sample
    terms: dict[str, float]  # FLOPs by what takes them
    rule: str  # what the convention counts
    source: str

    def __float__(self) -> float:
        """All terms together."""
        return float(self.total)

    @property
    def total(self) -> float:
        """All terms together."""
        return sum(self.terms.values())

    @property
    def per_token(self) -> float:
        """FLOPs per token, as logs divide them by seconds and devices."""
        return self.total / self.sequence

    @property
    def table(self) -> pd.DataFrame:
        """A row per term: term, flops, share."""
        result = pd.DataFrame(self.terms.items(), columns=["term", "flops"])
        return result.assign(share=result["flops"] / self.total)


def conventions() -> pd.DataFrame:
    """The conventions: convention, what it counts (rule), source."""
    return table("flops_conventions")[["convention", "rule", "source"]]


def flops(
    model: Model | str,
    *,
    sequence: int | None = None,
    convention: str = "model",
) -> Flops:
    """FLOPs of a training step for one sample, as a framework or paper counts them.

    model: or its name. sequence: tokens, the model's own if None. convention: one of
    `conventions()`; model is this library's own. Raises ValueError for an unknown one,
    and for a model that is no transformer. See also: mm.estimate.

    >>> ours, theirs = (flops("llama3-8b", convention=c) for c in ("model", "verl"))
    >>> f"{theirs.total / ours.total:.3f}"
    '0.943'
    """
    shape = require_type("model", model_of(model), Transformer)
    if sequence is None:
        sequence = shape.sequence
    require_int("sequence", sequence, 1)
    rows = table("flops_conventions", numbers=True).set_index("convention")
    if convention not in rows.index:
        names = ", ".join(rows.index)
        raise ValueError(f"convention={convention!r} is not one of {names}")
    row = rows.loc[convention]
    forward = shape.flops_by_term(sequence, windows=row["windows"] > 0)
    # tables and vectors by 2 FLOPs per parameter and token, as products have them
    embedding = 2 * sequence * shape.vocab * shape.hidden
    has_table = row["embedding"] == "always" or (
        row["embedding"] == "untied" and not shape.tied
    )
    in_use = 2 * sequence * shape.active_parameters
    in_use -= 0 if shape.tied else embedding
    summed = ("scores", "index", "scan", "tower", "patches")
    products = sum(value for term, value in forward.items() if term not in summed)
    states = sequence * shape.mixer_channels * shape.mixer_state
    mixers = sum(kind.is_mixer for layer in shape.layer_kinds for kind in layer.kinds)
    pairs = forward.get("scores", 0) / (4 * shape.core_width)  # of queries and keys
    factors = {"scores": "scores", "index": "scores"}
    factors |= dict.fromkeys(("router", "tower", "scan"))
    terms = {
        term: value * (row[factors[term] or term] if term in factors else 1)
        for term, value in forward.items()
    }
    terms |= {
        "embedding": embedding * has_table,
        "norms and biases": row["vectors"] * (in_use - products),
        "states": row["states"] * mixers * states,
        "softmax": row["softmax"] * pairs * shape.heads,
    }
    # recompute repeats layers, not the head
    passes = {"head": min(row["passes"], 3)}
    counts = {
        term: float(passes.get(term, row["passes"]) * value)
        for term, value in terms.items()
        if value
    }
    return Flops(shape.name, convention, sequence, counts, row["rule"], row["source"])
