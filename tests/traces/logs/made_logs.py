"""Logs that tests write: a synchronous job in torchtitan's format, and Inspector's."""

import json

import numpy as np

FWD_S, FETCH_S, OPTIM_S = 0.400, 0.004, 0.021


def titan_line(rank, step, name, time_us, value=None, **more):
    """A line as torchtitan 0.3.0 writes it."""
    line = {"delta_ms": 0.06, "tid": 7, "rank": rank, "global_rank": rank}
    line |= {
        "source": "training",
        "host_name": f"node{rank // 4:02}",
        "pid": 100 + rank,
    }
    line |= {"step": step, "relative_step": step} if step else {}
    line |= {"time": time_us // 10**6, "time_us": time_us, "log_type": "event"}
    line |= {"log_type_name": name, "event_name": None}
    line |= {} if value is None else {"value": value}
    return json.dumps(line | {"seq_id": 0} | more)


def write_job(folder, ranks=8, steps=300, seed=0, device_s=0.0, extra=None, first=1):
    """A job whose step is the slowest rank's work, or its device's if that is longer.

    extra: (phase, rank, step) -> seconds more. Clocks of hosts differ; the others wait
    for the late rank at the start of the next step, where no span is.
    """
    rng = np.random.default_rng(seed)
    stamp = f"20261120-01{first // 100:02}12"
    base = {"fetching_batch": FETCH_S, "fwd_bwd": FWD_S, "optim": OPTIM_S}
    apart = {name: rng.normal(1, 0.004, ranks) for name in base}
    # when all may go on: the slowest host, or the device
    free_s = np.full(ranks, first * 0.6)
    lines = [[] for _ in range(ranks)]
    for step in range(first, first + steps):
        tag = ["checkpoint_save"] if step % 100 == 0 else []
        work = {
            name: base[name] * apart[name] * rng.normal(1, 0.0075, ranks)
            + [extra(name, rank, step) if extra else 0.0 for rank in range(ranks)]
            for name in base
        }
        work["checkpoint_save"] = np.full(ranks, 2.0 if tag else 1e-5)
        begin_s = free_s.copy()
        for rank in range(ranks):
            now_us = 10**15 + int(free_s[rank] * 1e6) + 5000 * (rank // 4)
            write = lines[rank].append
            write(titan_line(rank, step, "step_start", now_us))
            for name, seconds in work.items():
                write(titan_line(rank, step, f"{name}_start", now_us))
                if name == "fetching_batch":  # the gap in which the host waits
                    gap_s = max(device_s - sum(v[rank] for v in work.values()), 0.0)
                    now_us += int(1e6 * gap_s) * (device_s > 0)
                now_us += int(1e6 * seconds[rank])
                ms = 1e3 * float(seconds[rank])
                write(titan_line(rank, step, f"{name}_end", now_us, ms))
            more = {"step_tags": tag} if tag else {}
            ms = 1e3 * sum(float(v[rank]) for v in work.values())
            write(titan_line(rank, step, "step_end", now_us, ms, **more))
        total_s = sum(work.values())
        free_s = (
            begin_s + np.maximum(total_s.max(), device_s) + rng.normal(0, 1e-4, ranks)
        )
    folder.mkdir(parents=True, exist_ok=True)
    for rank, text in enumerate(lines):
        name = f"training.global_rank_{rank}.{stamp}-ABCDE{rank % 10}.jsonl"
        (folder / name).write_text("\n".join(text) + "\n")
    return folder


def inspector_line(
    rank, size, call, us, comm="0xab", ranks=4, kind="AllReduce", **more
):
    """A record as NCCL Inspector v4.0 writes it."""
    header = {
        "id": comm,
        "comm_name": "DP",
        "rank": rank,
        "n_ranks": ranks,
        "nnodes": 1,
    }
    metadata = {"inspector_output_format_version": "v4.0", "hostname": "node00"}
    metadata |= {"pid": 50 + rank, "dump_timestamp_us": 10**15}
    perf = {"coll": kind, "coll_sn": call, "coll_msg_size_bytes": size}
    perf |= {"coll_exec_time_us": us, "coll_timing_source": "kernel_gpu"}
    return {"header": header, "metadata": metadata | more, "coll_perf": perf}
