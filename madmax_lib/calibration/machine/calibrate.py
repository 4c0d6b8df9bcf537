"""Calibration of a machine: measure it, fit, predict further runs, make them, and show
the error.

Stages: devices (products and memory), links (collectives), a few short traced runs, a
fit to them, predictions of further runs, and only then those runs. Each leaves files in
the directory, so that a calibration that was stopped goes on; runs are made as long as
the minutes last. A stage that cannot run here is a line of the page.

The runs stand in `data/calibration_runs.json`. Fitted: models of unlike shape, in
layouts that tell compute, its launches and its neighbours apart. Predicted, the most
telling first: other models, in layouts of which all but tp are new to the fit.
"""

import json
import os
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import pandas as pd

from madmax_lib import catalog
from madmax_lib.base import format_s, short_repr
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
from madmax_lib.catalog import Cluster, Device, Link
from madmax_lib.catalog.measured_collectives import MeasuredCollectives
from madmax_lib.runs import RunSpec
from madmax_lib.runs.launch import gpu_count, launch_all, measure_links, resolve
from madmax_lib.runs.read import read_json, read_run
from madmax_lib.runs.testbed import check_hosts
from madmax_lib.simulator.costs.inputs import Steps, products_alone
from madmax_lib.simulator.rates.parameters import shipped, start

# of a run: one to warm up, four traced, six counted
_STEPS = 11
_WARMUP = 1
_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class PlannedRun:
    """A model and a layout, before the number of ranks is known.

    >>> run = _planned_runs("fitted")[5]
    >>> run.name, run.spec("cpu", ranks=4).strategy
    ('short tp', 'tp2.dp2')
    """

    model: str  # of `calibration_runs.json`
    layout: str  # dp1, dp, tp, tp-image, pp, cp, ep, z2 or z3
    is_fitted: bool = False

    @property
    def name(self) -> str:
        """The run in tables and notes."""
        return f"{self.model} {self.layout}"

    @property
    def is_alone(self) -> bool:
        """Whether it is one process, whatever the machine has."""
        return self.layout == "dp1"

    def spec(
        self, device: str, ranks: int, hosts: int = 1, network: str = ""
    ) -> RunSpec:
        """The run on so many ranks, whether it can be made or not."""
        # a GPU would only launch kernels of models that train in seconds on a CPU
        models = "models_cuda" if device == "cuda" else "models"
        model = _content()[models][self.model]
        where = {} if self.is_alone else {"hosts": hosts, "network": network}
        return RunSpec(
            model["base"],
            self._strategy(ranks),
            sizes=model["sizes"],
            device=device,
            global_batch=model["batch"] * max(ranks // 2, 1),
            steps=_STEPS,
            warmup=_WARMUP,
            timeout_s=_TIMEOUT_S,
            **where,
        )

    def _strategy(self, ranks):
        """Two ranks in the layout's own dimension, the rest data parallel."""
        match self.layout:
            case "dp1":
                return "dp1"
            case "dp":
                # one bucket shows an all-reduce that hides under nothing
                return f"dp{ranks}.one-bucket" if self.is_fitted else f"dp{ranks}"
            case "z2" | "z3" as zero:
                return f"dp{ranks}.{zero}"
            case "ep":
                return f"dp{ranks}.ep2"
        # nosp: without sequence parallelism
        text = "tp2.nosp" if self.layout == "tp-image" else f"{self.layout}2"
        return f"{text}.dp{ranks // 2}" if ranks >= 4 else text


@lru_cache(maxsize=1)
def _content():
    """The runs of a calibration, and for either kind of device their models: the base,
    the samples of two ranks, and the sizes that are changed.
    """
    return catalog.read_object(catalog.data_file("calibration_runs.json"))


def _planned_runs(purpose):
    """The runs that are fitted or predicted, in the order in which they are made."""
    return tuple(
        PlannedRun(model, layout, is_fitted=purpose == "fitted")
        for model, layout in _content()[purpose]
    )


_TOGETHER = 4  # runs in one start of the processes
_FIRST_RUN_S = 8.0  # a guess until one was made
# guesses where no collectives were timed: a link in a node as a share of the rate of
# copies, and latencies
_LINK_SHARE = 1 / 4
_UNTIMED = {"near": np.nan, "far": np.nan, "latency_s": 1e-4, "hop_s": 1e-5}
# processes that want to run, by core, and the share of the time of a product that its
# repeats differ by, from which on a calibration is noisy
_BUSY = 0.5
_NOISY_SPREAD = 0.25
_TIMED_WIDTH = 0.05  # relative half-width of what was timed


@dataclass
class _Calibration:
    """A calibration on its way."""

    directory: Path
    hosts: int
    network: str
    device: str  # cpu or cuda
    ranks: int
    until_s: float  # of time.monotonic, when no further run is begun
    notes: list[str] = field(default_factory=list)  # lines of the page
    run_s: float = _FIRST_RUN_S  # of the last runs, each

    @contextmanager
    def stage(self, name: str):
        """A part whose failure is a line of the page, and the next one goes on."""
        try:
            yield
        except (OSError, ValueError, ImportError, RuntimeError) as error:
            first_line = next(iter(str(error).splitlines()), type(error).__name__)
            self.note(f"{name}: {first_line}")

    def note(self, line):
        """Put a line on the page, and print it."""
        self.notes.append(line)
        self.tell(line)

    def tell(self, line):
        """Print how far it is."""
        print(f"calibrate: {line}", file=sys.stderr, flush=True)

    def settle(self):
        """Check the settings, and keep them in the directory.

        Raises ValueError or OSError.
        """
        check_hosts(self.hosts, self.network, (), self.ranks)
        path = self.directory / "settings.json"
        names = ("hosts", "network", "device", "ranks")
        settings = {name: getattr(self, name) for name in names}
        if path.exists() and json.loads(path.read_text()) != settings:
            raise ValueError(
                f"{self.directory}: holds a calibration with other settings, "
                f"{path.read_text().strip()}"
            )
        (self.directory / "runs").mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps(settings) + "\n")

    def save(self, table, name):
        """Write a table with a row per run."""
        path = self.directory / name
        table.to_csv(path, index_label="run", float_format="%.6g")

    def folder(self, name):
        """Directory of a run."""
        return self.directory / "runs" / name.replace(" ", "_")

    def is_done(self, name):
        summary = read_json(self.folder(name) / "summary.json")
        return summary.get("status") == "completed"

    def specs(self, runs):
        """Runs by name that can be made here; the others get a line."""
        specs = {}
        for run in runs:
            with self.stage(run.name):
                spec = run.spec(self.device, self.ranks, self.hosts, self.network)
                resolve(spec)
                if spec.plan.world_size > self.ranks:
                    raise ValueError(
                        f"{spec.strategy} needs {spec.plan.world_size} ranks, but "
                        f"there are {self.ranks}"
                    )
                specs[run.name] = spec
        return specs

    def make_runs(self, runs):
        """Completed runs by name, in their order.

        Further ones are begun as long as there is time for them.
        """
        specs = self.specs(runs)
        open_runs = [
            run for run in runs if run.name in specs and not self.is_done(run.name)
        ]
        # one start of processes has one number of ranks
        for is_alone in (False, True):
            names = [run.name for run in open_runs if run.is_alone == is_alone]
            for first in range(0, len(names), _TOGETHER):
                together = names[first : first + _TOGETHER]
                title = ", ".join(together)
                if self.until_s - time.monotonic() < self.run_s * len(together):
                    self.note(
                        f"{title}: skipped: the time limit (--minutes) was reached"
                    )
                    continue
                begun_s = time.monotonic()
                self.tell(f"{title}: some {self.run_s * len(together):.0f} s")
                with self.stage(title):
                    launch_all({self.folder(name): specs[name] for name in together})
                self.run_s = (time.monotonic() - begun_s) / len(together)
                for name in filter(self.is_done, together):
                    step_s = read_run(self.folder(name)).summary["step_s"]["median"]
                    self.tell(f"{name}: a step takes {format_s(step_s)}")
        completed = {}
        for name in (run.name for run in runs):
            if self.is_done(name):
                completed[name] = read_run(self.folder(name))
            elif summary := read_json(self.folder(name) / "summary.json"):
                self.note(f"{name}: {summary['status']}, {summary['error']}")
        return completed

    def kernels(self):
        """Products and copies of one device, from kernels.csv if it is there."""
        path = self.directory / "kernels.csv"
        if not path.exists():
            from madmax_lib.runs import bench  # imports torch

            parts = ("linear", "linear up", "copy")
            # ranks have one thread each
            threads = 1 if self.device == "cpu" else 0
            table = bench(parts, "quick", device=self.device, threads=threads)
            table.to_csv(path, index=False, float_format="%.6g")
        table = pd.read_csv(path)
        # the middle half of the repeats of each product or copy
        spread = ((table["high_s"] - table["low_s"]) / table["median_s"]).median()
        if spread > _NOISY_SPREAD:
            self.note(
                f"repeats of a product differ by {spread:.0%}: other work runs here"
            )
        return table

    def links(self):
        """Collectives of all ranks, from links.csv if it is there.

        None for one rank, or where they cannot be timed.
        """
        path = self.directory / "links.csv"
        if self.ranks > 1 and not path.exists():
            with self.stage("links"):
                # complete or not at all
                part = path.with_suffix(".part")
                measure_links(
                    part,
                    "quick",
                    ranks=self.ranks,
                    hosts=self.hosts,
                    network=self.network,
                )
                part.rename(path)
        return pd.read_csv(path) if path.exists() else None

    def timed_machine(self, kernels, links, env):
        """Devices and links as they were timed, with the constants that a fit begins at."""
        listed = catalog.device_named(env["device"]) if self.device == "cuda" else None
        on_cpu = self.device == "cpu"
        products = kernels[kernels["kernel"].str.startswith("linear")]
        copies = kernels[kernels["kernel"].str.startswith("copy")]
        # pageable memory shows the host, not the device
        copies = copies[copies["how"] != "pageable"]
        bytes_per_s = float(copies["bytes_per_s"].max())
        if listed is None:
            host_bytes = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
            # processes on a CPU share what the host has
            memory_bytes = env.get("device_memory_bytes") or host_bytes / self.ranks
            peak = {env["dtype"]: float(products["flops_per_s"].max())}
            family = "cpu" if on_cpu else "other"
            device = Device(
                env["device"], memory_bytes, bytes_per_s, peak, family=family
            )
        begin = start() if listed is None else shipped()
        rates = _UNTIMED if links is None else link_rates(links)
        near = rates["near"] if rates["near"] > 0 else bytes_per_s * _LINK_SHARE
        far = rates["far"] if rates["far"] > 0 else near
        # what was timed is what is reached: the shares of the links are 1
        timed = {
            "collective_s": rates["latency_s"],
            "hop_s": rates["hop_s"],
            "network_hop_s:ethernet": rates["hop_s"],
            "link_share:other": 1.0,
            "link_share:pcie": 1.0,
            "network_share:ethernet": 1.0,
            "network_s:ethernet": 1e-6,
        }
        if listed:
            # in short runs launches and casts hide what products reach
            reached = float(products["flops_per_s"].max())
            share = reached / products_alone(listed, env["dtype"])
            timed[f"gemm_efficiency:{listed.family}-16"] = min(share, 1.0)
        low, high = 1 - _TIMED_WIDTH, 1 + _TIMED_WIDTH
        widths = {name: (low * value, high * value) for name, value in timed.items()}
        parameters = replace(
            begin,
            constants=begin.constants | timed,
            intervals={**begin.intervals, **widths},
            collectives={} if links is None else MeasuredCollectives(links).curves,
            links=() if links is None else (near, far),
            provenance={"timed": [*timed]},
        )
        cluster = Cluster(
            self.directory.name,
            listed or device,
            self.ranks // self.hosts,
            self.hosts,
            Link("loopback" if on_cpu else "pcie", near),
            Link("ethernet", far),
        )
        about = {"device": env["device"], "hosts": self.hosts, "network": self.network}
        return Machine(cluster, parameters, env["dtype"], provenance=about)

    def fitted_machine(self, machine, runs):
        """The machine that a fit to these runs gives.

        parts.csv gets their predicted parts beside the measured ones.
        """
        parts = {name: traced_parts(run) for name, run in runs.items()}
        measured = pd.DataFrame(parts).T.astype(float)
        if self.device == "cuda":  # as `parts_of` counts them
            measured["gemm_s"] += measured["pointwise_s"]
        cases = [case_of(run.spec, machine) for run in runs.values()]
        parameters = fit_constants(cases, measured, machine.parameters)
        fitted = parts_of(Steps.stack(cases), parameters).set_axis(measured.index)
        measured = measured.add_prefix("measured_")
        self.save(fitted.add_prefix("predicted_").join(measured), "parts.csv")
        if self.device == "cpu":
            # Python and torch, which no model of tensors knows
            sizes = [process_bytes(run, machine) for run in runs.values()]
            device = replace(
                machine.cluster.device, process_bytes=float(np.median(sizes))
            )
            machine = replace(machine, cluster=replace(machine.cluster, device=device))
        return replace(machine, parameters=parameters)

    def predictions(self, machine, runs):
        """Predictions of runs, written before they are made.

        What was predicted of those made earlier stays.
        """
        path = self.directory / "predictions.csv"
        specs = self.specs(runs)
        rows = {name: predicted(machine, spec) for name, spec in specs.items()}
        if path.exists():
            earlier = pd.read_csv(path, index_col="run")
            done = [
                name for name in rows if name in earlier.index and self.is_done(name)
            ]
            rows |= {name: earlier.loc[name].to_dict() for name in done}
        table = pd.DataFrame(rows).T
        self.save(table, path.name)
        return table

    def finish(self):
        """All stages; those that are done already cost nothing."""
        begun_s = time.monotonic()
        load = os.getloadavg()[0] / os.cpu_count()
        if load > _BUSY:
            self.note(
                f"the machine is busy: {load:.1f} processes a core wanted to run before "
                "the first run; calibrate an idle one, in a folder of its own"
            )
        kernels = self.kernels()
        links = self.links()
        fitted = self.make_runs(_planned_runs("fitted"))
        if not fitted:
            raise ValueError(
                f"{self.directory}: no run completed; {'; '.join(self.notes)}"
            )
        env = next(iter(fitted.values())).env
        machine = self.fitted_machine(self.timed_machine(kernels, links, env), fitted)
        new_runs = _planned_runs("predicted")
        # first the predictions, then the runs: no run can have shaped them
        predictions = self.predictions(machine, new_runs)
        legal = [run for run in new_runs if run.name in predictions.index]
        judged = self.make_runs(legal)
        rows = {
            name: compared(predictions.loc[name], run) for name, run in judged.items()
        }
        results = pd.DataFrame(rows).T
        self.save(results, "results.csv")
        path = self.directory / "machine.json"
        # of what was done before it was stopped
        earlier_s = read_json(path).get("provenance", {}).get("seconds", 0.0)
        facts = {
            "seconds": earlier_s + time.monotonic() - begun_s,
            "notes": self.notes,
        }
        machine = replace(machine, provenance=machine.provenance | facts)
        machine = machine.judged(results)
        machine.save(path)
        rows = {name: run_row(run, path) for name, run in (fitted | judged).items()}
        table = pd.DataFrame.from_dict(rows, orient="index")
        table.to_csv(self.directory / "rows.csv", index=False)
        write_page(self.directory, machine)
        return machine


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
        raise ValueError(f"directory={short_repr(directory)} is not a path")
    if not (isinstance(minutes, int | float) and minutes > 0):
        raise ValueError(f"minutes={minutes!r} must be a positive number")
    gpus = 0 if RunSpec(device=device).device == "cpu" else gpu_count()
    if device == "cuda" and not gpus:
        raise ValueError("device='cuda', but torch sees no CUDA device here")
    if device == "auto":
        device = "cuda" if gpus else "cpu"
    ranks = ranks or (gpus if device == "cuda" else max(2, hosts))
    directory = Path(directory).expanduser().resolve()
    until_s = time.monotonic() + 60 * minutes
    calibration = _Calibration(directory, hosts, network, device, ranks, until_s)
    calibration.settle()
    return calibration.finish()
