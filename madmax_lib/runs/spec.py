"""`RunSpec`, a training run to be launched: model, strategy, settings and data, with
their checks.

Everything that can be refused is refused here or in `check`, in one line and before a
process starts; torch is not imported. The strategy is the text form of a `Plan`,
perhaps with an engine: `dp2.tp2.z3`, `dp2.z2@deepspeed`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from importlib.util import find_spec
from pathlib import Path

from madmax_lib.base import require_number, require_type
from madmax_lib.base.extras import with_extra
from madmax_lib.catalog import Transformer
from madmax_lib.plan import Plan
from madmax_lib.runs import checks, testbed
from madmax_lib.runs.data import batches
from madmax_lib.runs.model import models
from madmax_lib.runs.settings import Settings

_ENGINES = ("torch", "deepspeed")
_DEVICES = ("auto", "cpu", "cuda")
_GONE = "loss_parallel"  # a setting until 0.1; all its records leave it off


@dataclass(frozen=True)
class RunSpec(Settings):
    """One training run; further fields are those of `Settings`. Raises ValueError
    naming field, value and rule.

        spec = mm.RunSpec(model="gpt-tiny", strategy="dp2.z3", steps=12)
        directory = mm.launch(spec, "runs/first")

    model: name of a model that runs here, one of `runs.model.models.MODELS` (gpt-tiny).
    strategy: text form of a Plan, perhaps with @deepspeed (dp1).
    steps: training steps (6).
    ranks: processes, checked against the strategy; None for as many as it needs (None).
    data: a dataset of `runs.data.batches.NAMES`, generated data of the model's kind if
    empty ("").
    tokenizer: bytes, or the name or folder of one of Hugging Face (bytes).
    download: whether missing data may be fetched (False).
    sizes: fields of the model to change, such as {"layers": 2} ({}).
    warmup: first steps that the summary leaves out (2).
    profile: whether steps 2 to 4 are traced (True).
    profile_memory: whether the trace has the allocator's events, with a snapshot on a
    GPU (False).
    validate_every: steps between two validation losses, 0 for none (0).
    checkpoint_every: steps between two checkpoints, 0 for none (0).
    device: cpu, cuda, or auto for CUDA where it is present (auto).
    power: auto for the meter of the machine, or none (auto).
    timeout_s: seconds without progress after which the run is ended (600).
    wandb: whether steps are logged to Weights & Biases too (False).
    dtype: fp32, bf16, fp16, or auto for bf16 on a GPU that computes in it and fp32
    elsewhere (auto).
    hosts: namespaces over which the ranks are spread evenly, see `runs.testbed` (1).
    network: rate of a host's uplink, such as 300mbit; unshaped if empty ("").
    speed: share 0.1..1 of a core that each rank has, all of it if empty (()).
    See also: mm.launch, mm.Plan.
    """

    _dtypes = ("auto", *Settings._dtypes)

    model: str = "gpt-tiny"
    strategy: str = "dp1"
    steps: int = 6
    ranks: int | None = None
    data: str = ""
    tokenizer: str = "bytes"
    download: bool = False
    sizes: dict = field(default_factory=dict, hash=False)
    warmup: int = 2
    profile: bool = True
    profile_memory: bool = False
    validate_every: int = 0
    checkpoint_every: int = 0
    device: str = "auto"
    power: str = "auto"
    timeout_s: float = 600.0
    wandb: bool = False
    dtype: str = field(default="auto", kw_only=True)
    hosts: int = 1
    network: str = ""
    speed: tuple = ()

    def __post_init__(self):
        if not isinstance(self.speed, (list, tuple)):
            raise ValueError(
                f"speed={self.speed!r} must list a share per rank, such as [1, 0.5]"
            )
        object.__setattr__(self, "speed", tuple(self.speed))  # JSON has lists
        super().__post_init__()
        for share in self.speed:
            require_number("speed", share, positive=True)
        for size in self.sizes:
            require_type("sizes: name", size, str)
        if self.device not in _DEVICES:
            names = ", ".join(_DEVICES)
            raise ValueError(f"device={self.device!r} is not one of {names}")
        if self.engine not in _ENGINES:
            raise ValueError(
                f"engine {self.engine!r} in strategy {self.strategy!r} is not one of "
                f"{', '.join(_ENGINES)}"
            )
        # One spelling of each text, so that equal runs are equal specs.
        text, at, engine = self.strategy.lower().replace(" ", "").partition("@")
        spelling = {
            "strategy": (text or "dp1") + (at + engine) * (self.engine != "torch"),
            "network": testbed.canonical(self.network),
            "model": models.name(self.model),
        }
        for name, value in spelling.items():
            object.__setattr__(self, name, value)
        data = self.data or batches.default_name(self.kind)
        object.__setattr__(self, "data", batches.canonical(data))
        plan = self.plan
        if self.ranks not in (None, plan.world_size):
            product = f"{plan.dp} x {plan.tp} x {plan.pp} x {plan.cp}"
            raise ValueError(
                f"dp x tp x pp x cp = {product} = {plan.world_size}, "
                f"but ranks={self.ranks}"
            )

    @property
    def shapes(self) -> Transformer:
        """The model's sizes."""
        return models.spec(self.model, **self.sizes)

    @property
    def kind(self) -> str:
        """images or text."""
        return "images" if self.shapes.image else "text"

    @property
    def digest(self) -> str:
        """Eight letters that differ from those of any other spec."""
        return hashlib.sha256(repr(self).encode()).hexdigest()[:8]

    @property
    def engine(self) -> str:
        """Library that splits the model: torch, or deepspeed."""
        return self.strategy.partition("@")[2].strip().lower() or "torch"

    @property
    def plan(self) -> Plan:
        """The strategy as a Plan; without mb a rank takes its samples at once, a
        pipeline in pp equal micro-batches, that of a V in 2 pp.

        Where that does not divide them, in the next number that does.
        """
        text = self.strategy.partition("@")[0]
        plan = Plan.parse(text)
        if any(part.startswith("mb") for part in text.lower().split(".")):
            return plan
        share = max(self.global_batch // plan.dp, 1)
        least = plan.pp * (1 + plan.folds)  # both arms of a V fill
        counts = (count for count in range(least, share) if share % count == 0)
        return replace(plan, micro_batch=share // next(counts, share))

    @property
    def name(self) -> str:
        """A name for the directory of the run: model, strategy, rank of LoRA, whether it
        is compiled, hosts and their network.

        >>> RunSpec(model="gpt_tiny", strategy="dp2.z3").name
        'gpt-tiny_dp2.z3'
        """
        adapters = f"_lora{self.lora_rank}" if self.lora_rank else ""
        spread = f"_{self.hosts}x{self.network or 'host'}" if self.hosts > 1 else ""
        adapters += "_compiled" * self.compile
        return f"{self.model}_{self.strategy.replace('@', '_')}{adapters}{spread}"

    def get_data(self, allow_download: bool = False) -> batches.Data:
        """The data of the run, in the shape that the model takes; falls back as
        `batches.get_data` does.
        """
        shapes = self.shapes
        shape = batches.SampleShape(
            image=shapes.image or 32,
            classes=shapes.classes or 10,
            sequence=self.sequence or shapes.sequence,
        )
        return batches.get_data(
            self.data, shape, self.tokenizer, self.seed, allow_download
        )

    @classmethod
    def from_dict(cls, values: Mapping[str, object]) -> RunSpec:
        """Spec of field values, as JSON keeps them. Raises ValueError for what is not a
        field; `loss_parallel` of older records is left out.
        """
        values = {name: value for name, value in values.items() if name != _GONE}
        if unknown := set(values) - {field.name for field in fields(cls)}:
            raise ValueError(f"{sorted(unknown)[0]!r} is not a field of a RunSpec")
        return cls(**values)


def check(spec: RunSpec, gpus: int, nodes: int = 1) -> str:
    """The device the run will use, cpu or cuda; gpus: CUDA devices of this machine, of
    which there are `nodes`.

    Raises ValueError, FileNotFoundError, or ModuleNotFoundError for a missing package,
    in one line, for what cannot work.
    """
    optional = {"wandb": spec.wandb, "torchao": spec.adam_8bit}
    for package in ("torch", *(name for name, wanted in optional.items() if wanted)):
        if not find_spec(package):
            raise with_extra(ModuleNotFoundError(name=package))
    shapes = spec.shapes
    ranks = spec.plan.world_size
    checks.check(spec.plan, shapes, spec, spec.engine)
    if spec.engine == "deepspeed":
        checks.check_deepspeed()
    kind = batches.kind_of(spec.data)
    if kind != spec.kind:
        raise ValueError(
            f"data {spec.data} is {kind}, but {spec.model} is trained on {spec.kind}"
        )
    if spec.sequence and spec.kind == "images":
        tokens = f"{spec.model} has {shapes.sequence} tokens per image"
        raise ValueError(f"sequence={spec.sequence} is for text; {tokens}")
    if spec.power not in ("auto", "none"):
        raise ValueError(f"power={spec.power!r} is neither auto nor none")
    if spec.profile_memory and not spec.profile:
        raise ValueError(
            "profile_memory=True needs profile=True, which writes the trace"
        )
    if spec.lora_rank > shapes.hidden:
        hidden = f"hidden={shapes.hidden} of {spec.model}"
        raise ValueError(f"lora_rank={spec.lora_rank} exceeds {hidden}")
    if spec.weights and not any(Path(spec.weights).glob("*.safetensors")):
        lacks = f"has no .safetensors file with weights of {spec.model}"
        raise FileNotFoundError(f"weights={spec.weights!r} {lacks}")
    if spec.wandb:
        checks.check_wandb_key()
    testbed.check_hosts(spec.hosts, spec.network, spec.speed, ranks)
    return _device(spec, ranks, gpus, nodes)


def _device(spec, ranks, gpus, nodes):
    """The device of a run; refuses GPUs that are not here."""
    device = spec.device
    if device == "auto":
        device = "cuda" if gpus else "cpu"
    if device == "cuda" and (spec.hosts > 1 or spec.speed):
        raise ValueError("hosts and speed spread processes on a CPU; give device='cpu'")
    if nodes > 1 and not gpus and spec.device == "auto":
        # a login node prepares runs of others, whose GPUs it cannot see
        say = "give device='cuda' or 'cpu', as this may not be one of them"
        raise ValueError(f"{nodes} nodes, and no GPU here: {say}")
    present = gpus * nodes
    if device == "cuda" and ranks > present and (gpus or nodes == 1):
        raise ValueError(
            f"{spec.strategy} needs {ranks} GPUs, {present} present; "
            "device='cpu' runs it on a CPU"
        )
    return device
