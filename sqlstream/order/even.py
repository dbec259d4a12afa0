"""Even: turns in exact proportions, spread evenly, each computed alone: Bresenham's line down a Huffman tree.

    build   join the two lightest of the streams and joined pairs, until one is left; the heavier one is the left child
    left    of c turns of a node of weight w, round(c * l / w) are its left child's, which weighs l
    at      from the root down: if the left child has more of c + 1 turns than of c, turn c is its own, else the right one's

**Proof.** l <= w, so left(c + 1) - left(c) is 0 or 1 and left(0) = 0: at every node exactly one child counts up when the node
does, and the leaf that is reached is the stream of turn c. left(c) is within 1/2 of c * l / w. Down a path errors shrink by
child's weight / parent's weight and grow by at most 1/2, so a stream of weight s is off by at most 1/2 of the sum of s / a,
over itself and its ancestors a below the root. In a Huffman tree a node and its sibling are lighter than all that is joined
later, so a grandparent weighs at least twice what the node does, and the sum is below 4: **|count - k * w / W| < 2**, for any
number of streams and any weights. c = m * w gives left = m * l, so counts are exact at multiples of W.

Rejected: one line for each stream (streams of one weight fall together), a cascade of lines in the order of the streams (grain:
fifty streams of 1 before one of 950 lag by 47), greedy tables (Megatron: a table of the whole run), float arithmetic anywhere.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sqlstream.errors import ConfigError
from sqlstream.order.permute import Int64Array

MAX_TOTAL = 1 << 47
"""Sum of whole weights (exclusive): limbs of 16 bits, and numbers below it, fit into 64 bits."""
_NARROW = 1 << 31  # products of two weights below it fit into int64


@dataclass(frozen=True, slots=True, eq=False)
class Turns:
    """Whose turns some numbers of a schedule are."""

    stream: Int64Array
    """Streams: [n]."""
    draw: Int64Array
    """Earlier turns of that stream, which say what it is asked for: [n]."""


@dataclass(frozen=True, slots=True)
class _Tree:
    """The inner nodes of a Huffman tree, children before parents; the last one is the root: [nodes] each.

    A child >= 0 is a stream, ~n is inner node n.
    """

    weight: Int64Array
    left_weight: Int64Array
    left: Int64Array
    right: Int64Array


@dataclass(frozen=True, slots=True)
class Even:
    """Turns in the proportion of whole weights: |count - number * weight / total| < 2, exact at multiples of the total.

    Example:
        >>> Even((7, 2, 1)).at(np.arange(10)).stream.tolist()
        [0, 1, 0, 0, 0, 2, 0, 0, 1, 0]
    """

    weights: tuple[int, ...]
    """Whole weights; a stream of weight 0 has no turn."""
    _tree: _Tree = field(init=False, repr=False, compare=False)
    _root: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Check the weights and build the tree: O(S log S)."""
        if not self.weights or min(self.weights) < 0 or not 0 < self.total < MAX_TOTAL:
            raise ConfigError(
                f"whole weights {self.weights} add up to {self.total}: give none below 0, "
                f"at least one above 0, and fewer than 2**47 in all"
            )
        heap = [(weight, stream, stream) for stream, weight in enumerate(self.weights) if weight]
        heapq.heapify(heap)  # weight, earliest stream (decides ties), node
        nodes: list[list[int]] = []
        while len(heap) > 1:
            light, heavy = heapq.heappop(heap), heapq.heappop(heap)
            if light[0] == heavy[0]:  # ties: the earlier stream is the left child
                light, heavy = heavy, light
            nodes.append([light[0] + heavy[0], heavy[0], heavy[2], light[2]])
            heapq.heappush(heap, (light[0] + heavy[0], min(light[1], heavy[1]), ~(len(nodes) - 1)))
        columns = np.ascontiguousarray(np.array(nodes, np.int64).reshape(-1, 4).T)  # [4, nodes]
        object.__setattr__(self, "_tree", _Tree(*columns))
        object.__setattr__(self, "_root", heap[0][2])

    def __reduce__(self) -> tuple[object, ...]:
        """Rebuild from the weights."""
        return (Even, (self.weights,))

    @property
    def total(self) -> int:
        """Sum of the weights, W: turns after which all counts are exact."""
        return sum(self.weights)

    def at(self, numbers: Int64Array) -> Turns:
        """Return whose turn each of `numbers` is: O(depth of the tree) a number.

        Args:
            numbers: Numbers of turns, 0 or more, below 2**48, in any order: [n].
        """
        count = np.array(numbers, np.int64)  # [n]
        node = np.full(len(count), self._root, np.int64)  # [n]
        split = _split_wide if int(self._tree.weight[-1:].sum()) >= _NARROW else _split
        inner = np.flatnonzero(node < 0)  # [m]
        while inner.size:
            at = ~node[inner]  # [m]
            turns = count[inner]  # [m]
            left, is_left = split(turns, self._tree.weight[at], self._tree.left_weight[at])
            count[inner] = np.where(is_left, left, turns - left)
            child = np.where(is_left, self._tree.left[at], self._tree.right[at])  # [m]
            node[inner] = child
            inner = inner[child < 0]  # [m]
        return Turns(node, count)

    def counts(self, number: int) -> tuple[int, ...]:
        """Return how many of the first `number` turns are each stream's: O(S), in integers of any size."""
        found = [0] * len(self.weights)
        tree = self._tree
        turns = [0] * len(tree.weight)

        def give(node: int, count: int) -> None:
            if node >= 0:
                found[node] = count
            else:
                turns[~node] = count

        give(self._root, number)
        columns = (tree.weight.tolist(), tree.left_weight.tolist(), tree.left.tolist(), tree.right.tolist())
        nodes = list(zip(*columns, strict=True))
        for node in range(len(nodes) - 1, -1, -1):  # parents before children
            weight, left_weight, left, right = nodes[node]
            lefts = (turns[node] * left_weight + weight // 2) // weight
            give(left, lefts)
            give(right, turns[node] - lefts)
        return tuple(found)


class _Split(NamedTuple):
    """What nodes give to their left children."""

    left: Int64Array
    """Turns of the left child: [m]."""
    is_left: NDArray[np.bool_]
    """The next turn is the left child's: [m]."""


def _split(turns: Int64Array, weight: Int64Array, left_weight: Int64Array) -> _Split:
    """Return round(turns * left / weight), halves up; the weights are below 2**31."""
    whole, rest = np.divmod(turns, weight)  # [m]
    left, remainder = np.divmod(rest * left_weight + (weight >> 1), weight)  # [m]
    return _Split(whole * left_weight + left, remainder + left_weight >= weight)


def _split_wide(turns: Int64Array, weight: Int64Array, left_weight: Int64Array) -> _Split:
    """Return the same for weights below 2**47, by Horner's rule in limbs of 16 bits."""
    wide, part = weight.astype(np.uint64), left_weight.astype(np.uint64)  # [m]
    whole, rest = np.divmod(turns.astype(np.uint64), wide)  # [m]
    left, remainder = np.zeros_like(rest), np.zeros_like(rest)  # [m]
    for shift in (32, 16, 0):
        limb = (rest >> np.uint64(shift)) & np.uint64(0xFFFF)  # [m]
        more, remainder = np.divmod((remainder << np.uint64(16)) + limb * part, wide)  # [m]
        left = (left << np.uint64(16)) + more  # [m]
    remainder = remainder + (wide >> np.uint64(1))  # [m]
    left += remainder >= wide  # the half rounds up
    remainder = np.where(remainder >= wide, remainder - wide, remainder)  # [m]
    return _Split((whole * part + left).astype(np.int64), remainder + part >= wide)
