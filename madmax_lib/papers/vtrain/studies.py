"""vTrain's case studies computed anew, beside what was published.

MT-NLG over (t, d, p), the cost of its plans, the compute-optimal model under a time
budget, and what seed 000, a student project on a fork of vTrain [CSCE-614 Group 2,
2024], configured and predicted. Its files give the bandwidth of whole systems where
vTrain wants that of a node or a GPU.

No trace of these models is public, so the operators come from `vtrain.formulas`; order
and collectives are vTrain's [Bang et al., MICRO 2024], inside a node at the bandwidth
of its configuration files, because the NCCL tables are not part of this project.
Published numbers: `data/published.csv`.
"""

from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd

from madmax_lib.catalog import Transformer, cluster, data_file, device, local_data
from madmax_lib.papers.origin import beside_published, read_table, with_origin
from madmax_lib.papers.vtrain.config import (
    RINGS,
    Config,
    Nccl,
    Sizes,
    load_config,
)
from madmax_lib.papers.vtrain.formulas import (
    Formulas,
    formula_operators,
    operator_s,
    step_s,
)
from madmax_lib.papers.vtrain.graph import iteration_s

# seed 000's GPT with 96 layers on 2,048 A100
SEED = load_config(data_file("papers/vtrain/seed000.json"))
_MTNLG = Config(1, "A100", 1, 1, 1).model  # the defaults of vTrain are its sizes
_GPU = "a100-80"
_BATCH = 1920  # of MT-NLG, samples
_GPUS = 3360  # of the compute-optimal study
_DAY_S = 86_400
# per parameter: fp16 weight and gradient, fp32 weight and two moments [arXiv
# 1910.02054]
_STATE_BYTES = 16
_NETWORK = ("inter_gbit_per_s", "intra_gbyte_per_s")
_ON_FORMULAS = "vTrain corrected, recompute on all stages"


def published(key: str) -> float:
    """A published number. Raises ValueError for an unknown key."""
    if key not in (values := _published()):
        raise ValueError(f"{key!r} is not in vtrain/data/published.csv")
    return float(values[key])


def _published():
    return read_table("vtrain/published").set_index("key")["value"]


def optional_local(relative: str, what: str) -> Path | None:
    """File or folder of the data directories, or None after saying what is skipped."""
    try:
        return local_data(relative)
    except FileNotFoundError as reason:
        print(f"skipped {what}: {reason}")
        return None


def _steps(model, plans, *, global_batch, **network):
    """Plans (columns tp, dp, pp, micro_batch) with gpus, step_s, utilisation (dense
    model FLOPs) and memory_bytes.

    By the corrected rules on A100-80. memory_bytes: states of the optimizer, stored
    inputs of layers in flight and one recomputed layer, of the first stage [arXiv
    1910.02054, 2205.05198]. network: fields of `Sizes`, vTrain's if none.
    """
    tp, dp, pp, b = (
        plans[name].to_numpy(dtype="int64")
        for name in ("tp", "dp", "pp", "micro_batch")
    )
    m = global_batch // (dp * b)
    shape = Sizes(
        tp,
        dp,
        pp,
        b,
        m,
        model.layers,
        model.hidden,
        model.sequence,
        model.vocab,
        **network,
    )
    machine = device(_GPU)
    time_s = step_s(shape, operator_s(shape, model.heads, Formulas(), machine), RINGS)
    flops = 3 * model.forward_flops(global_batch, model.sequence)
    gpus = tp * dp * pp
    tokens = b * model.sequence
    # One 16-bit input for each layer of the first stage and micro-batch in flight,
    # min(p, m) of them; a recomputed layer holds s b h (34 + 5 a s / h) / t bytes
    # [arXiv 2205.05198, eq. 2].
    stored = 2 * tokens * model.hidden * model.layers / pp * np.minimum(pp, m)
    layer = tokens * (34 * model.hidden + 5 * model.heads * model.sequence) / tp
    return plans.assign(
        gpus=gpus,
        step_s=time_s,
        utilisation=flops / (time_s * gpus * machine.peak("fp16")),
        memory_bytes=_STATE_BYTES * model.parameters / (tp * pp) + stored + layer,
    )


def _plan_grid(model, gpus, global_batch):
    """Every plan of vTrain's rules on a number of GPUs: tp up to 8, dp, pp, micro_batch
    up to 4.
    """
    # heads must divide by tp, layers by pp, the batch by dp x micro_batch
    tps = [t for t in (1, 2, 4, 8) if model.heads % t == 0]
    pps = [p for p in range(1, model.layers + 1) if model.layers % p == 0]
    grid = [
        (t, gpus // (t * p), p, b)
        for t, p, b in product(tps, pps, (1, 2, 4))
        if gpus % (t * p) == 0
    ]
    rows = [(t, d, p, b) for t, d, p, b in grid if global_batch % (d * b) == 0]
    return pd.DataFrame(rows, columns=["tp", "dp", "pp", "micro_batch"])


def design_space() -> pd.DataFrame:
    """MT-NLG over the (t, d, p) of vTrain's first case study, with days and cost of its
    270 B tokens.
    """
    # 14 values of d: those of 1..30 that divide the batch
    dps = [d for d in range(1, 31) if _BATCH % d == 0]
    plans = pd.DataFrame(
        product((4, 8, 16), dps, (3, 5, 7, 15, 21, 35, 105)), columns=["tp", "dp", "pp"]
    )
    return with_origin(_priced(plans), "vtrain/published", rules=_ON_FORMULAS)


def _priced(plans):
    table = _steps(_MTNLG, plans.assign(micro_batch=1), global_batch=_BATCH)
    # days = tokens / tokens of a step x step; a node of the price has 8 GPUs
    steps = published("mtnlg_tokens") / (_BATCH * _MTNLG.sequence)
    days = steps * table["step_s"] / _DAY_S
    node_hours = days * 24 * table["gpus"] / 8
    return table.assign(days=days, cost_usd=node_hours * published("node_usd_per_hour"))


def plan_table() -> pd.DataFrame:
    """The given and the found plan of MT-NLG: ours, published, error; and the change
    between them.
    """
    # the only two plans with which the published time, days and cost are consistent
    plans = pd.DataFrame([(8, 8, 35), (8, 12, 21)], columns=["tp", "dp", "pp"])
    both = _priced(plans).set_axis(["given", "found"])
    columns = {"step_s": "step_s", "days": "days", "cost": "cost_usd"}
    ours = {
        f"plan_{plan}_{name}": both.at[plan, column]
        for plan in both.index
        for name, column in columns.items()
    }
    change = both.loc["found"] / both.loc["given"] - 1
    columns = {"time": "step_s", "cost": "cost_usd", "util": "utilisation"}
    ours |= {f"plan_{name}_change": change[column] for name, column in columns.items()}
    return _with_published(ours)


def compute_optimal(days: float = 30.0) -> pd.DataFrame:
    """Chinchilla-optimal models (20 tokens per parameter) on 3,360 GPUs, a sample each:
    the fastest plan that fits.

    Candidates are a grid of widths and depths with 100 to 200 channels per layer.
    Columns: hidden, layers, parameters, tokens, the plan, step_s, utilisation, days,
    feasible (within `days`), naive (within them at full utilisation).
    """
    machine = device(_GPU)
    rows = []
    sequence = 2048
    sizes = product(range(6144, 14_337, 2048), range(40, 101, 20))
    for hidden, layers in sizes:
        if not 100 <= hidden / layers <= 200:
            continue
        # heads of 128 channels
        shape = (layers, hidden, hidden // 128, 4 * hidden, sequence, 50257)
        model = Transformer(f"gpt-{hidden}-{layers}", *shape)
        table = _steps(model, _plan_grid(model, _GPUS, _GPUS), global_batch=_GPUS)
        fitting = table[table["memory_bytes"] <= machine.memory_bytes]
        about = {"hidden": hidden, "layers": layers, "parameters": model.parameters}
        rows.append(fitting.nsmallest(1, "step_s").assign(**about))
    table = pd.concat(rows).sort_values("parameters", ignore_index=True)
    # C = 6 N D with D = 20 N: 120 N^2 [arXiv 2203.15556]
    tokens = 20 * table["parameters"]
    training_days = tokens / (_GPUS * sequence) * table["step_s"] / _DAY_S
    flops = 120 * table["parameters"].astype(float) ** 2
    naive = flops <= _GPUS * machine.peak("fp16") * _DAY_S * days
    table = table.assign(
        tokens=tokens, days=training_days, feasible=training_days <= days, naive=naive
    )
    first = ["hidden", "layers", "parameters", "tokens"]
    table = table[first + [column for column in table if column not in first]]
    return with_origin(table, "vtrain/published", rules=_ON_FORMULAS)


def layouts() -> pd.DataFrame:
    """Seed 000's GPTs on 2,048 A100 in its seven layouts, where layers divide into
    stages; published_s where quoted.

    On nodes of a DGX A100 by the corrected rules, which is what it meant to configure.
    """
    dgx = as_meant(SEED).shape
    network = {name: getattr(dgx, name) for name in _NETWORK}
    parts = []
    hidden = SEED.hidden_size
    plans = read_table("vtrain/layouts").assign(micro_batch=1)
    for depth in (16, 32, 48, 96, 128):
        dividing = plans[depth % plans["pp"] == 0]
        model = replace(SEED, num_layers=depth).model
        part = _steps(model, dividing, global_batch=SEED.global_batch_size, **network)
        parts.append(part.assign(hidden=hidden, layers=depth))
    table = pd.concat(parts, ignore_index=True)
    keys = [
        f"seed_{r.layers}_{r.hidden}_{r.tp}_{r.dp}_{r.pp}" for r in table.itertuples()
    ]
    table["published_s"] = _published().reindex(keys).to_numpy()
    table["layout"] = [f"({r.tp}, {r.dp}, {r.pp})" for r in table.itertuples()]
    results = ["step_s", "utilisation", "published_s"]
    table = table[["hidden", "layers", "layout", "tp", "dp", "pp", *results]]
    rules = "vTrain corrected, units as meant"
    return with_origin(table, "vtrain/published", rules=rules)


def seed_steps(nccl: Nccl = RINGS) -> pd.DataFrame:
    """The three quoted steps of seed 000 as it configured them, by the released rules,
    with its predictions.

    shared_s: with operators profiled at half the sequence, as vTrain's trace of one run
    serves another: the name of a trace does not tell the sequence. mfu: model FLOPs
    over peak that the published time amounts to.
    """
    rows = []
    for key, theirs_s in _published().filter(like="seed_").items():
        # the key spells the case: seed, layers, hidden, tp, dp, pp
        layers, hidden, t, d, p = map(int, key.split("_")[1:])
        config = replace(
            SEED,
            num_layers=layers,
            hidden_size=hidden,
            tensor_parallel_size=t,
            data_parallel_size=d,
            pipeline_parallel_size=p,
        )
        half = replace(config, max_length=config.max_length // 2)
        ours_s = iteration_s(config, formula_operators(config), nccl, "released")
        shared_s = iteration_s(config, formula_operators(half), nccl, "released")
        model = config.model
        flops = 3 * model.forward_flops(config.global_batch_size, config.max_length)
        peak = config.num_gpus * device(config.gpu_name).peak("fp16")
        row = {
            "key": key,
            "layout": f"({t}, {d}, {p})",
            "theirs_s": theirs_s,
            "ours_s": ours_s,
            "shared_s": shared_s,
            "mfu": flops / (theirs_s * peak),
        }
        rows.append(row)
    return pd.DataFrame(rows)


def as_meant(config: Config) -> Config:
    """Configuration with the GPUs and the network of a DGX A100, the link of one GPU
    inside it.
    """
    # vTrain wants Gb/s of a whole node and GB/s of a GPU
    node = cluster("dgx-a100")
    inter = node.devices_per_node * node.inter.bandwidth_bytes_per_s * 8 / 1e9
    intra = node.intra.bandwidth_bytes_per_s / 1e9
    return replace(
        config,
        node_size=node.devices_per_node,
        inter_node_bandwidth=inter,
        intra_node_bandwidth=intra,
    )


def claims() -> pd.DataFrame:
    """Every published number with ours where it can be computed from what ships:
    theirs, ours, error, note.
    """
    wide = Config(
        tensor_parallel_size=16, data_parallel_size=16, pipeline_parallel_size=105
    )
    wide_s = iteration_s(wide, formula_operators(wide), RINGS, "released")
    flops = 3 * _MTNLG.forward_flops(_BATCH, _MTNLG.sequence)
    peak = wide.num_gpus * device(_GPU).peak("fp16")
    optimal = compute_optimal()
    naive = optimal[optimal["naive"]].iloc[-1]
    largest = optimal[optimal["feasible"]].iloc[-1]
    ours = {
        "mtnlg_util_16_16_105": flops / (wide_s * peak),
        **plan_table().set_index("key")["ours"],
        "chinchilla_naive_params": naive["parameters"],
        "chinchilla_naive_days": naive["days"],
        "chinchilla_util": optimal["utilisation"].mean(),
        "chinchilla_params": largest["parameters"],
        "chinchilla_tokens": largest["tokens"],
        "chinchilla_overestimate": 1 - largest["parameters"] / naive["parameters"],
        **seed_steps().set_index("key")["ours_s"],
    }
    return _with_published(ours, every=True)


def _with_published(ours, *, every=False):
    rows = beside_published("vtrain", ours).query("follows != 'input'")
    rows = rows[every | rows["key"].isin(ours)].reset_index(drop=True)
    rules = "vTrain on analytical operators"
    return with_origin(rows, "vtrain/published", rules=rules)
