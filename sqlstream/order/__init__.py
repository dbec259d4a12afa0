"""Order: a pure function from (seed, epoch, position) to a row, and the share of every rank and worker in it.

`order` says what an order is, and what it gives (`Draws`). `shuffled`, `blocks`, `weighted` and `filtered` are orders that are
composed: weights and filters stand around a shuffle. `permute` shuffles numbers without a table; `steps` and `partition` say
which process takes which positions. `whole_weights`, `even`, `schedules` and `mixture` say which stream of a mixture a turn
belongs to, with exact proportions; `mixed` is the order of their rows, and `step_partition` deals out steps whose streams have
batches of their own, of which `stepped` is the order. `bucketed` is the order of global batches of one bucket each; its epochs
differ in length. `bucket_lanes` takes several such batches in a step, one for each rank. `packs` has the orders of packs of
rows: a position draws several rows. numpy only,
O(1) memory (`blocks`: three numbers a block; `bucketed`: three a bucket, and a mapped table; `packed`: some a length).

Words: a *position* counts samples of an epoch over the whole job, a *step* takes G = batch size x world size positions, a
*row* is a selected row of the index, a *stream* is one dataset of an order, a *draw* is a row that a stream gives.

O1 the order depends on nothing but the number of rows, seed, epoch and canonical nodes. O2 the rows of every global batch are
the same on any layout with the same G. O3 going on after any step, on any layout, equals the uninterrupted run. O4 each row
exactly once an epoch, but for repeats in the last step on several ranks. O5 as many steps, of as many samples, on every rank.
"""

from sqlstream.order.blocks import BlockLayout, BlockOrder, Blocks, shuffle_blocks
from sqlstream.order.bucket_lanes import BucketLanes
from sqlstream.order.bucket_rates import WeightsSince
from sqlstream.order.bucketed import Bucketed, BucketRows
from sqlstream.order.filtered import Filtered
from sqlstream.order.order import MAX_REPLACEMENTS, Draws, Order, OrderOfBatches, is_counted
from sqlstream.order.packs.pack_plan import PackPlan, plan_packs
from sqlstream.order.packs.packed import LengthRows, LengthWeights, Packed, WeightedLengths, text_of_packs
from sqlstream.order.packs.windows import PartOfWindow, Windows, pack_window
from sqlstream.order.partition import Partition, Tail
from sqlstream.order.permute import MAX_SIZE, PERMUTATION_VERSION, Int64Array, Permutation, forward_each
from sqlstream.order.plan import Plan, shuffled
from sqlstream.order.shuffled import Shuffled
from sqlstream.order.steps import Steps
from sqlstream.order.streams.continued import Continued
from sqlstream.order.streams.even import Even, Turns
from sqlstream.order.streams.mixed import ENDLESS, Mixed, MixtureSince, StreamWeights, TurnLayout
from sqlstream.order.streams.mixture import MIXTURE_VERSION, Change, Mixture, all_exhausted, first_exhausted, ramp
from sqlstream.order.streams.schedules import IndependentDraws, ReorderedBlocks, ScheduleType, StreamSchedule
from sqlstream.order.streams.step_partition import Grouped, Lanes, MicroBatch, StepPartition, StreamBatches, group_streams
from sqlstream.order.streams.stepped import NUM_STEPS, Stepped, StepShare
from sqlstream.order.streams.whole_weights import (
    absolute_choose,
    relative_choose,
    temperature_weights,
    token_weights,
    whole_weights,
)
from sqlstream.order.weighted import Weighted, WeightsFrom

__all__ = [
    "ENDLESS",
    "MAX_REPLACEMENTS",
    "MAX_SIZE",
    "MIXTURE_VERSION",
    "NUM_STEPS",
    "PERMUTATION_VERSION",
    "BlockLayout",
    "BlockOrder",
    "Blocks",
    "BucketLanes",
    "BucketRows",
    "Bucketed",
    "Change",
    "Continued",
    "Draws",
    "Even",
    "Filtered",
    "Grouped",
    "IndependentDraws",
    "Int64Array",
    "Lanes",
    "LengthRows",
    "LengthWeights",
    "MicroBatch",
    "Mixed",
    "Mixture",
    "MixtureSince",
    "Order",
    "OrderOfBatches",
    "PackPlan",
    "Packed",
    "PartOfWindow",
    "Partition",
    "Permutation",
    "Plan",
    "ReorderedBlocks",
    "ScheduleType",
    "Shuffled",
    "StepPartition",
    "StepShare",
    "Stepped",
    "Steps",
    "StreamBatches",
    "StreamSchedule",
    "StreamWeights",
    "Tail",
    "TurnLayout",
    "Turns",
    "Weighted",
    "WeightedLengths",
    "WeightsFrom",
    "WeightsSince",
    "Windows",
    "absolute_choose",
    "all_exhausted",
    "first_exhausted",
    "forward_each",
    "group_streams",
    "is_counted",
    "pack_window",
    "plan_packs",
    "ramp",
    "relative_choose",
    "shuffle_blocks",
    "shuffled",
    "temperature_weights",
    "text_of_packs",
    "token_weights",
    "whole_weights",
]
