"""Profile of a training script that knows nothing of it: a step lasts from one call of
its first optimizer to the next.

Plain loops and trainers alike (Hugging Face, Lightning, Accelerate, torchtitan) end a
step in `torch.optim.Optimizer.step`. Micro-batches before it belong to the step, and
where several optimizers take turns (GAN) the first one counts. torch is not imported
before the script does, which may still set threads and devices; and nothing here raises
into the script: what goes wrong is one line on standard error.
"""

import os
import runpy
import sys
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from importlib.abc import MetaPathFinder
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

from madmax_lib.base import require_int


def run_script(name: str, arguments: Sequence[str], *, is_module: bool = False) -> None:
    """Run a script, or a module of this name, as `python` and `python -m` do."""
    sys.argv = [name, *arguments]
    if is_module:
        sys.path[0] = str(Path.cwd())
        runpy.run_module(name, run_name="__main__", alter_sys=True)
        return
    path = Path(name).absolute()
    sys.path[0] = str(path.resolve().parent)
    # as runpy does, but that it would leave __file__ as it was typed
    main = ModuleType("__main__")
    main.__file__ = str(path)
    sys.modules["__main__"] = main
    exec(compile(path.read_bytes(), main.__file__, "exec"), vars(main))


def safely(act: Callable[[], object], failure: str = "no summary of the trace") -> bool:
    """Whether a call went well; what it raises is printed: no recording is worth a
    training run.
    """
    try:
        act()
    except Exception as error:
        text = " ".join(str(error).split()) or type(error).__name__
        say(f"{failure}: {text}")
        return False
    return True


def say(text: str) -> None:
    """Print a line on standard error, beside those of the script."""
    print(f"madmax: {text}", file=sys.stderr, flush=True)


def rank_and_ranks() -> tuple[int, int]:
    """Rank of this process and how many there are, by torch.distributed or torchrun."""
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


@dataclass
class Recorder:
    """Counter of optimizer steps that profiles some of them.

        recorder = Recorder(Path("recorded"), print)
        recorder.watch()

    directory: for trace_rank{r}.json.gz. ready: called on rank 0, when it has written
    its trace, with the folder and the number of ranks. warmup: steps before the
    recording. steps: recorded. every: steps from one recording to the next, each in a
    folder iteration_{step}; 0 for one alone.
    """

    directory: Path
    ready: Callable[[Path, int], object]
    warmup: int = 5
    steps: int = 5
    every: int = 0

    def __post_init__(self):
        require_int("warmup", self.warmup)
        if self.every and self.every < self.steps + 2:
            raise ValueError(
                f"every={self.every}: a recording and its warm-up take {self.steps + 1} "
                "steps, and one has to follow"
            )
        self.steps_done = 0
        self.recordings = 0
        self._is_over = False
        self._is_inside = False
        self._optimizer = None  # weakly: a script may drop it and make another
        self._profiler = None
        self._folder = self.directory
        # the profiler warms up on the last step of the warm-up
        self._begin_at = max(self.warmup - 1, 1)

    def watch(self) -> None:
        """Begin to count when torch is imported."""
        # else the profiler of torch logs each start and stop
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")
        _WhenImported("torch.optim.optimizer", self._wrap)
        _WhenImported("torch.profiler.profiler", self._give_way)

    def end(self) -> None:
        """Drop a recording that the end of the script has cut, and say so."""
        if self._is_over:
            return
        self._drop()
        if self.recordings == rank_and_ranks()[0] == 0:
            first = self._begin_at + 2  # after the step that the profiler warms up on
            text = f"steps {first} to {first + self.steps - 1} were to be recorded"
            say(
                f"{text}, but the script ended after {self.steps_done} optimizer steps "
                "of this process: nothing recorded"
            )

    def _wrap(self, module):
        """Have the steps of all optimizers counted. A hook behind a step would be
        inside its range of the profiler, which then reached into the next step.
        """
        wrap = module.Optimizer.profile_hook_step

        def profile_hook_step(function):
            step = wrap(function)

            @wraps(step)
            def counted_step(optimizer, *args, **kwargs):
                # of optimizers that hold others, or extend them, the outer step counts
                is_inner = self._is_inside
                self._is_inside = True
                try:
                    result = step(optimizer, *args, **kwargs)
                finally:
                    self._is_inside = is_inner
                if not (is_inner or self._is_over):
                    self._count(optimizer)
                return result

            return counted_step

        module.Optimizer.profile_hook_step = staticmethod(profile_hook_step)

    def _count(self, optimizer):
        if self._optimizer is None or self._optimizer() is None:
            self._optimizer = weakref.ref(optimizer)
        if self._optimizer() is optimizer:
            self.steps_done += 1
            if not safely(self._advance, "not recorded"):
                self._drop()

    def _give_way(self, module):
        """Leave profiling to a script that does it itself."""
        prepare = module.profile.prepare_trace

        def prepare_trace(profiler):
            if profiler is not self._profiler and not self._is_over:
                self._drop()
                say("the script profiles itself and is left alone: nothing recorded")
            prepare(profiler)

        module.profile.prepare_trace = prepare_trace

    def _advance(self):
        if self._profiler is None:
            if self.steps_done == self._begin_at:
                self._begin()
            return
        self._profiler.step()  # the last one writes the trace
        if self._profiler.step_num <= self.steps:
            return
        self._profiler.stop()
        self._profiler = None
        self.recordings += 1
        self._begin_at += self.every
        self._is_over = not self.every
        rank, ranks = rank_and_ranks()
        if rank == 0:
            self.ready(self._folder, ranks)

    def _begin(self):
        from madmax_lib.runs.measure.profiler import profiler  # imports torch

        rank, _ = rank_and_ranks()
        if self.every:
            self._folder = self.directory / f"iteration_{self.steps_done + 2}"
        self._folder.mkdir(parents=True, exist_ok=True)
        # of an earlier recording of more ranks; the others write some steps later
        for old in self._folder.glob("trace_rank*") if rank == 0 else ():
            old.unlink()
        path = self._folder / f"trace_rank{rank}.json.gz"
        # a script that computes on the CPU is not to start CUDA
        device = "cuda" if sys.modules["torch"].cuda.is_initialized() else "cpu"
        self._profiler = profiler(path, device, wait=0, active=self.steps)
        self._profiler.start()

    def _drop(self):
        """Record no more; what is not written is lost."""
        profiler = self._profiler
        self._profiler = None
        self._is_over = True
        if profiler is not None:
            profiler.on_trace_ready = None
            safely(profiler.stop, "profiler")


class _WhenImported(MetaPathFinder):
    """Finder that calls `act` with a module as soon as it is imported."""

    def __init__(self, name, act):
        self.name = name
        self.act = act
        if name in sys.modules:
            act(sys.modules[name])
        else:
            sys.meta_path.insert(0, self)

    def find_spec(self, name, path=None, target=None):
        """Spec of the module, as the other finders give it, whose loader calls."""
        if name != self.name:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            self.act(module)

        spec.loader.exec_module = exec_module
        return spec
