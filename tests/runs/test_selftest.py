"""Answers about a machine: what works, what is missing, and what is there and does not
work.
"""

import os

import pytest
import torch

from madmax_lib.runs import selftest

pytestmark = pytest.mark.slow


@pytest.fixture
def smi(monkeypatch, tmp_path):
    """An nvidia-smi that says what it is told to."""
    path = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    def say(*lines, status=0):
        echoes = [f"echo '{line}'" for line in lines]
        path.write_text("\n".join(["#!/bin/sh", *echoes, f"exit {status}\n"]))
        path.chmod(0o755)

    return say


def ask(name):
    """The one answer to a question."""
    return next(selftest.answers({name: getattr(selftest, f"_{name}")}))[1:]


def test_gpus_are_those_of_nvidia_smi(smi):
    card = "NVIDIA H200, 143771 MiB, 570.1"
    smi(card, card)
    assert ask("driver") == ("works", f"{card}; {card}")
    smi("     GPU0  GPU1  NIC0", "GPU0   X   NV18  SYS", "GPU1  NV18  X    SYS")
    assert ask("topology") == ("works", "X NV18 SYS")
    smi(status=9)
    assert ask("driver")[0] == "fails"


@pytest.mark.parametrize(
    ("cuda", "driver", "message"),
    [
        (None, "580.65.06", "is built for CPUs and leaves the GPU idle"),
        ("13.0", "570.133.20", "with CUDA 13.0 needs driver 580, this is 570"),
        ("12.8", "470.82", "with CUDA 12.8 needs driver 525, this is 470"),
        ("12.8", "570.133.20", "sees no GPU, though nvidia-smi does"),
        ("14.0", "590.1", "sees no GPU, though nvidia-smi does"),
    ],
)
def test_a_gpu_that_torch_cannot_use_fails(smi, monkeypatch, cuda, driver, message):
    smi(f"Tesla P100-PCIE-16GB, 16384 MiB, {driver}")
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    status, text = ask("torch")
    assert status == "fails" and message in text


def test_a_card_without_kernels_shows_at_the_first_one(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (6, 0))
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_75", "sm_90"])

    def to(tensor, target):
        if isinstance(target, str):
            raise RuntimeError("CUDA error: no kernel image is available\nmore")
        return tensor

    monkeypatch.setattr(torch.Tensor, "to", to)
    status, text = ask("kernels")
    assert status == "fails"
    built = "fp32 on cuda:0 (sm_60, torch is built for sm_75 sm_90)"
    assert f"{built}: CUDA error: no kernel image" in text


def test_a_wrong_product_fails(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert ask("kernels") == ("works", "products in fp32, bf16, fp16 on cpu")
    monkeypatch.setattr(torch.Tensor, "cpu", lambda tensor: tensor + 1)
    says = "RuntimeError: a product in fp32 on cpu is wrong by 1"
    assert ask("kernels")[1].startswith(says)


def test_an_import_system_that_raises_is_an_answer(monkeypatch):
    def find_spec(name):
        raise RuntimeError("a broken hook")

    monkeypatch.setattr(selftest, "find_spec", find_spec)
    assert ask("torch") == ("fails", "RuntimeError: a broken hook")
    names = {name for name, *_ in selftest.selftest()}
    assert {"driver", "torch", "all-reduce"} <= names


def test_without_torch_nothing_else_is_asked_of_it(monkeypatch):
    monkeypatch.setattr(selftest, "find_spec", lambda name: None)
    answers = {name: status for name, status, _ in selftest.selftest()}
    assert list(answers) == ["driver", "topology", "torch"]
    assert answers["torch"] == "missing"


def test_ranks_reach_each_other_here():
    assert ask("all_reduce") == ("works", "2 ranks over gloo")
