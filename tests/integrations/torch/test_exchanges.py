"""Small all_to_alls with counts that come again: planned, and still each what it is."""

from __future__ import annotations


def exchange(rounds):
    """Exchange lists and splits of changing sizes and dtypes; return what came wrong."""
    import torch
    from torch import distributed as dist

    rank, size = dist.get_rank(), dist.get_world_size()
    wrong = []
    for turn in range(rounds):
        for base, dtype in ((1, torch.float32), (3, torch.int64), (0, torch.bfloat16)):
            counts = [[(base + a * b) % 5 for b in range(size)] for a in range(size)]
            sent = [torch.full((n,), 10 * rank + turn % 7).to(dtype) for n in counts[rank]]
            received = [torch.full((row[rank], 1), -1).to(dtype) for row in counts]
            dist.all_to_all(received, sent)
            out = torch.full((sum(row[rank] for row in counts),), -1).to(dtype)
            dist.all_to_all_single(out, torch.cat(sent), [r[rank] for r in counts], counts[rank])
            expected = [
                torch.full((row[rank], 1), 10 * a + turn % 7).to(dtype)
                for a, row in enumerate(counts)
            ]
            pairs = [*zip(received, expected, strict=True)]
            pairs.append((out, torch.cat(expected).reshape(-1)))
            wrong += [(turn, dtype, a.tolist()) for a, b in pairs if not torch.equal(a, b)]
    return wrong, len(dist.group.WORLD._exchanges._seen)


def test_the_same_counts_again_and_again(groups):
    for size in (1, 2, 3):
        assert groups.call(size, exchange, 4) == [([], 3)] * size


def exchange_many(kinds):
    import torch
    from torch import distributed as dist

    for turn in range(2):
        for count in range(1, kinds + 1):
            received = [torch.zeros(count) for _ in range(2)]
            dist.all_to_all(received, [torch.full((count,), 1.0 + turn)] * 2)
            assert [x.sum().item() for x in received] == [count * (1.0 + turn)] * 2
    return len(dist.group.WORLD._exchanges._seen)


def test_few_plans_are_kept(groups):
    assert groups.call(2, exchange_many, 40) == [16, 16]


def exchange_in_threads(count):
    """Exchange on one group from two threads that take turns, then on two groups at once."""
    import threading

    import torch
    from torch import distributed as dist

    second = dist.new_group([0, 1])
    wrong = []

    def run(group, value):
        for _ in range(count):
            received = [torch.zeros(3), torch.zeros(3)]
            dist.all_to_all(received, [torch.full((3,), value)] * 2, group=group)
            if [x.sum().item() for x in received] != [3 * value] * 2:
                wrong.append(received)

    threads = [
        threading.Thread(target=run, args=(group, value))
        for group, value in ((dist.group.WORLD, 1.0), (second, 2.0))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return wrong


def test_two_groups_in_two_threads(groups):
    assert groups.call(2, exchange_in_threads, 50) == [[], []]


def mix_sizes():
    """Some ranks' blocks are small, others' not: all make the same call."""
    import torch
    from torch import distributed as dist

    rank = dist.get_rank()
    large = 300_000
    counts = [[2, 3, 4], [3, 2, large], [4, large, 2]]
    for _ in range(3):
        received = [torch.zeros(row[rank]) for row in counts]
        dist.all_to_all(received, [torch.full((n,), 1.0 + rank) for n in counts[rank]])
        for other, block in enumerate(received):
            assert block.min() == block.max() == 1.0 + other
    return True


def test_ranks_with_small_blocks_beside_ranks_with_large_ones(groups):
    assert groups.call(3, mix_sizes) == [True] * 3
