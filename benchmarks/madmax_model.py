"""How long does one configuration of MAD-Max's model take, ours beside the public
release?

`python benchmarks/madmax_model.py` prints CPU milliseconds per configuration of
`papers.madmax.evaluate` on one core, the median of repeated batches, beside the
release's own times as recorded on another day: the ratios are rough.
"""

from __future__ import annotations

import statistics
import time

import pandas as pd

from madmax_lib.papers.madmax import evaluate, suite, systems

RELEASE_MS = {
    "dlrm-a": 0.70,
    "gpt3-175b": 26.0,
}  # recorded by running the public release, one core
CASES = {
    "dlrm-a": ("DLRM-A", "zionex-128", 65_536),
    "gpt3-175b": ("GPT-3", "llm-a100-2048", 2048),
}
STRATEGIES = ("ddp", "fsdp", "tp,ddp")
BATCH, REPEATS = 50, 9


def milliseconds(model: str, system: str, global_batch: int, strategy: str) -> float:
    """CPU time per configuration, median over batches of equal cases (tables and
    DataFrame included).
    """
    clusters = systems([system])
    models = suite()
    row = {
        "model": model,
        "type": models.set_index("name").at[model, "type"],
        "system": system,
        "task": "pretrain",
        "dense_strategy": strategy,
        "global_batch": global_batch,
    }
    cases = pd.DataFrame([row] * BATCH)
    times = []
    for _ in range(REPEATS):
        started = time.process_time()
        evaluate(cases, models, clusters)
        times.append((time.process_time() - started) / BATCH * 1e3)
    return statistics.median(times)


def main() -> None:
    """Print the table."""
    print(f"{'model':<12}{'strategy':<10}{'ours ms':>9}{'release ms':>12}{'ratio':>8}")
    for name, case in CASES.items():
        for strategy in STRATEGIES:
            ours = milliseconds(*case, strategy)
            print(
                f"{name:<12}{strategy:<10}{ours:>9.2f}{RELEASE_MS[name]:>12.2f}{RELEASE_MS[name] / ours:>8.1f}"  # noqa: E501
            )


if __name__ == "__main__":
    main()
