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
_LEVELS = 2  # of the tree between two looks whether all have come to a leaf


@dataclass(frozen=True, slots=True, eq=False)
class Turns:
    """Whose turns some numbers of a schedule are."""

    stream: Int64Array
    """Streams: [n]."""
    draw: Int64Array
    """Earlier turns of that stream, which say what it is asked for: [n]."""


@dataclass(frozen=True, slots=True)
class _Tree:
    """A Huffman tree: its inner nodes, children before parents, so the last one is the root; then a leaf for each stream.

    The n-th node has number 2n, so that its children have places of their own. A leaf is its own left child and gives it all
    turns: a walk of any length ends there. What follows from a weight is here, too: a walk takes it once a level.
    """

    num_inner: int
    """Twice the inner nodes; the leaf of stream s is node num_inner + 2s."""
    root: int
    """Node at which walks begin."""
    weight: Int64Array
    """Weight of each node, 1 of leaves: [nodes * 2]."""
    half: Int64Array
    """Half of it, rounded down: [nodes * 2]."""
    left_weight: Int64Array
    """Weight of its left child: [nodes * 2]."""
    right_weight: Int64Array
    """Weight of its right child, 0 of leaves: [nodes * 2]."""
    children: Int64Array
    """Right child of each node, then its left one: [nodes * 2]."""
    of_period: Int64Array
    """Turns of each stream in a period: its weight: [streams]."""


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

    def __post_init__(self) -> None:
        """Check the weights and build the tree: O(S log S)."""
        if not self.weights or min(self.weights) < 0 or not 0 < self.total < MAX_TOTAL:
            raise ConfigError(
                f"whole weights {self.weights} add up to {self.total}: give none below 0, "
                f"at least one above 0, and fewer than 2**47 in all"
            )
        num_streams = len(self.weights)
        num_inner = num_streams - self.weights.count(0) - 1
        heap = [(weight, stream, num_inner + stream) for stream, weight in enumerate(self.weights) if weight]
        heapq.heapify(heap)  # weight, earliest stream (decides ties), node
        weights, left_weights, children = [1] * (num_inner + num_streams), [1] * (num_inner + num_streams), []
        for node in range(num_inner):
            light, heavy = heapq.heappop(heap), heapq.heappop(heap)
            if light[0] == heavy[0]:  # ties: the earlier stream is the left child
                light, heavy = heavy, light
            weights[node], left_weights[node] = light[0] + heavy[0], heavy[0]
            children += [light[2], heavy[2]]
            heapq.heappush(heap, (light[0] + heavy[0], min(light[1], heavy[1]), node))
        children += [leaf for leaf in range(num_inner, num_inner + num_streams) for _ in range(2)]
        weight, left_weight = (np.repeat(np.array(column, np.int64), 2) for column in (weights, left_weights))  # [nodes * 2]
        tree = _Tree(
            num_inner=2 * num_inner,
            root=2 * heap[0][2],
            weight=weight,
            half=weight >> 1,
            left_weight=left_weight,
            right_weight=weight - left_weight,
            children=2 * np.array(children, np.int64),
            of_period=np.array(self.weights, np.int64),
        )
        object.__setattr__(self, "_tree", tree)

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
        tree, total = self._tree, self.total
        period, count = np.divmod(np.asarray(numbers, np.int64), total)  # [n]: every period is alike
        node = np.full(len(count), tree.root, np.int64)  # [n]
        split = _split_wide if total >= _NARROW else _split
        while node.size and np.minimum.reduce(node) < tree.num_inner:
            for _ in range(_LEVELS):
                left, is_left = split(tree, node, count)
                count = count - left  # [n]
                np.copyto(count, left, where=is_left)
                node = tree.children[node + is_left]  # [n]
        stream = (node - tree.num_inner) >> 1  # [n]
        return Turns(stream, count + period * tree.of_period[stream])

    def counts(self, number: int) -> tuple[int, ...]:
        """Return how many of the first `number` turns are each stream's: O(S), in integers of any size."""
        tree = self._tree
        turns = [0] * len(tree.weight)
        turns[tree.root] = number
        weights, left_weights, children = (column.tolist() for column in (tree.weight, tree.left_weight, tree.children))
        for node in range(tree.num_inner - 2, -1, -2):  # parents before children
            right, left = children[node : node + 2]
            turns[left] = (turns[node] * left_weights[node] + weights[node] // 2) // weights[node]
            turns[right] = turns[node] - turns[left]
        return tuple(turns[tree.num_inner :: 2])


class _Split(NamedTuple):
    """What nodes give to their left children."""

    left: Int64Array
    """Turns of the left child: [n]."""
    is_left: NDArray[np.bool_]
    """The next turn is the left child's: [n]."""


def _split(tree: _Tree, node: Int64Array, turns: Int64Array) -> _Split:
    """Return round(turns * left / weight), halves up, for weights below 2**31 and fewer turns than the weight."""
    left, remainder = np.divmod(turns * tree.left_weight[node] + tree.half[node], tree.weight[node])  # [n]
    return _Split(left, remainder >= tree.right_weight[node])


def _split_wide(tree: _Tree, node: Int64Array, turns: Int64Array) -> _Split:
    """Return the same for weights below 2**47, by Horner's rule in limbs of 16 bits."""
    wide, part, rest = (array.astype(np.uint64) for array in (tree.weight[node], tree.left_weight[node], turns))  # [n]
    left, remainder = np.zeros_like(rest), np.zeros_like(rest)  # [n]
    for shift in (32, 16, 0):
        limb = (rest >> np.uint64(shift)) & np.uint64(0xFFFF)  # [n]
        more, remainder = np.divmod((remainder << np.uint64(16)) + limb * part, wide)  # [n]
        left = (left << np.uint64(16)) + more  # [n]
    remainder = remainder + (wide >> np.uint64(1))  # [n]
    left += remainder >= wide  # the half rounds up
    remainder = np.where(remainder >= wide, remainder - wide, remainder)  # [n]
    return _Split(left.astype(np.int64), remainder + part >= wide)
