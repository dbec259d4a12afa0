"""Order: a pure function from (seed, epoch, position) to a row, and the share of every rank and worker in it.

`permute` shuffles numbers without a table, `plan` says which row stands where, `partition` who takes it, `blocks` is a shuffle
for rows that come in chunks. numpy only, O(1) memory (`blocks`: three numbers a block).

Words: a *position* counts samples of an epoch over the whole job, a *step* takes G = batch size x world size positions, a
*row* is a selected row of the index.

O1 the order depends on nothing but the number of rows, seed, epoch and canonical nodes. O2 the rows of every global batch are
the same on any layout with the same G. O3 going on after any step, on any layout, equals the uninterrupted run. O4 each row
exactly once an epoch, but for repeats in the last step on several ranks. O5 as many steps, of as many samples, on every rank.
"""

from sqlstream.order.blocks import BlockLayout, BlockOrder, shuffle_blocks
from sqlstream.order.partition import Partition, Tail
from sqlstream.order.permute import MAX_SIZE, PERMUTATION_VERSION, Int64Array, Permutation
from sqlstream.order.plan import MAX_REPLACEMENTS, Plan

__all__ = [
    "MAX_REPLACEMENTS",
    "MAX_SIZE",
    "PERMUTATION_VERSION",
    "BlockLayout",
    "BlockOrder",
    "Int64Array",
    "Partition",
    "Permutation",
    "Plan",
    "Tail",
    "shuffle_blocks",
]
