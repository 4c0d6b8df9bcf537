"""The runs of a calibration, from `data/calibration_runs.json`.

Fitted: models of unlike shape, in layouts that tell compute, its launches and its
neighbours apart. Predicted, the most telling first: other models, in layouts of which
all but tp are new to the fit.
"""

import json
from dataclasses import dataclass, field
from functools import lru_cache

from madmax_lib import catalog
from madmax_lib.runs.spec import RunSpec

# of a run: one to warm up, four traced, six counted
_STEPS = 11
_WARMUP = 1
_TIMEOUT_S = 120.0
# factor by which a GPU's models are wider: those of a CPU would only launch kernels
_WIDER = {"hidden": 8, "ffn": 8, "expert_ffn": 8, "heads": 4, "kv_heads": 4}


@dataclass(frozen=True)
class PlannedRun:
    """A model and a layout, before the number of ranks is known.

    >>> run = planned_runs("fitted")[5]
    >>> run.name, run.spec("cpu", ranks=4).strategy
    ('short tp', 'tp2.dp2')
    """

    model: str  # of `calibration_runs.json`
    layout: str  # dp1, dp, tp, tp-image, pp, cp, ep, z2 or z3
    base: str  # model of the catalog whose sizes are changed
    batch: int  # samples of two ranks
    sizes: dict = field(hash=False)
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
        wider = _WIDER if device == "cuda" else {}
        sizes = {
            name: value * wider[name] if name in wider else value
            for name, value in self.sizes.items()
        }
        where = {} if self.is_alone else {"hosts": hosts, "network": network}
        return RunSpec(
            self.base,
            self._strategy(ranks),
            sizes=sizes,
            device=device,
            global_batch=self.batch * max(ranks // 2, 1),
            steps=_STEPS,
            warmup=_WARMUP,
            timeout_s=_TIMEOUT_S,
            **where,
        )

    def _strategy(self, ranks: int):
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


@lru_cache(maxsize=2)
def planned_runs(purpose: str) -> tuple[PlannedRun, ...]:
    """The runs that are fitted or predicted, in the order in which they are made."""
    content = json.loads(catalog.data_file("calibration_runs.json").read_text())
    models = content["models"]
    return tuple(
        PlannedRun(model, layout, **models[model], is_fitted=purpose == "fitted")
        for model, layout in content[purpose]
    )
