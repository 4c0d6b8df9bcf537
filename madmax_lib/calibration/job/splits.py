"""How a traced job is split: degrees, ZeRO stage and schedule, from its messages.

Tensor parallelism moves the activations of every layer, T x hidden numbers at a time;
pipelines send them from rank to rank; experts exchange them all to all. What is left is
data parallelism's: reductions alone are DDP, with weights passed on ZeRO-1, scattered
ones ZeRO-2, and with a gather before every pass ZeRO-3.
"""

from madmax_lib.calibration.job.observed import Observed
from madmax_lib.calibration.job.shapes import Shapes

_MESSAGE = 4096  # elements: smaller ones are counts and losses, where no layer is known
_SCALARS = 1 / 64  # of a layer's weights: smaller messages are losses and norms
_GATHERED_AGAIN = 1.2  # gathers over scatters: ZeRO-3 gathers most units twice
_RECOMPUTED = {
    "none": "attention runs as often forward as backward",
    "selective": "attention runs again in the backward pass, products do not",
    "full": "attention and products run again in the backward pass",
}


class Facts(dict):
    """Value, evidence and certain, likely or guess, by field."""

    def add(self, field: str, value, evidence: str, sure: str = "certain"):
        """Note a value and why, and give it back."""
        self[field] = (value, evidence, sure)
        return value


def add_splits(seen: Observed, shapes: Shapes, facts: Facts) -> None:
    """Add the fields of the plan."""
    # ends of a pipeline have less to tell
    busiest = seen.products["rank"].value_counts().idxmax()
    messages = seen.messages[seen.messages["rank"] == busiest]
    is_moved = messages["elements"] == shapes.rows * shapes.hidden
    tp = _tensor(messages[is_moved], shapes, facts)
    text = f"attention over {shapes.tokens}, products over {shapes.rows:,} tokens"
    if facts.add("cp", shapes.cp, text) > 1:
        facts.add("context", "ulysses", "heads are exchanged for tokens")
    replica = tp * shapes.cp * _pipeline(seen, shapes, facts)
    others = messages[~is_moved] if tp > 1 else messages
    others = others[others["elements"] > shapes.hidden**2 * _SCALARS]
    dp = max(seen.world // replica, 1)
    facts.add("dp", dp, f"{replica} ranks of a replica")
    if dp > 1 and others.empty:
        text = "no collective moves gradients: independent processes?"
        facts.add("dp", dp, text, "guess")
    if len(seen.grouped) and len(seen.routers):
        experts = int(seen.routers["experts"].max())
        local = int(seen.grouped["experts"].mode()[0])
        facts.add(
            "ep", max(experts // local, 1), f"{local} of {experts} experts on a rank"
        )
    if dp * shapes.cp > 1 and len(others):
        _sharding(seen, others, dp * shapes.cp, facts)
    facts.add("micro_batch", shapes.batch, "samples of attention")
    facts.add("recompute", shapes.recompute, _RECOMPUTED[shapes.recompute])
    if not seen.attentions["head_dim"].any():
        facts.add("attention", "unfused", "a softmax over scores")
    if shapes.adapter:
        facts.add("lora_rank", shapes.adapter, "pairs of narrow products", "likely")


def add_groups(seen: Observed, facts: Facts) -> None:
    """Groups and what they move, of a job that is no transformer."""
    large = seen.messages[seen.messages["elements"].fillna(_MESSAGE) >= _MESSAGE]
    for size, kinds in large.groupby("group_size")["collective"].unique().items():
        facts.add(f"group of {size}", ", ".join(sorted(kinds)), "messages of a step")
    sizes = large.loc[large["collective"] == "all_reduce", "group_size"]
    if sizes.isin([1, seen.world]).any():  # gloo's sums tell no group
        facts.add("dp", seen.world, "gradients are summed over all ranks", "likely")


def _tensor(moved, shapes, facts):
    """Tensor parallelism: activations go through collectives in every layer."""
    kinds = moved["collective"]
    moved = moved[kinds.isin(["all_reduce", "reduce_scatter", "all_gather"])]
    # two a layer and pass
    if len(moved) < 2 * shapes.attentions:
        return facts.add("tp", 1, "no collective moves activations")
    text = f"{len(moved)} collectives move {shapes.rows} x {shapes.hidden} activations"
    sizes = moved["group_size"][moved["group_size"] > 1]
    # gloo's sums tell no group: a rank has its part of the heads
    width = shapes.heads * shapes.head_dim * shapes.cp
    degree = int(sizes.mode()[0]) if len(sizes) else round(shapes.hidden / width)
    is_scattered = "reduce_scatter" in set(kinds)
    facts.add("sequence_parallel", is_scattered, "activations are scattered or summed")
    sure = "certain" if len(sizes) else "likely"
    return facts.add("tp", max(degree, 1), text, sure)


def _pipeline(seen, shapes, facts):
    """Pipeline degree, schedule and chunks of a stage, from messages between ranks."""
    sends = seen.messages[seen.messages["collective"].isin(["send", "send_recv"])]
    sends = sends[sends["elements"] <= shapes.rows * shapes.hidden]
    first = {*seen.lookups["rank"], *seen.patches["rank"]}
    last = set(seen.losses["rank"])
    ranks = seen.timeline.ranks
    is_whole = len(ranks) == seen.world
    if sends.empty or (is_whole and first & last):
        return facts.add("pp", 1, "no rank sends activations to another")
    text = f"{len(last)} of {seen.world} ranks compute a loss"
    pp = seen.world // max(len(last), 1)
    if not (is_whole and last):
        pp = int(sends["group_size"].clip(2).mode()[0])
    facts.add("pp", pp, text, "certain" if is_whole else "guess")
    batches = seen.micro_batches
    # c chunks send 2 (c - 1) messages a micro-batch, forward and backward
    each = len(sends) / batches / len(ranks)
    text = f"{each:.3g} messages a rank and micro-batch"
    facts.add("interleave", max(round((each * pp / 2 + 1) / pp), 1), text, "likely")
    of_rank = seen.attentions[seen.attentions["rank"] == ranks[0]]
    is_forward = ~of_rank.sort_values("start_ns")["backward"].astype(bool)
    # what is computed again is no pass of its own: backward passes count
    ahead = is_forward.cumprod().sum() / max((~is_forward).sum(), 1) * batches
    schedule = "gpipe" if ahead >= batches > pp else "1f1b"
    text = f"{ahead:.0f} of {batches} micro-batches before the first backward pass"
    # torch names its actions: a W is the second half of a backward pass
    if seen.names.str.contains(r"^PP:\d+W\d+$").any():
        schedule = "zero-bubble"
    facts.add("schedule", schedule, text, "likely")
    return pp


def _sharding(seen, messages, ranks, facts):
    """ZeRO stage and shard group, from what data parallelism moves."""
    of_kind = messages.groupby("collective")["elements"]
    counts = of_kind.size()
    sums = of_kind.sum()
    gathers = int(counts.get("all_gather", 0))
    scatters = int(counts.get("reduce_scatter", 0))
    is_fsdp = seen.names.str.contains("^FSDP::|FullyShardedDataParallel").any()
    if not scatters:
        # Weights are as many as their gradients; logits are gathered too, and counts of
        # batch norms broadcast.
        gradients = sums.get("all_reduce", 0)
        is_passed_on = sums.get("all_gather", 0) > gradients / 2
        is_passed_on |= sums.get("broadcast", 0) > gradients / 10
        facts.add(
            "zero", int(is_passed_on), "gradients are summed; 1: weights passed on"
        )
        return
    stage = 2 if is_fsdp else 1
    stage = 3 if gathers > _GATHERED_AGAIN * scatters else stage
    text = f"{gathers} gathers and {scatters} scatters of weights a step"
    facts.add("zero", stage, text, "certain" if is_fsdp else "likely")
    is_scattered = messages["collective"] == "reduce_scatter"
    shard = int(messages.loc[is_scattered, "group_size"].max())
    if 1 < shard < ranks:
        facts.add(
            "shard", shard, f"scattered over {shard} of {ranks} ranks, then summed"
        )
