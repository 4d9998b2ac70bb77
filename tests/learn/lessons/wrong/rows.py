"""Wrong solutions of the rows of each rank; ``wrong_solutions.py`` says how they are written."""

HEAD = """import random
import torch
import torch.distributed as dist


def order(epoch, num_rows, seed):
    generator = torch.Generator().manual_seed(1000 * seed + epoch)
    return torch.randperm(num_rows, generator=generator).tolist()


def cut(rows, size):
    return [rows[start : start + size] for start in range(0, len(rows), size)]

"""
SIGNATURES = {
    "training_rows": "def training_rows(epoch, rank, world_size, num_rows, batch_size, seed):",
    "evaluation_rows": "def evaluation_rows(rank, world_size, num_rows):",
}
WRONG = {
    "training_rows": """
# rows_with_an_empty_last_step
# the steps have the wrong numbers of rows | 50 rows | none is empty
rows = order(epoch, num_rows, seed)
steps = num_rows // batch_size + 1
return [rows[step * batch_size : (step + 1) * batch_size][rank::world_size] for step in range(steps)]

# rows_without_the_empty_list_of_a_rank
# the ranks have different numbers of steps | 41 rows
rows = order(epoch, num_rows, seed)
return [rows[start : start + batch_size - rank : world_size] for start in range(rank, num_rows, batch_size)]

# rows_that_stay_with_their_neighbours
# the batches are shuffled, but not the rows in them
*full, last = cut(list(range(num_rows)), batch_size)
return [full[index][rank::world_size] for index in order(epoch, len(full), seed)] + [last[rank::world_size]]

# rows_of_the_same_batches_in_every_epoch
# every epoch has the same batches
*full, last = cut(order(0, num_rows, seed), batch_size)
return [full[index][rank::world_size] for index in order(epoch, len(full), seed)] + [last[rank::world_size]]

# rows_by_global_random_numbers
# the same arguments give different rows | resumed
rows = torch.randperm(num_rows).tolist()
return [batch[rank::world_size] for batch in cut(rows, batch_size)]

# rows_by_the_rank_of_the_process
# the ranks do not agree on one rank's rows
rows = order(epoch, num_rows, seed)
return [batch[dist.get_rank()::world_size] for batch in cut(rows, batch_size)]

# rows_cut_into_blocks_first
# a different number of ranks sees different global batches
rows = order(epoch, num_rows, seed)
blocks = [rows[num_rows * index // world_size : num_rows * (index + 1) // world_size] for index in range(world_size)]
sizes = [batch_size * (index + 1) // world_size - batch_size * index // world_size for index in range(world_size)]
steps, start = [], 0
for step in range(num_rows // batch_size):
    steps.append(blocks[rank][start : start + sizes[rank]])
    start += sizes[rank]
left = [row for index in range(world_size) for row in blocks[index][num_rows // batch_size * sizes[index] :]]
return [*steps, left[rank::world_size]]

# rows_filled_up
# rows are trained on more than once | for example row
rows = order(epoch, num_rows, seed)
rows += rows[: -num_rows % world_size]
return [batch[rank::world_size] for batch in cut(rows, batch_size)]

# rows_for_all
# every rank sees all rows
return cut(order(epoch, num_rows, seed), batch_size)

# rows_in_another_order_per_rank
# the ranks' shares overlap | Do all ranks shuffle in the same way?
rows = order(epoch, num_rows, seed + rank)
return [batch[rank::world_size] for batch in cut(rows, batch_size)]

# rows_in_order
# the rows are not shuffled
return [batch[rank::world_size] for batch in cut(list(range(num_rows)), batch_size)]

# rows_left_out_at_the_end
# rows are left out | 7 are missing
rows = order(epoch, num_rows, seed)[: num_rows // batch_size * batch_size]
return [batch[rank::world_size] for batch in cut(rows, batch_size)]

# rows_made_a_batch_per_rank
# a global batch has another size | batch_size 10: step 0 has 20 rows on 2 ranks together
rows = order(epoch, num_rows, seed)[rank::world_size]
steps = -(-num_rows // (batch_size * world_size))
return [rows[step * batch_size : (step + 1) * batch_size] for step in range(steps)]

# rows_not_returned
# does not return a list of lists of rows
order(epoch, num_rows, seed)

# rows_of_a_reseeded_generator
# the rows are right, but a global random generator is changed | dropout
torch.manual_seed(1000 * seed + epoch)
rows = torch.randperm(num_rows).tolist()
return [batch[rank::world_size] for batch in cut(rows, batch_size)]

# rows_of_the_next_number
# there is no row 47
rows = [row + 1 for row in order(epoch, num_rows, seed)]
return [batch[rank::world_size] for batch in cut(rows, batch_size)]

# rows_of_one_batch_more_on_some_ranks
# the ranks have different numbers of steps | the ranks have [
rows = order(epoch, num_rows, seed)
shares = [batch[rank::world_size] for batch in cut(rows, batch_size)]
return cut([row for share in shares for row in share], batch_size // world_size - rank)

# rows_sent_by_rank_0
# the rows are right, but the ranks communicate (broadcast)
rows = [order(epoch, num_rows, seed)]
dist.broadcast_object_list(rows, src=0)
return [batch[rank::world_size] for batch in cut(rows[0], batch_size)]

# rows_shared_out_unevenly
# the rows of a step are not divided evenly
shares = []
for batch in cut(order(epoch, num_rows, seed), batch_size):
    size = len(batch) // world_size - 1
    shares.append(batch[rank * size :] if rank == world_size - 1 else batch[rank * size : (rank + 1) * size])
return shares

# rows_that_wait_for_rank_0
# hangs | rank 0 has returned | rank 1 is at line 18: dist.broadcast(numbers, src=0)
numbers = torch.tensor(order(epoch, num_rows, seed))
if dist.get_rank() > 0:
    dist.broadcast(numbers, src=0)
return [batch[rank::world_size] for batch in cut(numbers.tolist(), batch_size)]

# rows_without_the_epoch
# every epoch has the same order | set_epoch
rows = order(0, num_rows, seed)
return [batch[rank::world_size] for batch in cut(rows, batch_size)]

# rows_without_the_seed
# the seed does not change the order
rows = order(epoch, num_rows, 0)
return [batch[rank::world_size] for batch in cut(rows, batch_size)]
""",
    "evaluation_rows": """
# evaluation_all_count
# row 0 counts 2 times | another test set
rows = [*range(num_rows), *(index % num_rows for index in range(-num_rows % world_size))]
return [(row, True) for row in rows[rank::world_size]]

# evaluation_by_every_rank
# every rank evaluates all rows
return [(row, rank == 0) for row in range(num_rows)]

# evaluation_filled_up_once
# the ranks have different numbers of rows | 1 rows on 3 ranks
rows = [(row, True) for row in range(num_rows)]
rows += [(row, False) for row, _ in rows[: -num_rows % world_size]]
return rows[rank::world_size]

# evaluation_filled_up_too_much
# rows per rank, 4 would be enough
rows = [(row, True) for row in range(num_rows)]
rows += [(index % num_rows, False) for index in range(world_size - num_rows % world_size)]
return rows[rank::world_size]

# evaluation_left_out
# is on no rank
return [(row, True) for row in range(num_rows // world_size * world_size)][rank::world_size]

# evaluation_not_counted
# row 0 does not count
rows = [*range(num_rows), *(index % num_rows for index in range(-num_rows % world_size))]
repeated = set(rows[num_rows:])
return [(row, row not in repeated) for row in rows[rank::world_size]]

# evaluation_not_filled_up
# the ranks have different numbers of rows | rank 0: [(0, True), (2, True)
return [(row, True) for row in range(num_rows)][rank::world_size]

# evaluation_of_plain_rows
# does not return a list of pairs
return list(range(num_rows))[rank::world_size]

# evaluation_with_made_up_rows
# there is no row -1
rows = [(row, True) for row in range(num_rows)] + [(-1, False)] * (-num_rows % world_size)
return rows[rank::world_size]
""",
}
