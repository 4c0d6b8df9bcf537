"""Checks that training works on this machine: one question after another, each answered
in a line, also where torch is missing.

What is not there is told, what is there and does not work fails: a GPU that torch
cannot use, a card without kernels in this build of torch, a driver too old for its
CUDA, ranks that do not reach each other, a power meter without readings.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from importlib.util import find_spec
from itertools import product
from math import isnan

from madmax_lib.runs.launch import gpu_count, measure_links

# least driver by major version of CUDA [NVIDIA, CUDA Toolkit release notes, CUDA Minor
# Version Compatibility]
_LEAST_DRIVERS = {"11": 450, "12": 525, "13": 580}
_ANSWER_S = 120.0  # of all ranks
_ROUNDING = 0.2  # of sums up to 20 in bf16, which has 8 bits


class Missing(Exception):
    """Raised where a question's subject is not on this machine."""


def answers(
    questions: Mapping[str, Callable[[], str]],
) -> Iterator[tuple[str, str, str]]:
    """Name of each question, works, missing (there is nothing to try) or fails, and
    what was found, or why not.
    """
    for name, ask in questions.items():
        try:
            yield name, "works", ask()
        except Missing as error:
            yield name, "missing", str(error)
        except Exception as error:  # whatever a broken installation raises
            reason = next(iter(str(error).splitlines()), "")
            yield name, "fails", f"{type(error).__name__}: {reason}"


def selftest() -> Iterator[tuple[str, str, str]]:
    """Driver, torch and its device, a kernel, collectives, power meter and topology."""
    yield from answers({"driver": _driver, "topology": _topology})
    yield (torch := next(answers({"torch": _torch})))
    if torch[1] != "missing":
        questions = {"kernels": _kernels, "all-reduce": _all_reduce}
        yield from answers(questions | {"power meter": _meter})


def _smi(*arguments):
    if not shutil.which("nvidia-smi"):
        raise Missing("no NVIDIA GPU here: runs use the CPU")
    done = subprocess.run(
        ["nvidia-smi", *arguments],
        capture_output=True,
        text=True,
        timeout=20,
        check=True,
    )
    return done.stdout.splitlines()


def _driver():
    fields = "--query-gpu=name,memory.total,driver_version"
    return "; ".join(_smi(fields, "--format=csv,noheader"))


def _topology():
    """Links of the first GPU to the others, in nvidia-smi's words."""
    # NV is NVLink, PIX to SYS are ways over PCIe, X is the GPU itself. The table has a
    # header, which begins with a blank, and rows of network cards after those of GPUs.
    for line in _smi("topo", "-m"):
        if line.startswith("GPU0"):
            links = line.split()[1:]
            return " ".join(links)
    raise Missing("nvidia-smi reports no topology")


def _torch():
    """Its build and the device that runs take, which must be the GPU where there is
    one.
    """
    if not find_spec("torch"):
        raise Missing("is not installed: pip install 'madmax-workbench[run]'")
    import torch

    version = torch.__version__
    cuda = torch.version.cuda
    with suppress(Missing):  # without a driver torch need not see a GPU
        driver = int(re.search(r"(\d+)[.\d]*$", _driver())[1])
        if not cuda:
            raise RuntimeError(
                f"{version} is built for CPUs and leaves the GPU idle; "
                "install a CUDA build"
            )
        least = _LEAST_DRIVERS.get(cuda.split(".")[0], 0)
        if driver < least:
            needs = f"needs driver {least}, this is {driver}"
            raise RuntimeError(f"{version} with CUDA {cuda} {needs}")
        if not torch.cuda.is_available():
            raise RuntimeError(f"{version} sees no GPU, though nvidia-smi does")
    if count := torch.cuda.device_count():
        return f"{version}, {count} x {torch.cuda.get_device_name()}"
    return f"{version}, {os.cpu_count()} CPU cores"


def _kernels():
    """A matrix product on every device, in every dtype, beside the same in fp64."""
    import torch

    from madmax_lib.runs.measure.peak_rates import TORCH_DTYPES

    devices = [f"cuda:{number}" for number in range(torch.cuda.device_count())]
    about = "cpu"
    if devices:
        capability = torch.cuda.get_device_capability
        cards = {"sm_{}{}".format(*capability(device)) for device in devices}
        built = " ".join(torch.cuda.get_arch_list())
        about = f"{' '.join(cards)}, torch is built for {built}"
    for device, (name, dtype) in product(devices or ["cpu"], TORCH_DTYPES.items()):
        # a square matrix, so that it can be multiplied by itself
        a = torch.linspace(-1, 1, 64 * 64).reshape(64, 64).to(dtype)
        exact = a.double() @ a.double()
        try:  # a card that nothing was built for shows it here first
            result = (a.to(device) @ a.to(device)).cpu().double()
        except RuntimeError as reason:
            raise RuntimeError(f"{name} on {device} ({about}): {reason}") from None
        error = (result - exact).abs().max().item()
        if not error < _ROUNDING:
            raise RuntimeError(f"a product in {name} on {device} is wrong by {error:g}")
    return f"products in {', '.join(TORCH_DTYPES)} on {about}"


def _all_reduce():
    """Ranks of a start of torchrun that have summed a number: one per GPU, or two
    processes on a CPU.
    """
    # a firewall, a name that does not resolve, or a library of another version on one of
    # the ranks shows here
    ranks = measure_links(timeout_s=_ANSWER_S)
    backend = "nccl" if gpu_count() else "gloo"
    return f"{ranks} ranks over {backend}"


def _meter():
    from madmax_lib.runs.measure.meter import meter

    gpus = gpu_count()
    source = meter("auto", "cuda" if gpus else "cpu", gpus)
    if source.read is None:
        raise Missing("no power: GPUs need nvidia-ml-py")
    reading = source.read()
    if isnan(reading.power_w):
        raise RuntimeError(f"{source.name} reports no power")
    return f"{source.name}, {reading.power_w:.0f} of {source.cap_w:.0f} W"
