"""What would this machine take for a step that it has not run? Measure it, fit,
predict, run, and show the error.

Stages: devices (products and memory), links (collectives), a few short traced runs, a
fit to them, predictions of further runs, and only then those runs. Each leaves files in
the directory, so that a calibration that was stopped goes on; runs are made as long as
the minutes last. A stage that cannot run here is a line of the page.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pandas as pd

from madmax_lib import catalog
from madmax_lib.base.atomic import write_text
from madmax_lib.calibration.machine.compared import (
    case_of,
    compared,
    predicted,
    process_bytes,
    traced_parts,
)
from madmax_lib.calibration.machine.machine import (
    Machine,
    fit_constants,
    link_rates,
    parts_of,
)
from madmax_lib.calibration.machine.machine_page import write_page
from madmax_lib.calibration.published.run_rows import run_row
from madmax_lib.catalog.measured_collectives import MeasuredCollectives
from madmax_lib.catalog.models import Cluster, Device, Link
from madmax_lib.runs.launch import gpu_count, launch_all, measure_links, resolve
from madmax_lib.runs.read import Run, read_json, read_run
from madmax_lib.runs.spec import RunSpec
from madmax_lib.runs.testbed import check_hosts
from madmax_lib.simulator.costs.inputs import Steps
from madmax_lib.simulator.rates.parameters import shipped, start

__all__ = ["calibrate"]

# of a run: one to warm up, four traced, six counted
_STEPS = 11
_WARMUP = 1
_TOGETHER = 4  # runs in one start of the processes
_GPT = {
    "positions": "learned",
    "norm": "layer",
    "gated": False,
    "attention_bias": "all",
    "mlp_bias": True,
}
_WIDER = {
    "cpu": {},
    "cuda": {"hidden": 8, "ffn": 8, "expert_ffn": 8, "heads": 4, "kv_heads": 4},
}  # sizes of models there
# to be fitted: models of unlike shape, and layouts that tell compute, its launches and
# its neighbours apart
_FIT = {
    "short": (
        "gpt-tiny",
        {
            "layers": 3,
            "hidden": 192,
            "heads": 6,
            "kv_heads": 6,
            "ffn": 512,
            "sequence": 64,
        },
        16,
    ),
    "wide": (
        "gpt-tiny",
        {"layers": 2, "hidden": 320, "heads": 8, "kv_heads": 4, "ffn": 1280, **_GPT},
        4,
    ),
    "long": (
        "gpt-tiny",
        {
            "layers": 2,
            "hidden": 64,
            "heads": 2,
            "kv_heads": 2,
            "ffn": 256,
            "sequence": 512,
        },
        8,
    ),
    "images": ("vit-tiny", {"layers": 4, "hidden": 128, "heads": 4, "ffn": 512}, 32),
    "mixture": (
        "moe-tiny",
        {"layers": 2, "hidden": 160, "heads": 5, "kv_heads": 5, "expert_ffn": 320},
        8,
    ),
    "experts": (
        "moe-tiny",
        {"layers": 4, "hidden": 64, "heads": 4, "kv_heads": 4, "expert_ffn": 64},
        4,
    ),
}
_FITTED = (
    *(
        "wide dp",
        "mixture dp",
        "short dp",
        "images dp",
        "long dp",
        "short tp",
        "experts dp",
        "experts tp",
    ),
    *("wide dp1", "mixture dp1"),
)
# to be predicted, most telling first: other models, in layouts of which all but tp are
# new to the fit
_FURTHER = {
    "gpt": (
        "gpt-tiny",
        {"layers": 4, "hidden": 224, "heads": 8, "kv_heads": 4, "ffn": 640},
        8,
    ),
    "vit": ("vit-tiny", {"layers": 6, "hidden": 160, "heads": 4, "ffn": 640}, 16),
    "moe": ("moe-tiny", {"layers": 3, "hidden": 128, "heads": 8, "expert_ffn": 224}, 8),
}
_PREDICTED = (
    *(
        "gpt dp",
        "gpt z3",
        "moe ep",
        "gpt pp",
        "vit z2",
        "gpt cp",
        "gpt tp",
        "moe dp",
        "vit dp",
        "vit pp",
        "moe z3",
    ),
    *("gpt z2", "vit z3", "moe pp", "vit tp-image", "moe cp"),
)


@dataclass
class _Calibration:
    """A calibration on its way: where, on how many processes of which device, and until
    when.
    """

    directory: Path
    hosts: int
    network: str
    device: str
    ranks: int
    until_s: float
    notes: list[str] = field(default_factory=list)
    once_s: float = 8.0  # of a run, a guess until one was made

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """What fails in here is a line of the page, and the next stage goes on."""
        try:
            yield
        except (OSError, ValueError, ImportError, RuntimeError) as error:
            self.notes.append(
                f"{name}: {next(iter(str(error).splitlines()), type(error).__name__)}"
            )

    @property
    def left_s(self) -> float:
        return self.until_s - time.monotonic()

    def folder(self, name: str) -> Path:
        """Directory of a run."""
        return self.directory / "runs" / name.replace(" ", "_")

    def legal(self, name: str) -> RunSpec | None:
        """The run of a name such as "short tp"; None, with a line, where it cannot be
        made here.
        """
        with self.stage(name):
            resolve(spec := self.spec(name))
            if spec.plan.world_size <= self.ranks:
                return spec
            raise ValueError(
                f"{spec.strategy} needs {spec.plan.world_size} ranks, here are "
                f"{self.ranks}"
            )

    def spec(self, name: str) -> RunSpec:
        """The run of a name, whether it can be made or not."""
        model, layout = name.split()
        base, sizes, batch = (_FIT | _FURTHER)[model]
        sizes = sizes | {
            key: sizes[key] * times
            for key, times in _WIDER[self.device].items()
            if key in sizes
        }
        batch = batch * max(self.ranks // 2, 1)
        strategy = _strategy(layout, self.ranks, fitted=model in _FIT)
        alone = layout == "dp1"
        where = {} if alone else {"hosts": self.hosts, "network": self.network}
        how = {
            "global_batch": batch,
            "steps": _STEPS,
            "warmup": _WARMUP,
            "timeout_s": 120.0,
        }
        return RunSpec(base, strategy, sizes=sizes, device=self.device, **how, **where)


def calibrate(
    directory: str | Path,
    *,
    hosts: int = 1,
    network: str = "",
    minutes: float = 5.0,
    device: str = "auto",
    ranks: int = 0,
) -> Machine:
    """Measure this machine, fit the simulator to it, and judge it on runs that the fit
    has not seen.

    hosts, network: of a testbed, as in `RunSpec`. minutes: after which no further run
    is begun. device: cpu, cuda, or auto for CUDA where it is present. ranks: processes,
    all GPUs or two, and one a host, if 0. The directory gets machine.json, kernels.csv,
    links.csv, runs/ with traces, rows.csv, parts.csv, predictions.csv (written before
    those runs are made), results.csv and page.html; a calibration that was stopped
    there goes on. Raises ValueError for settings that do not fit together or another
    calibration in the directory, OSError where hosts cannot be made. See also:
    mm.machine, mm.simulate, mm.calibration.predict.
    """
    if not isinstance(directory, str | Path):
        raise ValueError(f"directory={directory!r} is not a path")
    if not (isinstance(minutes, int | float) and minutes > 0):
        raise ValueError(f"minutes={minutes!r} must be a positive number")
    gpus = 0 if RunSpec(device=device).device == "cpu" else gpu_count()
    if device == "cuda" and not gpus:
        raise ValueError("device='cuda', but torch sees no CUDA device here")
    device = ("cuda" if gpus else "cpu") if device == "auto" else device
    ranks = ranks or (gpus if device == "cuda" else max(2, hosts))
    directory = Path(directory).expanduser().resolve()
    self = _Calibration(
        directory, hosts, network, device, ranks, time.monotonic() + 60 * minutes
    )
    _settle(self)
    return _finished(self)


def _settle(self: _Calibration) -> None:
    """Check the settings, and keep them in the directory. Raises ValueError or OSError."""
    check_hosts(self.hosts, self.network, (), self.ranks)
    path = self.directory / "settings.json"
    settings = {
        name: getattr(self, name) for name in ("hosts", "network", "device", "ranks")
    }
    if path.exists() and json.loads(path.read_text()) != settings:
        raise ValueError(
            f"{self.directory}: holds a calibration with other settings, "
            f"{path.read_text().strip()}"
        )
    (self.directory / "runs").mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(settings) + "\n")


def _finished(self: _Calibration) -> Machine:
    """All stages; those that are done already cost nothing."""
    start_s = time.monotonic()
    kernels = _kernels(self)
    links = _links(self)
    fitted = _runs(self, _FITTED)
    if not fitted:
        raise ValueError(
            f"{self.directory}: no run was completed; {'; '.join(self.notes)}"
        )
    machine = _fit(self, kernels, links, fitted)
    specs = {name: spec for name in _PREDICTED if (spec := self.legal(name))}
    predictions = _predictions(self, machine, specs)
    made = _runs(self, tuple(specs))
    results = pd.DataFrame(
        {name: compared(predictions.loc[name], run) for name, run in made.items()}
    ).T
    results.to_csv(
        self.directory / "results.csv", index_label="run", float_format="%.6g"
    )
    errors = (
        np.abs(results["error"].astype(float))
        if len(results)
        else pd.Series(dtype=float)
    )
    judged = {
        "runs": len(results),
        "median_error": float(errors.median()),
        "worst_error": float(errors.max()),
    }
    path = self.directory / "machine.json"
    earlier_s = (
        read_json(path).get("provenance", {}).get("seconds", 0.0)
    )  # of what was done before it was stopped
    seconds = earlier_s + time.monotonic() - start_s
    facts = machine.provenance | {
        "seconds": seconds,
        "judged": judged,
        "notes": self.notes,
    }
    machine = replace(machine, provenance=facts)
    machine.save(path)
    rows = {name: run_row(run, path) for name, run in (fitted | made).items()}
    pd.DataFrame.from_dict(rows, orient="index").to_csv(
        self.directory / "rows.csv", index=False
    )
    write_page(self.directory, machine)
    return machine


def _predictions(
    self: _Calibration, machine: Machine, specs: Mapping[str, RunSpec]
) -> pd.DataFrame:
    """Predictions of runs, written before they are made; what was predicted of those
    made earlier stays.
    """
    path = self.directory / "predictions.csv"
    earlier = pd.read_csv(path, index_col="run") if path.exists() else pd.DataFrame()
    rows = {name: predicted(machine, spec) for name, spec in specs.items()}
    made = [
        name for name in rows if name in earlier.index and _is_done(self.folder(name))
    ]
    table = pd.DataFrame(rows | {name: earlier.loc[name].to_dict() for name in made}).T
    table.to_csv(path, index_label="run", float_format="%.6g")
    return table


def _kernels(self: _Calibration) -> pd.DataFrame:
    """Products and copies of one device, from kernels.csv if it is there."""
    path = self.directory / "kernels.csv"
    if not path.exists():
        from madmax_lib.runs.measure.bench import bench  # imports torch

        threads = 1 if self.device == "cpu" else 0
        table = bench(
            ("linear", "linear up", "copy"),
            "quick",
            device=self.device,
            threads=threads,
        )
        table.to_csv(path, index=False, float_format="%.6g")
    return pd.read_csv(path)


def _links(self: _Calibration) -> pd.DataFrame | None:
    """Collectives of all ranks, from links.csv if it is there; None for one rank, or
    where they cannot be timed.
    """
    path = self.directory / "links.csv"
    if self.ranks > 1 and not path.exists():
        with self.stage("links"):
            part = path.with_suffix(".part")
            measure_links(
                part, "quick", ranks=self.ranks, hosts=self.hosts, network=self.network
            )
            part.rename(path)
    return pd.read_csv(path) if path.exists() else None


def _runs(self: _Calibration, names: tuple[str, ...]) -> dict[str, Run]:
    """Completed runs of these names, in their order; further ones are begun as long as
    there is time for them.
    """
    folders = {name: self.folder(name) for name in names}
    specs = {
        name: spec
        for name in names
        if (spec := self.legal(name)) and not _is_done(folders[name])
    }
    for alone in (False, True):
        group = [name for name in specs if name.endswith("dp1") == alone]
        for some in (
            group[at : at + _TOGETHER] for at in range(0, len(group), _TOGETHER)
        ):
            if self.left_s < self.once_s * len(some):
                self.notes.append(f"{', '.join(some)}: not run, the minutes are over")
                continue
            begun_s = time.monotonic()
            with self.stage(", ".join(some)):
                launch_all({folders[name]: specs[name] for name in some})
            self.once_s = (time.monotonic() - begun_s) / len(some)
    runs = {
        name: read_run(folder)
        for name, folder in folders.items()
        if (folder / "summary.json").exists()
    }
    for name, run in runs.items():
        if run.summary["status"] != "completed":
            self.notes.append(
                f"{name}: {run.summary['status']}, {run.summary['error']}"
            )
    return {
        name: run for name, run in runs.items() if run.summary["status"] == "completed"
    }


def _is_done(folder: Path) -> bool:
    return (folder / "summary.json").exists() and read_run(folder).summary.get(
        "status"
    ) == "completed"


def _strategy(layout: str, ranks: int, fitted: bool) -> str:
    """Text of a layout on so many ranks: of its own dimension two, the rest data
    parallel.
    """
    others = ranks // 2
    if layout in ("dp1", "dp"):
        return (
            layout
            if layout == "dp1"
            else f"dp{ranks}.one-bucket"
            if fitted
            else f"dp{ranks}"
        )
    if layout in ("z2", "z3"):
        return f"dp{ranks}.{layout}"
    kind = {"ep": f"dp{ranks}.ep2", "tp-image": "tp2.nosp"}.get(layout, f"{layout}2")
    return kind + f".dp{others}" * (others > 1 and layout != "ep")


def _fit(
    self: _Calibration,
    kernels: pd.DataFrame,
    links: pd.DataFrame | None,
    runs: Mapping[str, Run],
) -> Machine:
    """The machine that a fit to these runs gives; parts.csv has their predicted parts
    beside the measured ones.
    """
    env = next(iter(runs.values())).env
    machine = _machine_before(self, kernels, links, env)
    measured = pd.DataFrame(
        {name: traced_parts(run) for name, run in runs.items()}
    ).T.astype(float)
    cases = [case_of(run.spec, machine) for run in runs.values()]
    parameters = fit_constants(cases, measured, machine.parameters)
    fitted = parts_of(Steps.stack(cases), parameters).set_axis(measured.index)
    table = fitted.add_prefix("predicted_").join(measured.add_prefix("measured_"))
    table.to_csv(self.directory / "parts.csv", index_label="run", float_format="%.6g")
    if self.device == "cpu":
        beside = float(
            np.median([process_bytes(run, machine) for run in runs.values()])
        )
        device = replace(machine.cluster.device, process_bytes=beside)
        machine = replace(machine, cluster=replace(machine.cluster, device=device))
    return replace(machine, parameters=parameters)


def _machine_before(
    self: _Calibration, kernels: pd.DataFrame, links: pd.DataFrame | None, env: dict
) -> Machine:
    """Devices and links as they were timed, with the constants that a fit begins at."""
    name = env["device"]
    nodes = self.hosts
    products, copies = (
        kernels[kernels["kernel"].str.startswith(kind)] for kind in ("linear", "copy")
    )
    known = catalog.device_named(name) if self.device == "cuda" else None
    moved = float(copies.loc[copies["how"] != "pageable", "bytes_per_s"].max())
    held = env.get("device_memory_bytes") or _host_bytes() / self.ranks
    peak = {env["dtype"]: float(products["flops_per_s"].max())}
    device = known or Device(
        name, held, moved, peak, family="cpu" if self.device == "cpu" else "other"
    )
    begin = shipped() if known else start()
    rates = (
        link_rates(links)
        if links is not None
        else {"near": np.nan, "far": np.nan, "latency_s": 1e-4, "hop_s": 1e-5}
    )
    near = rates["near"] if rates["near"] > 0 else moved / 4
    far = rates["far"] if rates["far"] > 0 else near
    intra = Link("loopback" if self.device == "cpu" else "pcie", near)
    inter = Link("ethernet", far)
    timed = {
        "collective_s": rates["latency_s"],
        "hop_s": rates["hop_s"],
        "network_hop_s:ethernet": rates["hop_s"],
    }
    timed |= {
        "link_share:other": 1.0,
        "link_share:pcie": 1.0,
        "network_share:ethernet": 1.0,
        "network_s:ethernet": 1e-6,
    }
    parameters = replace(
        begin,
        constants=begin.constants | timed,
        intervals=begin.intervals
        | {name: (0.95 * value, 1.05 * value) for name, value in timed.items()},
        collectives={} if links is None else MeasuredCollectives(links).curves,
        links=() if links is None else (near, far),
    )
    cluster = Cluster(
        self.directory.name, device, self.ranks // nodes, nodes, intra, inter
    )
    about = {"device": name, "hosts": self.hosts, "network": self.network}
    return Machine(cluster, parameters, env["dtype"], provenance=about)


def _host_bytes() -> float:
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
