"""What only a GPU takes, without one: a device named cuda whose tensors lie in the
memory of the host, and calls of torch.cuda that are written down in order.

NVML has its stand-in in test_meter.py, drivers and cards in test_selftest.py,
DeepSpeed's own parser in test_deepspeed.py.
"""

import inspect
import json
import sys
import time
from functools import partial

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import torch.distributed as dist  # noqa: E402
from torch.distributed import distributed_c10d as c10d  # noqa: E402
from torch.overrides import TorchFunctionMode  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

from madmax_lib.plan import Plan  # noqa: E402
from madmax_lib.runs import RunSpec, read_run, train  # noqa: E402
from madmax_lib.runs.launch import prepare  # noqa: E402
from madmax_lib.runs.measure import bench, links, profiler  # noqa: E402
from madmax_lib.runs.model import network  # noqa: E402
from madmax_lib.runs.model.layers import Attention  # noqa: E402
from madmax_lib.runs.parallel import data_parallel, mesh  # noqa: E402
from madmax_lib.runs.parallel.trainer import parallelize  # noqa: E402

if torch.cuda.is_available():
    pytest.skip("a real GPU takes these paths itself", allow_module_level=True)

ANSWERS = {
    "is_available": True,
    "device_count": 1,
    "current_device": 0,
    "get_device_name": "NVIDIA H100 80GB HBM3",
    "get_device_capability": (9, 0),
    "is_bf16_supported": True,
    "memory_allocated": 1,
    "memory_reserved": 3,
    "max_memory_allocated": 2,
    **dict.fromkeys(
        ["set_device", "synchronize", "empty_cache", "reset_peak_memory_stats"]
    ),
}
INIT = inspect.signature(dist.init_process_group)


class OnHost(TorchFunctionMode):
    """Whoever asks for a tensor on cuda gets one of the host; `calls`: of these
    functions, in order.
    """

    def __init__(self, calls, watched=(), cuda=False):
        super().__init__()
        self.calls = calls
        self.watched = watched
        self.cuda = cuda

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.device:
            return func(*args, **kwargs)
        if self.cuda and func == torch.Tensor.is_cuda.__get__:
            return True
        if func.__name__ in self.watched:
            self.calls.append((func.__name__, kwargs))
        kwargs = {name: _host(value) for name, value in kwargs.items()}
        return func(*map(_host, args), **kwargs)


def _host(value):
    is_cuda = isinstance(value, (str, torch.device)) and str(value).startswith("cuda")
    return torch.device("cpu") if is_cuda else value


@pytest.fixture
def gpu(monkeypatch):
    """Calls in order, of torch.cuda and of what stands for NCCL."""
    calls = []

    def note(name, value=None):
        return lambda *_, **__: (calls.append(name), value)[1]

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            calls.append("event")
            self.at_s = time.perf_counter()

        def elapsed_time(self, end):
            assert calls[-1] != "event", "read before the device has passed it"
            return 1e3 * (end.at_s - self.at_s)

    def init(*arguments, **options):
        given = INIT.bind(*arguments, **options).arguments
        calls.append(given)
        options.pop("device_id", None)
        return real_init("gloo", *arguments[1:], **options)

    def profile(activities, **options):
        calls.append(tuple(one.name for one in activities))
        return real_profile(activities=activities[:1], **options)

    real_init, real_profile = dist.init_process_group, profiler.profile
    for name, value in ANSWERS.items():
        monkeypatch.setattr(torch.cuda, name, note(name, value))
    properties = type("Properties", (), {"total_memory": 80e9})
    for owner, name, value in [
        (torch.cuda, "Event", Event),
        (torch.cuda, "get_device_properties", lambda *_: properties),
        (torch.cuda.nccl, "version", lambda: (2, 29, 7)),
        (torch.cuda.memory, "_record_memory_history", note("history")),
        (torch.cuda.memory, "_dump_snapshot", note("snapshot")),
        (torch.Tensor, "pin_memory", lambda one: (calls.append("pin"), one)[1]),
        (network, "_named_generator", lambda seed, *_: torch.Generator().manual_seed(seed)),
        (dist, "init_process_group", init),
        (profiler, "profile", profile),
        (sys.modules[prepare.__module__], "gpu_count", lambda: 1),
    ]:  # fmt: skip
        monkeypatch.setattr(owner, name, value)
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "0")
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "1")
    precision, threads = torch.get_float32_matmul_precision(), torch.get_num_threads()
    yield calls
    torch.set_float32_matmul_precision(precision)
    torch.set_num_threads(threads)
    if dist.is_initialized():
        dist.destroy_process_group()


def test_a_run_takes_the_steps_of_a_gpu(gpu, tmp_path):
    spec = RunSpec("gpt-tiny", "dp1", 7, global_batch=4, dtype="bf16", device="cuda",
                   profile_memory=True, sizes={"layers": 1})  # fmt: skip
    directory = prepare(spec, tmp_path / "run")
    gpu.clear()
    with OnHost(gpu):
        train._train(directory, 0, 0)
    names = [name for name in gpu if isinstance(name, str) and name not in ANSWERS]
    # a device before anything lies on it, then the group, which is bound to it
    assert gpu.index("set_device") < gpu.index("empty_cache")
    group = next(given for given in gpu if isinstance(given, dict))
    assert group["backend"] == "nccl" and str(group["device_id"]) == "cuda:0"
    assert ("CPU", "CUDA") in gpu
    # the allocator is watched from before the first traced step to the snapshot
    assert names.index("history") < names.index("snapshot")
    assert names.count("history") == 2 and names.count("snapshot") == 1
    # tokens and targets of each step in pinned memory; each phase between two events
    assert names.count("pin") == 2 * 7 and names.count("event") == 2 * 4 * 7
    assert gpu.count("synchronize") >= 2 * 7
    run = read_run(directory)
    assert run.env["nccl"] == "2.29.7" and run.env["device_memory_bytes"] == 80e9
    assert run.env["peak_source"] == "data sheet of h100-80, dense bf16"
    assert set(run.steps["memory_peak_bytes"]) == {2}
    assert (run.steps[["forward_s", "backward_s"]] > 0).all(axis=None)
    assert run.steps["loss"].notna().all() and run.summary["mfu"] > 0
    assert json.loads((directory / "spec.json").read_text())


@pytest.mark.parametrize("world", [1, 8])
def test_nccl_gets_arguments_it_has(gpu, monkeypatch, world):
    """Of the installed torch; those of 2.11 to 2.15 have the same."""
    monkeypatch.setattr(
        dist,
        "init_process_group",
        lambda *a, **k: gpu.append(INIT.bind(*a, **k).arguments),
    )
    monkeypatch.setenv("WORLD_SIZE", str(world))
    train._join("cuda", 60.0, 0)
    groups = [given for given in gpu if isinstance(given, dict)]
    assert len(groups) == (world > 1)
    for given in groups:
        assert given["timeout"].total_seconds() == 60.0
        assert str(given["device_id"]) == "cuda:0"
    documented = {
        "backend",
        "init_method",
        "timeout",
        "world_size",
        "rank",
        "store",
        "group_name",
        "pg_options",
        "device_id",
    }
    assert documented <= set(INIT.parameters)


def test_links_are_timed_by_events_over_nccl(gpu, monkeypatch, tmp_path):
    monkeypatch.setattr(links, "guard", lambda: None)
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
        monkeypatch.setenv(name, value)
    with OnHost(gpu):
        links.main()
    group = next(given for given in gpu if isinstance(given, dict))
    assert group["backend"] == "nccl" and str(group["device_id"]) == "cuda:0"
    assert gpu.index("set_device") < gpu.index(group)


def test_kernels_are_timed_by_events_read_once(gpu):
    def work():
        gpu.append("work")

    times_s = bench._times_s(work, 3, True, None)
    assert gpu == ["event", "work", "event"] * 3 + ["synchronize"]
    assert (times_s >= 0).all()


def test_copies_go_both_ways_from_both_kinds_of_memory(gpu):
    with OnHost(gpu):
        works = list(bench._copy("copy", "cuda", "quick"))
        launches = list(bench._launch("launch", "cuda", "quick"))
        for work in [*works, *launches]:
            work.run()
    ways = {(work.kernel, work.how) for work in works}
    both = {
        (name, how)
        for name in ("to device", "to host")
        for how in ("pinned", "pageable")
    }
    assert ways == {("copy", "host"), ("copy", "device"), *both}
    assert [work.how for work in launches] == ["enqueued", "waited for"]


@pytest.mark.parametrize(
    ("dtype", "capability", "shares"),
    [
        (torch.bfloat16, (9, 0), True),
        (torch.float16, (7, 5), False),
        (torch.float32, (9, 0), False),
    ],
)
def test_heads_share_keys_where_flash_attention_reads_them(
    gpu, monkeypatch, dtype, capability, shares
):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    attention = object.__new__(Attention)
    attention.__dict__ |= {"kind": "flash", "causal": True}
    make = partial(torch.randn, dtype=dtype)
    query, key = make(1, 4, 8, 16), make(1, 2, 8, 16)
    watched = ("repeat_interleave", "scaled_dot_product_attention")
    with OnHost(gpu, watched, cuda=True):
        attention._core(query, key, key)
    names = [name for name, _ in filter(lambda one: isinstance(one, tuple), gpu)]
    assert names == [watched[0]] * (0 if shares else 2) + [watched[1]]
    assert gpu[-1][1]["enable_gqa"] == shares


def test_a_mesh_of_one_gpu_needs_no_other_rank(gpu):
    with OnHost(gpu):
        one = mesh.build(Plan(), "cuda")
    assert one.dense.device_type == "cuda" and one.size("fsdp") == 1


@pytest.mark.parametrize("strategy", ["dp2", "dp2.z1", "cp2"])
def test_a_layout_of_copies_takes_a_step(gpu, strategy):
    """FSDP2 and DTensors ask where memory really is: test_parallel.py has these."""
    spec = RunSpec("gpt-tiny", strategy, 2, global_batch=8, dtype="bf16", device="cuda",
                   sizes={"layers": 2})  # fmt: skip
    c10d.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    with OnHost(gpu):
        trainer = parallelize(
            "gpt-tiny", spec.plan, spec, device="cuda", sizes=spec.sizes
        )
        tokens = torch.zeros(8 // spec.plan.dp, spec.shapes.sequence, dtype=torch.long)
        result = trainer.step({"tokens": tokens, "targets": tokens})
    assert str(trainer.device) == "cuda:0" and not result["overflow"]
    assert gpu.count("event") == 2 * 4 and gpu[-1] == "synchronize"


def test_what_is_offloaded_lies_in_pinned_memory(gpu, monkeypatch):
    """A copy from a GPU to other memory would wait."""
    policies = []
    monkeypatch.setattr(
        data_parallel,
        "fully_shard",
        lambda _, **options: policies.append(options["offload_policy"]),
    )
    plan = Plan.parse("dp1.z3.offload-all")
    for device in ("cuda", "cpu"):
        with OnHost(gpu):
            one = data_parallel.DataParallel(
                plan, mesh.build(plan, device), torch.float32
            )
        one.wrap_unit(torch.nn.Linear(2, 2))
    assert [policy.pin_memory for policy in policies] == [True, False]
