"""The layer balancer of Metis: layers over stages of unequal speed.

As the public release of Metis [Um et al., USENIX ATC 2024] behaves (recorded): every
layer is cut into seven pieces, pieces are given to stages by remaining capacity, and a
layer belongs to the stage that has more than half of its pieces. A layer without such a
stage vanishes, and a stage may end without layers; both are reproduced here.
Subtractions run piece by piece as there: results depend on the last bit where stages
tie.
"""

from collections.abc import Sequence
from functools import reduce
from itertools import accumulate, takewhile
from operator import sub

from madmax_lib.papers.metis.job import layer_sums
from madmax_lib.planner.hetero.profiles import plain_sum

PIECES = 7
# Constants of the release, recorded: other values change its counts.
_OVERFULL_SHARE = 0.9  # of what its memory allows, an overfull stage is left with
_LEAST_REQUIRED = 0.01  # capacity that need not be spread any more
_LEAST_SPARE = 0.001  # capacity below which a stage takes nothing
_MOVES = 3


class Balancer:
    """Partitions of layers with these demands, which sum to 1.

    >>> Balancer([0.25] * 4).partition([0.5, 0.5])
    (0, 2, 4)
    """

    def __init__(self, demand: Sequence[float]):
        self.demand = list(demand)
        self.layers = len(self.demand)
        self._piece = [value / PIECES for value in self.demand for _ in range(PIECES)]
        self._slices = layer_sums(self.demand)

    def partition(self, capacity: Sequence[float]) -> tuple[int, ...]:
        """Layer boundaries (stages + 1,) from 0 on for the capacity of each stage in
        units of demand.

        The last boundary is below the number of layers where layers vanished.
        """
        layers = self._majority(self._owners(capacity), len(capacity))
        self._even_out(capacity, layers)
        return tuple(accumulate(map(len, layers), initial=0))

    def _owners(self, capacity):
        """Stage of each piece: first to last stage until each is full, then the last
        stage from the end on, then what is left in between.
        """
        piece = self._piece
        room = list(capacity)  # left on each stage
        owner = []  # stage of each piece, -1 for none
        first = []  # piece of each stage, -1 for none
        waiting = []  # pieces without owner, ascending
        last = len(room) - 1
        # Forward: stages but the last take pieces up to 7L - 1 - 7; a stage is full at
        # the first piece that does not fit, and that piece is left waiting.
        bound = len(piece) - PIECES - 1
        start = 0
        for stage in range(last):
            end = start
            if start < bound:
                end = self._take_until_full(room, stage, start, bound)
            first.append(start if end > start else -1)
            owner += [stage] * (end - start)
            if end < bound:
                waiting.append(end)
                owner.append(-1)
                end += 1
            start = end
        # Backward: the last stage takes the last layer's pieces in any case, then as
        # many before it, without a gap, as fit.
        owner += [last] * (len(piece) - start)
        lowest = len(piece) - PIECES
        room[last] = reduce(sub, reversed(piece[lowest:]), room[last])
        waiting += range(start, lowest)
        while waiting and waiting[-1] == lowest - 1 and room[last] > piece[lowest - 1]:
            lowest = waiting.pop()
            owner[lowest] = last
            room[last] -= piece[lowest]
        first.append(lowest)
        self._fill_gaps(room, owner, first, waiting)
        return owner

    def _take_until_full(self, room, stage, start, bound):
        """First piece from `start` on, at most `bound`, that does not fit into a stage,
        whose room is reduced by those before.
        """
        # room after each further piece; a piece fits as long as some room is left
        rests = accumulate(self._piece[start:bound], sub, initial=room[stage])
        fitting = list(takewhile(lambda rest: rest > 0, rests))
        if not fitting:
            return start
        room[stage] = fitting[-1]
        return start + len(fitting) - 1

    def _fill_gaps(self, room, owner, first, waiting):
        """Each piece without owner, ascending, to the stage with most room among those
        around it, the first of equals.

        Around: from the stage that ends last before the piece to the stage that begins
        first after it. Stages begin in order and all pieces before have owners, so both
        are found by moving on.
        """
        follows = [stage for stage, start in enumerate(first) if start >= 0]
        ahead = 0
        lower = 0
        joined = -1  # owner of the piece given last: its range reaches this one at once
        for number in waiting:
            if number and first[owner[number - 1]] < number:
                lower = owner[number - 1]
            while ahead < len(follows) and (
                first[follows[ahead]] < number or follows[ahead] == joined
            ):
                ahead += 1
            upper = follows[ahead] if ahead < len(follows) else len(room) - 1
            around = room[lower : upper + 1]
            stage = lower + around.index(max(around))
            owner[number] = stage
            room[stage] -= self._piece[number]
            joined = stage

    def _majority(self, owner, stages):
        """Layers of each stage: those of which it has more than half of the pieces."""
        layers = [[] for _ in range(stages)]
        for layer in range(self.layers):
            pieces = owner[PIECES * layer : PIECES * (layer + 1)]
            # a stage with at least 4 of 7 pieces owns the middle one, once sorted
            stage = sorted(pieces)[PIECES // 2]
            # spread 3/2/2 or the like the layer vanishes
            if 2 * pieces.count(stage) > PIECES:
                layers[stage].append(layer)
        return layers

    def _even_out(self, capacity, layers):
        """Up to three times a layer moves to the stage with most room from its fuller
        neighbour, in place.
        """
        if len(layers) == 1:
            return
        # room = capacity - demand of first to last layer of a stage
        room = list(capacity)
        for stage, inside in enumerate(layers):
            if inside:
                count = inside[-1] + 1 - inside[0]
                room[stage] -= self._slices[inside[0]][count]
        most = max(room)
        for _ in range(_MOVES):
            taker = room.index(most)
            giver = taker + 1
            at_end = giver == len(room)
            if at_end or (taker and room[taker - 1] <= room[giver]):  # left on ties
                giver = taker - 1
            if len(layers[giver]) <= 1:
                return
            side = -1 if giver < taker else 0
            layer = layers[giver][side]
            moved = list(room)
            moved[taker] -= self.demand[layer]
            moved[giver] += self.demand[layer]
            if (moved_most := max(moved)) > most:
                return
            room = moved
            most = moved_most
            layers[giver].pop(side)
            layers[taker].insert(0 if side else len(layers[taker]), layer)


def shift_capacity(
    capacity: Sequence[float], memory_mb: Sequence[float], demand_mb: Sequence[float]
) -> list[float] | None:
    """Capacity (stages,) with what stages without memory must give up spread over those
    with memory to spare.

    None where there is not enough to spare.
    """
    base = []
    spare = []
    required = 0.0
    for value, memory, demand in zip(capacity, memory_mb, demand_mb, strict=True):
        # capacity whose layers fill the memory, as demand grows with capacity
        allowed = value * memory / demand
        if memory > demand:
            base.append(value)
            spare.append(allowed - value)
        else:
            base.append(allowed * _OVERFULL_SHARE)
            spare.append(0.0)
            required += value - base[-1]
    if plain_sum(spare) < required:
        return None
    shifted = list(base)
    while required > _LEAST_REQUIRED:
        takers = [stage for stage, room in enumerate(spare) if room > _LEAST_SPARE]
        # Shares follow the capacity before anything was taken, the same in each pass,
        # while `required` shrinks inside a pass; sums are not made 1 again.
        total = plain_sum(base[stage] for stage in takers)
        before = required
        if not total:
            return None
        for stage in takers:
            amount = min(spare[stage], required * (base[stage] / total))
            spare[stage] -= amount
            shifted[stage] += amount
            required -= amount
        if required == before:
            return None
    return shifted
