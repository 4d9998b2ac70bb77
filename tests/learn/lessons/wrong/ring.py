"""Wrong solutions of the ring all-reduce; ``wrong_solutions.py`` says how they are written."""

HEAD = """import torch
import torch.distributed as dist


def pass_on(sent, received, towards=1, back=1):
    rank, size = dist.get_rank(), dist.get_world_size()
    transfers = [dist.isend(sent, (rank + towards) % size), dist.irecv(received, (rank - back) % size)]
    for transfer in transfers:
        transfer.wait()
    return received

"""
SIGNATURES = {"ring_all_reduce": "def ring_all_reduce(tensor: torch.Tensor) -> None:"}
WRONG = {
    "ring_all_reduce": """
# ring_adds_in_both_halves
# a rank's numbers are added more than once | when does it replace it?
rank, size = dist.get_rank(), dist.get_world_size()
chunks = tensor.view(-1).tensor_split(size)
for step in range(2 * (size - 1)):
    sent, received = chunks[(rank - step) % size], chunks[(rank - step - 1) % size]
    received += pass_on(sent, torch.empty_like(received))

# ring_all_send_first
# hangs | rank 0 is at line 17: dist.send | rank 1 is at line 17: dist.send | none ever receives
rank, size = dist.get_rank(), dist.get_world_size()
chunks = tensor.view(-1).tensor_split(size)
for step in range(size - 1):
    dist.send(chunks[(rank - step) % size], (rank + 1) % size)
    received = torch.empty_like(chunks[(rank - step - 1) % size])
    dist.recv(received, (rank - 1) % size)
    chunks[(rank - step - 1) % size].add_(received)

# ring_by_the_collective
# calls a collective, allreduce
dist.all_reduce(tensor)

# ring_cut_with_a_remainder
# right for a tensor of shape (6), wrong for (5) | element 4: 5 + 500 = 505; rank 0 has 5
rank, size = dist.get_rank(), dist.get_world_size()
chunks = tensor.view(-1).split(tensor.numel() // size or 1)
chunks = [chunks[index] if index < len(chunks) else torch.empty(0, dtype=tensor.dtype) for index in range(size)]
for step in range(size - 1):
    sent, received = chunks[(rank - step) % size], chunks[(rank - step - 1) % size]
    received += pass_on(sent, torch.empty_like(received))
for step in range(size - 1):
    sent, received = chunks[(rank + 1 - step) % size], chunks[(rank - step) % size]
    pass_on(sent, received)

# ring_directly_to_each
# on 3 ranks | rank 0 sends to 1, 2, not only to the next rank
rank, size = dist.get_rank(), dist.get_world_size()
chunks = tensor.view(-1).tensor_split(size)
own = chunks[rank].clone()
for shift in range(1, size):
    chunks[rank].add_(pass_on(chunks[(rank + shift) % size], torch.empty_like(own), shift, shift))
for shift in range(1, size):
    pass_on(chunks[rank], chunks[(rank - shift) % size], shift, shift)

# ring_divides
# divides by the number of ranks
received, own = torch.empty_like(tensor), tensor.clone()
for _ in range(dist.get_world_size() - 1):
    own = pass_on(own, torch.empty_like(own))
    tensor += own
tensor /= dist.get_world_size()

# ring_from_the_wrong_side
# on 3 ranks | hangs | line 9: transfer.wait()
rank, size = dist.get_rank(), dist.get_world_size()
chunks = tensor.view(-1).tensor_split(size)
for step in range(size - 1):
    sent, received = chunks[(rank - step) % size], chunks[(rank - step - 1) % size]
    received += pass_on(sent, torch.empty_like(received), back=-1)
for step in range(size - 1):
    pass_on(chunks[(rank + 1 - step) % size], chunks[(rank - step) % size], back=-1)

# ring_in_a_copy
# each rank still has its own numbers | views
rank, size = dist.get_rank(), dist.get_world_size()
chunks = tensor.clone().view(-1).tensor_split(size)
for step in range(size - 1):
    sent, received = chunks[(rank - step) % size], chunks[(rank - step - 1) % size]
    received += pass_on(sent, torch.empty_like(received))
for step in range(size - 1):
    pass_on(chunks[(rank + 1 - step) % size], chunks[(rank - step) % size])

# ring_not_waited_for
# wait()
rank, size = dist.get_rank(), dist.get_world_size()
chunks, started = tensor.view(-1).tensor_split(size), []
for step in range(size - 1):
    received = torch.full_like(chunks[(rank - step - 1) % size], -1)
    started.append((dist.isend(chunks[(rank - step) % size], (rank + 1) % size), received))
    started.append((dist.irecv(received, (rank - 1) % size), received))
    chunks[(rank - step - 1) % size].add_(received)
for transfer, _ in started:
    transfer.wait()

# ring_of_rows
# IndexError: tuple index out of range | line 17
rank, size = dist.get_rank(), dist.get_world_size()
chunks = tensor.chunk(size)
for step in range(size - 1):
    sent, received = chunks[(rank - step) % size], chunks[(rank - step - 1) % size]
    received += pass_on(sent, torch.empty_like(received))
for step in range(size - 1):
    pass_on(chunks[(rank + 1 - step) % size], chunks[(rank - step) % size])

# ring_one_step_too_few
# some ranks' numbers are missing from the sum
rank, size = dist.get_rank(), dist.get_world_size()
chunks = tensor.view(-1).tensor_split(size)
for step in range(size - 2):
    sent, received = chunks[(rank - step) % size], chunks[(rank - step - 1) % size]
    received += pass_on(sent, torch.empty_like(received))
for step in range(size - 1):
    pass_on(chunks[(rank + 1 - step) % size], chunks[(rank - step) % size])

# ring_stops_half_way
# stops after the reduce-scatter | element 0: 1 + 100 = 101; rank 0 has 1
rank, size = dist.get_rank(), dist.get_world_size()
chunks = tensor.view(-1).tensor_split(size)
for step in range(size - 1):
    sent, received = chunks[(rank - step) % size], chunks[(rank - step - 1) % size]
    received += pass_on(sent, torch.empty_like(received))

# ring_through_rank_0
# on 3 ranks: a rank sends too much | at most 2675 sent, rank 0 sends 3208
rank, size = dist.get_rank(), dist.get_world_size()
if rank > 0:
    dist.send(tensor, 0)
    dist.recv(tensor, 0)
else:
    received = torch.empty_like(tensor)
    for other in range(1, size):
        dist.recv(received, other)
        tensor += received
    for other in range(1, size):
        dist.send(tensor, other)

# ring_with_the_sum_on_rank_0
# only rank 0 has the sum
rank, size = dist.get_rank(), dist.get_world_size()
if rank > 0:
    dist.send(tensor, 0)
else:
    received = torch.empty_like(tensor)
    for other in range(1, size):
        dist.recv(received, other)
        tensor += received

# ring_of_whole_tensors
# on 3 ranks: the ranks hold different bits | drift apart
own = tensor.clone()
for _ in range(dist.get_world_size() - 1):
    own = pass_on(own, torch.empty_like(own))
    tensor += own

# ring_written_into_the_wrong_chunk
# some ranks' numbers are missing from the sum | which chunk does a rank send in each?
rank, size = dist.get_rank(), dist.get_world_size()
chunks = tensor.view(-1).tensor_split(size)
for step in range(size - 1):
    sent, received = chunks[(rank - step) % size], chunks[(rank - step - 1) % size]
    received += pass_on(sent, torch.empty_like(received))
for step in range(size - 1):
    pass_on(chunks[(rank - step) % size], chunks[(rank - step - 1) % size])
""",
}
