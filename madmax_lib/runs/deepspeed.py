"""How does the same step run on DeepSpeed? An adapter for plans of data parallelism: ZeRO-0..3, ZeRO++, CPU offload.

`config` writes DeepSpeed's configuration of a plan [deepspeed.ai/docs/config-json], `parallelize` returns a job with
the methods of `parallel.Job`. DeepSpeed is optional and imported only there. It compiles its operators when first used,
behind a file named `lock`; a build that was killed leaves it, and every later start waits for it without a word.
`locks` finds such files, `check` explains them.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from madmax_lib.plan import Plan
from madmax_lib.runs import checks, models

if TYPE_CHECKING:
    from madmax_lib.runs.deepspeed_job import DeepSpeedJob

__all__ = ["check", "config", "locks", "parallelize"]

_OLD_S = 900.0  # a build of all operators takes minutes
_WIDTHS = {"fp32": 4, "bf16": 2, "fp16": 2}


def locks(older_than_s: float = _OLD_S) -> list[Path]:
    """Locks of torch's extension builds that nobody has touched for so long, oldest first.

    Looked for where torch builds: TORCH_EXTENSIONS_DIR, else ~/.cache/torch_extensions.
    """
    folder = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or Path.home() / ".cache" / "torch_extensions")
    since = {lock: lock.stat().st_mtime for lock in folder.glob("**/lock")}
    return sorted((lock for lock in since if time.time() - since[lock] > older_than_s), key=since.__getitem__)


def check() -> None:
    """Raises, in one line, what keeps DeepSpeed from starting; what it can run is in `checks.check`.

    ModuleNotFoundError if it is not installed, FileExistsError for a stale lock.
    """
    if find_spec("deepspeed") is None:
        raise ModuleNotFoundError("deepspeed is not installed; pip install deepspeed, or leave out @deepspeed")
    if stale := locks():
        age_h = (time.time() - stale[0].stat().st_mtime) / 3600
        raise FileExistsError(f"{stale[0]}: {age_h:.1f} h old, left by a build that was killed; DeepSpeed would wait "
                              "for it for ever. If no build is running, delete it")  # fmt: skip


def config(plan: Plan, *, global_batch: int, dtype: str = "fp32", learning_rate: float = 1e-3,
           weight_decay: float = 0.0, clip_norm: float = 1.0) -> dict:  # fmt: skip
    """DeepSpeed's configuration of a plan, as in its JSON file."""
    elements = int(plan.bucket_bytes / _WIDTHS[dtype]) if math.isfinite(plan.bucket_bytes) else 2**62
    zero: dict[str, object] = {"stage": plan.zero, "overlap_comm": True, "reduce_bucket_size": elements}
    zero["allgather_bucket_size"] = elements
    if plan.offload:
        zero["offload_optimizer"] = {"device": "cpu"}
    if plan.offload == "all":
        zero["offload_param"] = {"device": "cpu"}
    zero |= {"zero_quantized_weights": True} if plan.qwz else {}
    zero |= {"zero_quantized_gradients": True} if plan.qgz else {}
    zero |= {"zero_hpz_partition_size": int(os.environ.get("LOCAL_WORLD_SIZE", plan.dp))} if plan.hpz else {}
    adam = {"lr": learning_rate, "weight_decay": weight_decay, "betas": [0.9, 0.95], "torch_adam": True}
    result = {
        "train_batch_size": global_batch, "train_micro_batch_size_per_gpu": plan.micro_batch,
        "gradient_accumulation_steps": plan.micro_batches(global_batch), "gradient_clipping": clip_norm,
        "zero_optimization": zero, "optimizer": {"type": "AdamW", "params": adam},
        "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False, "steps_per_print": 2**31,
    }  # fmt: skip
    return result | ({dtype: {"enabled": True}} if dtype in ("bf16", "fp16") else {})


def parallelize(model: str, plan: Plan, *, global_batch: int, sequence: int | None = None, device: str = "cpu",
                sizes: Mapping[str, object] | None = None, dtype: str = "fp32", seed: int = 0,
                learning_rate: float = 1e-3, weight_decay: float = 0.0, clip_norm: float = 1.0,
                weights: str | Path | None = None, **refused) -> DeepSpeedJob:  # fmt: skip
    """As `parallel.parallelize`, on DeepSpeed; collective over all ranks. Raises as the two checks do."""
    spec = models.spec(model, **(sizes or {}))
    checks.check(plan, spec, global_batch=global_batch, world_size=plan.world_size, sequence=sequence, dtype=dtype,
                 engine="deepspeed", **refused)  # fmt: skip
    check()
    settings = config(plan, global_batch=global_batch, dtype=dtype, learning_rate=learning_rate,
                      weight_decay=weight_decay, clip_norm=clip_norm)  # fmt: skip
    from madmax_lib.runs.deepspeed_job import DeepSpeedJob

    return DeepSpeedJob(spec, plan, device, dtype, settings, seed, weights)
