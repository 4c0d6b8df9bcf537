"""Beliefs that trials leave about plans that nobody has tried: seconds, the chance to
run at all, and the chance to win.

Seconds are those of the simulator times what it gets wrong, a Gaussian process on the
logarithm [Rasmussen & Williams 2006, ch. 2] with the kernel

    k(x, x') = ALL^2 + PARTS^2 share(x)' share(x') + NEAR^2 exp(-|x - x'|^2 / (2
    LENGTH^2))

of an error that all plans share, errors of the parts of a step (the share of each part
in the step) and errors of neighbours (x: logarithms of degrees and batches to base 2,
and choices). A slow trial may be an unlucky one: its noise grows with its error over
the least one, so that the fastest trials, measured by the simulator, say most.

A plan runs with the probability (1 - crash) Phi(margin / UNSURE). The margin is the
logarithm of the room over the memory that the simulator finds, plus an error that all
plans share: Bayes' rule weighs its values by the trials that ran. crash is the rate of
failures that memory does not explain, as a mean over neighbours.
"""

from dataclasses import dataclass

import numpy as np
from scipy.special import ndtr

# Standard deviations of the simulator's error in log seconds, and the length over which
# neighbours share it, in doublings of a degree.
_ALL = 1.0
_PARTS = 0.2
_NEAR = 0.3
_LENGTH = 4.0
# of a trial, of a slow trial per log excess, and of a plan beside its neighbours
_NOISE = 0.1
_EXCESS = 1.0
_OWN = 0.08
# the same of log memory: of an error of all plans, and of a plan beside it
_MEMORY = 0.17
_UNSURE = 0.06
# failures that memory does not explain: their rate before any trial, the trials that it
# counts for, and the length over which neighbours share it
_CRASH = 0.08
_WEIGHT = 1.0
_CRASH_LENGTH = 1.5
_CLOSE = np.log(1.05)  # as good as the best: repeated runs differ by more
_DRAWS = 1024  # of the plans that may win: a chance is known to 1.6 %
_MOST = 256  # plans that may win: their covariance is factorised
_ERRORS = 201  # of log memory, up to so many standard deviations
_FAR = 4.0
_SMALL = 1e-6  # keeps logarithms and roots finite
_SIGMAS = 1.645  # from the middle of a normal distribution to the ends of its 90 %


@dataclass(frozen=True)
class Candidates:
    """Plans and what the simulator says of them, n of each."""

    # (n,) logarithm of the seconds of a step, NaN for a plan that breaks a rule
    log_s: np.ndarray
    log_room: np.ndarray  # (n,) logarithm of the usable memory over what the plan needs
    features: np.ndarray  # (n, d) what neighbours are alike in
    shares: np.ndarray  # (n, p) of the parts of a step
    # (n,) half of the simulator's 90 % interval of log_s, NaN where it knows none
    width: np.ndarray


@dataclass(frozen=True)
class Beliefs:
    """Beliefs about each plan after some trials, (n,) each."""

    log_s: np.ndarray  # mean of the logarithm of its seconds
    # half of the 90 % interval of a trial around it, the simulator's own before one ran
    width: np.ndarray
    runs: np.ndarray  # probability to run
    # probability to be within 5 % of the best plan, and faster than all trials so far
    wins: np.ndarray
    # seconds by which it is expected to be faster than the best trial, NaN before one
    # ran
    improvement_s: np.ndarray


def beliefs(
    plans: Candidates,
    tried: np.ndarray,
    log_s: np.ndarray,
    asked: np.ndarray,
    seed: int,
    of_memory: np.ndarray | None = None,
) -> Beliefs:
    """Beliefs after trials of the plans in the places tried (k,), NaN where they failed.

    of_memory: (k,) 1 where a failure ran out of memory, 0 where it did not, NaN where
    nobody knows (None: of all). asked: places that are being tried. Where plans are
    being tried, wins is the chance to win where none of them does.
    """
    legal = np.isfinite(plans.log_s)
    tried = np.asarray(tried, int)
    ran = np.isfinite(log_s)
    if of_memory is None:
        of_memory = np.full(len(tried), np.nan)
    runs = np.where(legal, _runs(plans, tried, ran, of_memory), 0.0)
    best = np.min(log_s, where=ran, initial=np.inf)
    mean, cross = _posterior(plans, tried[ran], log_s[ran])
    # k(x, x) minus what the trials take off, and what is the plan's own
    kernel_diagonal = _ALL**2 + _PARTS**2 * (plans.shares**2).sum(axis=1) + _NEAR**2
    sigma = np.sqrt(kernel_diagonal - (cross**2).sum(0) + _OWN**2)
    if np.isfinite(best):
        # expected improvement of a log-normal time t with log t ~ N(mean, sigma^2) [by
        # the formula of Jones et al. 1998 for exp(t)], z = (log best - mean) / sigma:
        #   E max(best - t, 0) = best Phi(z) - exp(mean + sigma^2 / 2) Phi(z - sigma)
        score = (best - mean) / sigma
        mean_s = np.exp(mean + sigma**2 / 2)
        gain = np.exp(best) * ndtr(score) - mean_s * ndtr(score - sigma)
        improvement_s = np.where(legal, runs * np.maximum(gain, 0.0), 0.0)
    else:
        improvement_s = np.full(len(mean), np.nan)
    # of the plans left to try those that are likely to run and fast
    untried = np.flatnonzero(legal & ~np.isin(np.arange(len(mean)), tried))
    hope = np.log(np.maximum(runs[untried], _SMALL)) - mean[untried] / _NEAR
    live = np.sort(untried[np.argsort(-hope, kind="stable")[:_MOST]])
    wins = np.zeros(len(mean))
    if len(live):
        covariance = _kernel(plans, live, live) - cross[:, live].T @ cross[:, live]
        wins[live] = _wins(
            mean[live], covariance, runs[live], best, np.isin(live, asked), seed
        )
    width = _SIGMAS * sigma if ran.any() else plans.width
    return Beliefs(mean, width, runs, wins, improvement_s)


def _wins(mean, covariance, runs, best, asked, seed):
    """Share of random draws in which a plan runs, beats the best trial and is as good
    as the best of the draw.
    """
    random = np.random.default_rng(seed)
    # correlated draws are the root of their covariance times independent ones
    root = np.linalg.cholesky(covariance + (_OWN**2 + _SMALL) * np.eye(len(mean)))
    # (plans, 1) beside (plans, draws)
    draws = mean[:, None] + root @ random.standard_normal((len(mean), _DRAWS))
    draws[random.random(draws.shape) >= runs[:, None]] = np.inf
    # where a plan that is being tried wins, no other one is needed
    good = (draws < best) & (draws <= np.minimum(draws.min(axis=0), best) + _CLOSE)
    return (good & ~good[asked].any(axis=0)).mean(axis=1)


def _posterior(plans, tried, log_s):
    """Mean (n,) of log seconds, and (k, n) whose columns' products are what the trials
    take off the covariance.
    """
    # With the kernel K, noise N, L L' = K(tried, tried) + N and C = L^-1 K(tried, all):
    #   mean = simulator + C' L^-1 excess,  covariance = K - C' C
    # [Rasmussen & Williams 2006, algorithm 2.1]
    excess = log_s - plans.log_s[tried]
    every = np.arange(len(plans.log_s))
    unlucky = _EXCESS * (excess - excess.min(initial=np.inf))
    noise = _NOISE**2 + _OWN**2 + unlucky**2
    root = np.linalg.cholesky(_kernel(plans, tried, tried) + np.diag(noise))
    cross = np.linalg.solve(root, _kernel(plans, tried, every))
    return plans.log_s + cross.T @ np.linalg.solve(root, excess), cross


def _kernel(plans, a, b):
    parts = plans.shares[a] @ plans.shares[b].T
    near = _similarity(plans.features[a], plans.features[b], _LENGTH)
    return _ALL**2 + _PARTS**2 * parts + _NEAR**2 * near


def _similarity(a, b, length):
    """exp(-d^2 / (2 length^2)) of all pairs of rows."""
    # |x - y|^2 = |x|^2 + |y|^2 - 2 x y, by (rows of a, 1) and (rows of b,); rounding may
    # make it a bit negative
    square = (a**2).sum(axis=1)[:, None] + (b**2).sum(axis=1) - 2 * a @ b.T
    return np.exp(-np.maximum(square, 0.0) / (2 * length**2))


def _runs(plans, tried, ran, of_memory):
    """Probability of each plan to run, after trials that did or did not."""
    # one error of log memory for all plans, weighed by how well it explains the trials:
    # (errors, 1) beside plans
    error = np.linspace(-_FAR, _FAR, _ERRORS)[:, None] * _MEMORY
    enough = ndtr((plans.log_room + error) / _UNSURE)
    passes = (1 - _CRASH) * enough[:, tried]
    # a failure of another kind says nothing about memory
    of_others = np.where(of_memory == 0, 1.0, 1 - passes)
    fails = np.where(of_memory == 1, 1 - enough[:, tried], of_others)
    likelihood = np.maximum(np.where(ran, passes, fails), 1e-300)
    log_weight = np.log(likelihood).sum(axis=1) - (error[:, 0] / _MEMORY) ** 2 / 2
    weight = np.exp(log_weight - log_weight.max())
    weight /= weight.sum()
    # chance that something else than memory made a trial fail, as a mean over
    # neighbours, the rate before any trial as one more of them
    unexplained = _CRASH / (1 - weight @ passes)
    unexplained = np.where(np.isnan(of_memory), unexplained, 1 - of_memory)
    crashed = np.where(ran, 0.0, unexplained)
    weights = _similarity(plans.features, plans.features[tried], _CRASH_LENGTH)
    crash = _WEIGHT * _CRASH + weights @ crashed
    crash /= _WEIGHT + weights.sum(axis=1)
    return (1 - crash) * (weight @ enough)
