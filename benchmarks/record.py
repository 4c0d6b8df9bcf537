"""What does `madmax record` cost outside of the steps that it records?

`python benchmarks/record.py` trains a small model in fresh processes, with and without
it in turns, and prints the CPU seconds of a step before and behind the recording, the
least of some repeats; then what the counting of a step takes alone, and the losses,
which have to be equal to the last bit.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import pandas as pd

REPEATS = 7
STEPS = 400
SCRIPT = f"""
import time
import torch

torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Sequential(
    torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10)
)
optimizer = torch.optim.AdamW(model.parameters())
for step in range({STEPS} + 50):
    if step == 50:
        before_s = time.process_time()
    x, y = torch.randn(64, 256), torch.randint(0, 10, (64,))
    optimizer.zero_grad()
    loss = torch.nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
print("cpu", (time.process_time() - before_s) / {STEPS}, loss.item().hex())
"""
COUNTING = """
import sys, timeit
from pathlib import Path
from madmax_lib.runs import Recorder
if sys.argv[1] == "with":
    Recorder(Path("."), print, warmup=10**9).watch()
import torch
class Nothing(torch.optim.Optimizer):
    def step(self):
        pass
optimizer = Nothing([torch.zeros(1)], {})
times = timeit.repeat(optimizer.step, number=10_000, repeat=9)
print("cpu", min(times) / 10_000, 0)
"""
RECORD = ("-m", "madmax_lib", "record")
WAYS = {
    "without": [],
    # the recording is over when the measured steps begin
    "behind the recording": [*RECORD],
    # it would begin when they are over
    "before the recording": [*RECORD, "--warmup", "1000"],
}


def seconds(folder: Path, *words: object) -> tuple[float, str]:
    """CPU seconds of a step, and the last loss."""
    command = [sys.executable, *map(str, words)]
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, check=True
    )
    line = next(text for text in done.stdout.splitlines() if text.startswith("cpu "))
    _, each_s, loss = line.split()
    return float(each_s), loss


def main() -> None:
    """Print the table."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "train.py").write_text(SCRIPT)
        (folder / "counting.py").write_text(COUNTING)
        rows = []
        for _ in range(REPEATS):
            for way, words in WAYS.items():
                rows.append((way, *seconds(folder, *words, "train.py")))
        table = pd.DataFrame(rows, columns=["way", "cpu_s", "loss"])
        least = table.groupby("way", sort=False).agg({"cpu_s": "min", "loss": "unique"})
        least["over"] = least["cpu_s"] / least["cpu_s"].iloc[0] - 1
        print(least.to_string())
        alone = {how: seconds(folder, "counting.py", how)[0] for how in ("no", "with")}
        counting_s = alone["with"] - alone["no"]
        share = counting_s / least["cpu_s"].iloc[0]
        print(f"counting a step: {1e9 * counting_s:.0f} ns, {share:.3%} of this one")


if __name__ == "__main__":
    main()
