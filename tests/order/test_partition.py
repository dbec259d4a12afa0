"""The share of every rank and worker: same global batches on every layout, equal steps, exact resumption."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator

import numpy as np
import pytest
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from sqlstream.errors import ConfigError, StateError
from sqlstream.order import Int64Array, Plan, Tail
from sqlstream.world import World
from tests.order.layouts import Layout, global_batches, rank_batches, row_sets

RANKS, WORKERS = (1, 2, 4, 8, 16, 32), (0, 1, 2, 3, 8)
ONE_PROCESS = Layout(1, 0)


def plan_for(layout: Layout, num_samples: int, step_size: int, tail: Tail = Tail.SHORT, num_canonical_nodes: int = 1) -> Plan:
    """A plan whose global batch is `step_size` on `layout`."""
    assert step_size % layout.num_ranks == 0
    return Plan(
        num_samples=num_samples,
        seed=11,
        batch_size=step_size // layout.num_ranks,
        tail=tail,
        num_canonical_nodes=num_canonical_nodes,
    )


def steps_of(plan: Plan, layout: Layout) -> tuple[Int64Array, Int64Array]:
    """All positions of an epoch as the whole steps [k, r * b] and the last, short one [r * b]."""
    assert plan.batch_size is not None
    size, last_step = plan.batch_size, plan.num_samples // (plan.batch_size * layout.num_ranks)
    whole = np.full((last_step, layout.num_ranks, size), -1)
    last: list[Int64Array] = []
    for rank in range(layout.num_ranks):
        for world in layout.worlds(rank):
            blocks = plan.partition(world).blocks(block=1 << 16)
            positions = np.concatenate([np.empty(0, dtype=np.int64), *blocks])
            own = whole[world.worker :: world.num_workers, rank]
            own[:] = positions[: own.size].reshape(own.shape)
            if own.size < positions.size:
                assert last_step % world.num_workers == world.worker, "the last step went to another worker"
                last.append(positions[own.size :])
    assert len({len(positions) for positions in last}) <= 1, "ranks differ in the last step"
    assert len(last) in (0, layout.num_ranks)
    return whole.reshape(last_step, layout.num_ranks * size), np.concatenate([np.empty(0, dtype=np.int64), *last])


@pytest.mark.parametrize("step_size", [16, 960])
@pytest.mark.parametrize("num_samples", [1, 2, 7, 117, 9_867, 1_000_000])
def test_global_batches_are_the_same_on_every_layout(num_samples: int, step_size: int) -> None:
    whole_steps, rest = divmod(num_samples, step_size)
    for num_ranks, num_workers in itertools.product([n for n in RANKS if step_size % n == 0], WORKERS):
        layout = Layout(num_ranks, num_workers)
        whole, last = steps_of(plan_for(layout, num_samples, step_size), layout)
        whole.sort(axis=1)
        assert np.array_equal(whole.ravel(), np.arange(whole_steps * step_size)), layout
        assert np.array_equal(np.unique(last), whole_steps * step_size + np.arange(rest)), layout
        assert len(last) == -(-rest // num_ranks) * num_ranks, layout


@pytest.mark.parametrize("num_samples", [1, 2, 7, 117, 9_867])
def test_each_row_comes_once_an_epoch_in_one_process(num_samples: int) -> None:
    for num_workers in WORKERS:
        layout = Layout(1, num_workers)
        for epoch in (0, 1, 5):
            steps = global_batches(plan_for(layout, num_samples, 16), layout, epoch)
            assert sorted(np.concatenate([batch for (batch,) in steps]).tolist()) == list(range(num_samples))


@pytest.mark.parametrize("num_samples", [1, 3, 16, 53])
@pytest.mark.parametrize("tail", list(Tail))
def test_the_last_step_is_as_its_policy_says(tail: Tail, num_samples: int) -> None:
    whole, rest = divmod(num_samples, 16)
    for num_ranks, num_workers in itertools.product((1, 2, 4, 16), WORKERS):
        layout = Layout(num_ranks, num_workers)
        plan = plan_for(layout, num_samples, 16, tail)
        steps = global_batches(plan, layout, epoch=2)
        assert (
            len(steps) == plan.partition(World(world_size=num_ranks)).num_steps == whole + (rest > 0 and tail is not Tail.DROP)
        )
        if len(steps) > whole:
            width = {Tail.SHORT: -(-rest // num_ranks), Tail.FILL: 16 // num_ranks, Tail.DROP: 0}[tail]
            assert [len(batch) for batch in steps[-1]] == [width] * num_ranks
            counts = np.unique(np.concatenate(steps[-1]), return_counts=True)[1]
            assert len(counts) == rest
            assert counts.max() - counts.min() <= 1, "some row is repeated more often than needed"


class Positions(IterableDataset[int]):
    """The thinnest stream over a plan: yields its worker's positions."""

    def __init__(self, plan: Plan, world: World) -> None:
        self.plan, self.world = plan, world

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        world = self.world if info is None else self.world.with_worker(info.id, info.num_workers)
        for block in self.plan.partition(world, consumed=16).blocks():
            yield from block.tolist()


@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # more workers than this machine has cores
@pytest.mark.parametrize("num_workers", [0, 3])
def test_a_real_dataloader_delivers_batches_as_the_layouts_of_these_tests_do(num_workers: int) -> None:
    layout = Layout(2, num_workers)
    plan = plan_for(layout, 53, 8)
    loader: DataLoader[int] = DataLoader(
        Positions(plan, layout.worlds(rank=1)[0].with_worker(0, 1)), batch_size=4, num_workers=num_workers, collate_fn=list
    )
    assert list(loader) == [batch.tolist() for batch in rank_batches(plan, layout, rank=1, consumed=16)]


RESUME_LAYOUTS = [Layout(r, w) for r, w in ((1, 0), (1, 3), (2, 1), (3, 2), (4, 0), (6, 5), (12, 2))]


@pytest.mark.parametrize("num_samples", [53, 60, 7])
def test_resuming_after_every_step_on_every_other_layout_goes_on_exactly(num_samples: int) -> None:
    step_size = 12
    reference = [
        row_sets(global_batches(plan_for(ONE_PROCESS, num_samples, step_size), ONE_PROCESS, epoch)) for epoch in range(3)
    ]
    flat = [rows for epoch in reference for rows in epoch]
    per_epoch = len(reference[0])

    @functools.cache
    def rest_of_epoch(layout: Layout, epoch: int, step: int) -> list[set[int]]:
        """What `layout` delivers from this step on: the same after each layout that may have come before."""
        return row_sets(global_batches(plan_for(layout, num_samples, step_size), layout, epoch, consumed=step * step_size))

    def steps(layout: Layout, done: int, count: int) -> list[set[int]]:
        """What `layout` delivers in the `count` steps after `done` steps of the whole run, over the ends of epochs."""
        taken: list[set[int]] = []
        while len(taken) < count and done < len(flat):
            batches = rest_of_epoch(layout, *divmod(done, per_epoch))[: count - len(taken)]
            taken += batches
            done += len(batches)
        return taken

    for (first, second), stop in itertools.product(itertools.permutations(RESUME_LAYOUTS, 2), range(len(flat) + 1)):
        delivered = flat[:stop]  # what `first` delivers from the start is tested by stop 0, where it goes on to the end
        delivered += steps(second, len(delivered), 2)
        delivered += steps(first, len(delivered), len(flat))
        assert delivered == flat, (first, second, stop)


def test_the_end_of_an_epoch_leaves_nothing_and_more_than_that_is_the_end_too() -> None:
    plan = Plan(num_samples=53, seed=1, batch_size=4)
    world = World(world_size=3)
    for consumed in (53, 54, 60, 1000):
        assert list(plan.partition(world, consumed).blocks()) == []
        assert plan.partition(world, consumed).num_samples == 0


def test_a_worker_goes_on_within_a_batch_after_what_it_has_taken() -> None:
    plan = Plan(num_samples=103, seed=1, batch_size=4)
    for worker in range(3):
        share = plan.partition(World(rank=1, world_size=2, worker=worker, num_workers=3), consumed=16)
        whole = np.concatenate(list(share.blocks()))
        for taken in range(share.num_samples + 1):
            assert np.array_equal(share.positions(taken, share.num_samples), whole[taken:])


def test_blocks_are_never_longer_than_asked_and_do_not_change_the_order() -> None:
    share = Plan(num_samples=1003, seed=1, batch_size=6).partition(World(worker=1, num_workers=2))
    whole = np.concatenate(list(share.blocks(block=10_000)))
    for block in (1, 5, 6, 64):
        blocks = list(share.blocks(block=block))
        assert max(map(len, blocks)) <= block
        assert np.array_equal(np.concatenate(blocks), whole)


@pytest.mark.parametrize("num_samples", [5, 48, 53])
def test_an_iteration_over_epochs_without_end_keeps_its_workers_in_turn(num_samples: int) -> None:
    num_workers, plan = 3, Plan(num_samples=num_samples, seed=1, batch_size=8, tail=Tail.FILL)
    queues: list[list[int]] = [[] for _ in range(num_workers)]
    first_worker, num_epochs = 0, 4
    for epoch in range(num_epochs):
        shares = [
            plan.partition(World(worker=w, num_workers=num_workers), first_worker=first_worker) for w in range(num_workers)
        ]
        for queue, share in zip(queues, shares, strict=True):
            queue += [epoch * 1000 + position for block in share.blocks() for position in block.tolist()]
        (first_worker,) = {share.next_worker for share in shares}
    num_steps = plan.partition(World()).num_steps
    for step in range(num_epochs * num_steps):  # the DataLoader asks its workers in turn, batch by batch
        queue = queues[step % num_workers]
        batch, queues[step % num_workers] = queue[:8], queue[8:]
        epoch, k = divmod(step, num_steps)
        assert {position - epoch * 1000 for position in batch} == set(range(k * 8, min(k * 8 + 8, num_samples)))


@pytest.mark.parametrize(("num_ranks", "num_workers"), [(1, 0), (1, 4), (3, 2), (7, 3)])
def test_without_a_batch_size_every_position_is_taken_and_ranks_have_equally_many(num_ranks: int, num_workers: int) -> None:
    plan = Plan(num_samples=53, seed=None, batch_size=None)
    taken: list[Int64Array] = []
    for rank in range(num_ranks):
        workers = Layout(num_ranks, num_workers).worlds(rank)
        own = [np.concatenate([np.empty(0, dtype=np.int64), *plan.partition(world).blocks()]) for world in workers]
        assert sum(map(len, own)) == plan.partition(workers[0]).num_steps == -(-53 // num_ranks)
        steps = [positions[:-1] // num_ranks for positions in own]  # but the last, which may be a repeat
        assert all(np.all(step % len(workers) == worker) for worker, step in enumerate(steps))
        taken += own
    assert set(np.concatenate(taken).tolist()) == set(range(53))


def test_without_a_batch_size_several_workers_cannot_go_on_and_say_why() -> None:
    plan = Plan(num_samples=53, seed=None, batch_size=None)
    assert np.concatenate(list(plan.partition(World(), consumed=20).blocks())).tolist() == list(range(20, 53))
    with pytest.raises(StateError, match=r"20 samples on 2 workers.*batch_size="):
        plan.partition(World(num_workers=2), consumed=20)


@pytest.mark.parametrize("consumed", [-8, 7, 36])
def test_going_on_in_the_middle_of_a_step_is_refused_with_both_numbers(consumed: int) -> None:
    with pytest.raises(StateError, match=rf"after {consumed} samples.*takes 8 \(batch size 4 x 2 ranks\)"):
        Plan(num_samples=53, seed=1, batch_size=4).partition(World(world_size=2), consumed)


@pytest.mark.parametrize(("num_samples", "num_canonical_nodes"), [(103, 4), (96, 4), (1000, 8), (103, 2)])
def test_a_node_keeps_its_part_of_the_rows_in_every_epoch(num_samples: int, num_canonical_nodes: int) -> None:
    parts_of_nodes: dict[int, list[set[int]]] = {}
    for num_nodes in (n for n in (1, 2, 4, 8) if num_canonical_nodes % n == 0):
        layout = Layout(8, 2, num_nodes)
        plan = plan_for(layout, num_samples, 24, num_canonical_nodes=num_canonical_nodes)
        rows = [[set[int]() for _ in range(num_nodes)] for _ in range(4)]
        for epoch, nodes in enumerate(rows):
            for step in global_batches(plan, layout, epoch):
                for rank, batch in enumerate(step):
                    nodes[rank * num_nodes // 8].update(batch.tolist())
        assert all(nodes == rows[0] for nodes in rows), "a node's rows changed with the epoch"
        assert sorted(row for node in rows[0] for row in node) == list(range(num_samples)), "nodes share rows"
        parts_of_nodes[num_nodes] = rows[0]
    for num_nodes, parts in parts_of_nodes.items():
        finest = parts_of_nodes[max(parts_of_nodes)]
        assert all(any(part <= whole for whole in parts) for part in finest), f"{num_nodes} nodes cut the parts of more nodes"


@pytest.mark.parametrize("num_samples", [1, 3, 25, 103])
def test_canonical_nodes_give_the_same_global_batches_on_any_number_of_nodes(num_samples: int) -> None:
    reference = row_sets(global_batches(plan_for(ONE_PROCESS, num_samples, 24, num_canonical_nodes=4), ONE_PROCESS, epoch=1))
    for num_ranks, num_workers, num_nodes in [(1, 3, 1), (2, 0, 2), (4, 2, 2), (8, 1, 4), (12, 0, 4), (6, 2, 3)]:
        layout = Layout(num_ranks, num_workers, num_nodes)
        assert row_sets(global_batches(plan_for(layout, num_samples, 24, num_canonical_nodes=4), layout, epoch=1)) == reference


def test_canonical_nodes_refuse_nodes_with_unequal_ranks() -> None:
    plan = Plan(num_samples=10, seed=1, batch_size=2, num_canonical_nodes=2)
    with pytest.raises(ConfigError, match=r"num_canonical_nodes=2.*world_size=5, num_nodes=2 and local_world_size=3"):
        plan.partition(World(world_size=5, local_world_size=3, num_nodes=2))
    with pytest.raises(ConfigError, match=r"num_nodes=1 and local_world_size=1: give World the nodes and the ranks of each"):
        plan.partition(World(rank=1, world_size=4))


@pytest.mark.parametrize("num_samples", [1, 3, 16, 53, 61])
@pytest.mark.parametrize("tail", list(Tail))
def test_a_node_takes_what_its_ranks_take(tail: Tail, num_samples: int) -> None:
    for num_nodes, parts in ((1, 1), (2, 1), (4, 1), (2, 2), (2, 4), (4, 4)):
        layout = Layout(8, 2, num_nodes)
        plan = plan_for(layout, num_samples, 16, tail, parts)
        for node in range(num_nodes):
            worlds = [world for rank in range(8) for world in layout.worlds(rank) if world.node == node]
            own = {p for world in worlds for block in plan.partition(world).blocks() for p in block.tolist()}
            found = plan.partition(worlds[0]).is_on_node(np.arange(num_samples))
            assert np.flatnonzero(found).tolist() == sorted(own), (num_nodes, parts, node)


def test_a_node_of_fewer_ranks_than_others_takes_what_its_ranks_take() -> None:
    num_local, firsts = (3, 1, 2), (0, 3, 4)
    plan = Plan(num_samples=53, seed=11, batch_size=3)
    for node, (size, first) in enumerate(zip(num_local, firsts, strict=True)):
        worlds = [
            World(rank=first + i, world_size=6, local_rank=i, local_world_size=size, node=node, num_nodes=3)
            for i in range(size)
        ]
        own = {p for world in worlds for p in plan.partition(world).positions(0, 53).tolist()}
        assert np.flatnonzero(plan.partition(worlds[-1]).is_on_node(np.arange(53))).tolist() == sorted(own)
