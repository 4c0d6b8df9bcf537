"""How does Metis spread layers over stages of unequal speed?

The layer balancer of Metis [Um et al., USENIX ATC 2024] as its public release behaves
(recorded): every layer is cut into seven pieces, pieces are given to stages by
remaining capacity, and a layer belongs to the stage that has more than half of its
pieces. A layer without such a stage vanishes, and a stage may end without layers; both
are kept here. Subtractions run piece by piece as there: results depend on the last bit
where stages tie.
"""

from bisect import bisect_left
from collections.abc import Sequence
from functools import reduce
from itertools import accumulate
from operator import sub

from madmax_lib.papers.metis.job import layer_sums
from madmax_lib.planner.hetero.profiles import plain_sum

__all__ = ["Balancer", "shift_capacity"]

PIECES = 7
_KEEPS = 0.9  # share that an overfull stage keeps beyond what its memory allows
_DONE = 0.01
_SPARE = 0.001


class Balancer:
    """Partitions of layers with these demands, which sum to 1."""

    def __init__(self, demand: Sequence[float]):
        self.demand = list(demand)
        self.layers = len(self.demand)
        self._piece = [value / PIECES for value in self.demand for _ in range(PIECES)]
        self._before = list(accumulate(self._piece, initial=0.0))
        self._slices = layer_sums(self.demand)

    def partition(self, capacity: Sequence[float]) -> tuple[int, ...]:
        """Layer boundaries (stages + 1,) from 0 on for the capacity of each stage in
        units of demand.

        The last boundary is below the number of layers where layers vanished.
        """
        left = list(capacity)
        owner, starts, waiting = self._in_order(left)
        self._fill_gaps(left, owner, starts, waiting)
        held = self._majority(owner, len(left))
        self._even_out(capacity, held)
        return tuple(accumulate(map(len, held), initial=0))

    def _in_order(self, left: list[float]) -> tuple[list[int], list[int], list[int]]:
        """First to last stage until each is full, then the last stage from the end on.

        Returns the owner of each piece, the first piece of each stage (none: -1) and
        the pieces without owner.
        """
        piece = self._piece
        bound = len(piece) - PIECES - 1
        count = len(piece)
        last = len(left) - 1
        owner = []
        starts = []
        waiting = []
        at = 0
        for stage in range(last):
            if at >= bound:
                starts.append(-1)
                continue
            end, left[stage] = self._fits(left[stage], at, bound)
            starts.append(at if end > at else -1)
            owner += [stage] * (end - at)
            at = end
            if end < bound:
                waiting.append(end)
                owner.append(-1)
                at += 1
        owner += [last] * (count - at)
        room = reduce(sub, reversed(piece[count - PIECES :]), left[last])
        lowest = count - PIECES
        waiting += range(at, lowest)
        while waiting and waiting[-1] == lowest - 1 and room > piece[lowest - 1]:
            lowest = waiting.pop()
            owner[lowest] = last
            room -= piece[lowest]
        left[last] = room
        starts.append(lowest)
        return owner, starts, waiting

    def _fits(self, room: float, at: int, bound: int) -> tuple[int, float]:
        """First piece from `at` on that does not fit any more (at most bound), and the
        room that is left.

        Bisection on rounded sums guesses it, subtraction piece by piece settles it.
        """
        piece = self._piece
        end = min(
            max(bisect_left(self._before, room + self._before[at], at) - 1, at), bound
        )
        rest = reduce(sub, piece[at:end], room)
        if rest <= 0:  # rounding put the guess too far
            end = at
            rest = room
        while end < bound and rest > piece[end]:
            rest -= piece[end]
            end += 1
        return end, rest

    def _fill_gaps(
        self, left: list[float], owner: list[int], starts: list[int], waiting: list[int]
    ) -> None:
        """Each piece without owner, ascending, to the stage with most room among those
        around it.

        Around: from the stage that ends last before the piece to the stage that begins
        first after it. Stages begin in order and all pieces before have owners, so both
        are found by moving on.
        """
        piece = self._piece
        last = len(left) - 1
        follows = [stage for stage, start in enumerate(starts) if start >= 0]
        # joined: owner of the piece given last
        ahead = 0
        lower = 0
        joined = -1
        for place in waiting:
            if place and starts[owner[place - 1]] < place:
                lower = owner[place - 1]
            while ahead < len(follows) and (
                starts[follows[ahead]] < place or follows[ahead] == joined
            ):
                ahead += 1
            upper = follows[ahead] if ahead < len(follows) else last
            if upper == lower + 1:
                stage = lower if left[lower] >= left[upper] else upper
            else:
                room = left[lower : upper + 1]
                stage = lower + room.index(max(room))
            owner[place] = stage
            left[stage] -= piece[place]
            joined = stage

    def _majority(self, owner: list[int], stages: int) -> list[list[int]]:
        """Layers of each stage: those of which it has more than half of the pieces."""
        held: list[list[int]] = [[] for _ in range(stages)]
        for layer in range(self.layers):
            pieces = owner[PIECES * layer : PIECES * (layer + 1)]
            stage = pieces[PIECES // 2]
            if 2 * pieces.count(stage) < PIECES:
                stage = sorted(pieces)[PIECES // 2]
                if 2 * pieces.count(stage) < PIECES:
                    continue
            held[stage].append(layer)
        return held

    def _even_out(self, capacity: Sequence[float], held: list[list[int]]) -> None:
        """Up to three times a layer moves to the stage with most room from its fuller
        neighbour, in place.
        """
        if len(held) == 1:
            return
        room = [
            value - self._slices[layers[0]][layers[-1] + 1 - layers[0]]
            if layers
            else value
            for value, layers in zip(capacity, held, strict=True)
        ]
        most = max(room)
        for _ in range(3):
            taker = room.index(most)
            before = taker - 1
            after = taker + 1
            giver = (
                before
                if after == len(room) or (taker and room[before] <= room[after])
                else after
            )
            if len(held[giver]) <= 1:
                return
            side = -1 if giver < taker else 0
            layer = held[giver][side]
            moved = list(room)
            moved[taker] -= self.demand[layer]
            moved[giver] += self.demand[layer]
            if (moved_most := max(moved)) > most:
                return
            room = moved
            most = moved_most
            held[taker].insert(0 if side else len(held[taker]), held[giver].pop(side))


def shift_capacity(
    capacity: Sequence[float], memory_mb: Sequence[float], demand_mb: Sequence[float]
) -> list[float] | None:
    """Capacity (stages,) with what stages without memory must give up spread over those
    with memory to spare.

    None where there is not enough to spare.
    """
    shifted = []
    spare = []
    required = 0.0
    for value, memory, demand in zip(capacity, memory_mb, demand_mb, strict=True):
        allowed = value * memory / demand
        if memory > demand:
            shifted.append(value)
            spare.append(allowed - value)
        else:
            shifted.append(allowed * _KEEPS)
            spare.append(0.0)
            required += value - shifted[-1]
    if plain_sum(spare) < required:
        return None
    kept = list(shifted)
    while required > _DONE:
        takers = [stage for stage, room in enumerate(spare) if room > _SPARE]
        total = plain_sum(kept[stage] for stage in takers)
        before = required
        if not total:
            return None
        for stage in takers:
            taken = min(spare[stage], required * (kept[stage] / total))
            spare[stage] -= taken
            shifted[stage] += taken
            required -= taken
        if required == before:
            return None
    return shifted
