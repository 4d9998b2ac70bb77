"""Wrong solutions of buckets and accumulation; ``wrong_solutions.py`` says how they are written."""

HEAD = """from contextlib import nullcontext
import torch
import torch.distributed as dist
from torch.nn.functional import mse_loss


def fill(parameters, bucket_bytes):
    buckets = [[]]
    for parameter in parameters:
        if buckets[-1] and sum(one.nbytes for one in buckets[-1]) + parameter.nbytes > bucket_bytes:
            buckets.append([])
        buckets[-1].append(parameter)
    return buckets


def launch(bucket):
    flat = torch.cat([parameter.grad.flatten() for parameter in bucket]) / dist.get_world_size()
    return bucket, flat, dist.all_reduce(flat, async_op=True)


def finish_all(started, wait=True, write=True):
    for bucket, flat, work in started:
        if wait:
            work.wait()
        if write:
            for parameter, mean in zip(bucket, flat.split([one.numel() for one in bucket])):
                parameter.grad.copy_(mean.view_as(parameter))
    started.clear()


def average(parameters, buckets, wait=True, write=True):
    started, computed = [], set()

    def ready(parameter):
        computed.add(parameter)
        for bucket in buckets:
            if parameter in set(bucket) and computed.issuperset(bucket):
                started.append(launch(bucket))
                computed.difference_update(bucket)

    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(ready)
    return lambda: finish_all(started, wait, write)


def rows_of_all(micro_batches):
    rows = torch.tensor(sum(len(inputs) for inputs, _ in micro_batches))
    dist.all_reduce(rows)
    return rows.item()


def backward(replica, micro_batches, loss_of, sync=lambda place, last: place == last):
    for place, (inputs, targets) in enumerate(micro_batches):
        with nullcontext() if sync(place, len(micro_batches) - 1) else replica.no_sync():
            loss_of(replica(inputs), targets).backward()

"""
SIGNATURES = {
    "average_in_buckets": "def average_in_buckets(parameters, bucket_bytes):",
    "accumulate": "def accumulate(replica, micro_batches):",
}
WRONG = {
    "average_in_buckets": """
# buckets_for_vectors_only
# raised RuntimeError | same number of dimensions
started = []
def launch_vectors(bucket):
    flat = torch.cat([parameter.grad for parameter in bucket]) / dist.get_world_size()
    return bucket, flat, dist.all_reduce(flat, async_op=True)
def ready(parameter):
    for bucket in fill(parameters, bucket_bytes):
        if bucket[-1] is parameter:
            started.append(launch_vectors(bucket))
for parameter in parameters:
    parameter.register_post_accumulate_grad_hook(ready)
return lambda: finish_all(started)

# buckets_all_in_one
# makes one all-reduce for all gradients
return average(parameters, [parameters])

# buckets_filled_from_the_end
# not filled in the order of the parameters | the buckets
return average(parameters, fill(parameters[::-1], bucket_bytes))

# buckets_for_one_step
# right in step 1, wrong in step 2
started, computed = [], set()
def ready(parameter):
    computed.add(parameter)
    for bucket in fill(parameters, bucket_bytes):
        if bucket[-1] is parameter and len(computed) < len(parameters) + (bucket[-1] is parameters[-1]):
            started.append(launch(bucket))
for parameter in parameters:
    parameter.register_post_accumulate_grad_hook(ready)
return lambda: finish_all(started)

# buckets_launched_after_the_backward_pass
# no all-reduce is launched before the backward pass has ended
return lambda: finish_all([launch(bucket) for bucket in fill(parameters, bucket_bytes)])

# buckets_launched_by_the_next_gradient
# a bucket is launched too late | launched after [4, 5, 8, 8]
started, buckets = [], fill(parameters, bucket_bytes)
def ready(parameter):
    for bucket, following in zip(buckets, buckets[1:]):
        if following[0] is parameter:
            started.append(launch(bucket))
    if parameter is parameters[-1]:
        started.append(launch(buckets[-1]))
for parameter in parameters:
    parameter.register_post_accumulate_grad_hook(ready)
return lambda: finish_all(started)

# buckets_launched_without_rank_0
# hangs | rank 0 has returned | rank 1 is at line 24: work.wait() | do all ranks launch every bucket
if dist.get_rank() == 0:
    return lambda: None
return average(parameters, fill(parameters, bucket_bytes))

# buckets_looked_up_by_value
# raised RuntimeError: The size of tensor | compare tensors number by number
buckets, started = fill(parameters, bucket_bytes), []
def ready(parameter):
    for bucket in buckets:
        if parameter in bucket and parameter is bucket[-1]:
            started.append(launch(bucket))
for parameter in parameters:
    parameter.register_post_accumulate_grad_hook(ready)
return lambda: finish_all(started)

# buckets_not_divided
# forgot to divide | parameter 0, element 0
started = []
buckets = {bucket[-1]: bucket for bucket in fill(parameters, bucket_bytes)}
def ready(parameter):
    if parameter in buckets:
        flat = torch.cat([one.grad.flatten() for one in buckets[parameter]])
        started.append((buckets[parameter], flat, dist.all_reduce(flat, async_op=True)))
for parameter in parameters:
    parameter.register_post_accumulate_grad_hook(ready)
return lambda: finish_all(started)

# buckets_not_returned
# raised TypeError: 'NoneType' object is not callable
average(parameters, fill(parameters, bucket_bytes))

# buckets_not_waited_for
# not in .grad when finish returns | done only after wait()
return average(parameters, fill(parameters, bucket_bytes), wait=False)

# buckets_not_written_back
# each rank still has its own gradients
return average(parameters, fill(parameters, bucket_bytes), write=False)

# buckets_of_one_gradient
# makes one all-reduce per gradient
return average(parameters, [[parameter] for parameter in parameters])

# buckets_that_are_too_large
# a bucket is too large | expected: [96, 160, 96, 16]
buckets = [[]]
for parameter in parameters:
    buckets[-1].append(parameter)
    if sum(one.nbytes for one in buckets[-1]) > bucket_bytes:
        buckets.append([])
return average(parameters, [bucket for bucket in buckets if bucket])

# buckets_waited_for_in_the_hook
# hangs | rank 1 waits | A hook that waits for an all-reduce then never returns
buckets = fill(parameters, bucket_bytes)
def ready(parameter):
    for bucket in buckets:
        if bucket[-1] is parameter:
            finish_all([launch(bucket)])
for parameter in parameters:
    parameter.register_post_accumulate_grad_hook(ready)
return lambda: None

# buckets_without_the_last
# only some gradients are averaged, those of parameters 7 are not
buckets = fill(parameters, bucket_bytes)
return average([one for one in parameters if one is not parameters[-1]], buckets)
""",
    "accumulate": """
# accumulated_by_the_mean_of_means
# every micro-batch has the same weight | rows per micro-batch, rank 0: 1, 4, 2; rank 1: 3, 6, 4
backward(replica, micro_batches, lambda outputs, targets: mse_loss(outputs, targets) / len(micro_batches))

# accumulated_by_the_rows_of_the_rank
# every rank has the same weight
rows = sum(len(inputs) for inputs, _ in micro_batches)
backward(replica, micro_batches, lambda outputs, targets: mse_loss(outputs, targets, reduction="sum") / rows)

# accumulated_means
# adds up the means of the micro-batches
backward(replica, micro_batches, mse_loss)

# accumulated_sums
# adds up the rows' gradients
backward(replica, micro_batches, lambda outputs, targets: mse_loss(outputs, targets, reduction="sum"))

# accumulated_too_small
# the gradient is 2 times too small
rows = rows_of_all(micro_batches)
backward(replica, micro_batches, lambda outputs, targets: mse_loss(outputs, targets, reduction="sum") / rows)

# accumulated_with_a_sync_in_each
# sends gradients 3 times for 3 micro-batches
rows = rows_of_all(micro_batches) / dist.get_world_size()
mean = lambda outputs, targets: mse_loss(outputs, targets, reduction="sum") / rows
backward(replica, micro_batches, mean, sync=lambda place, last: True)

# accumulated_with_count_on_some_ranks
# the ranks' collectives do not match
rows = torch.tensor(10)
if dist.get_rank() > 0:
    dist.all_reduce(rows)
backward(replica, micro_batches, mse_loss)

# accumulated_with_the_forward_pass_outside
# sends gradients 3 times for 3 micro-batches | DDP decides in the forward pass
rows = rows_of_all(micro_batches) / dist.get_world_size()
for place, (inputs, targets) in enumerate(micro_batches):
    loss = mse_loss(replica(inputs), targets, reduction="sum") / rows
    with nullcontext() if place == len(micro_batches) - 1 else replica.no_sync():
        loss.backward()

# accumulated_with_zeroed_gradients
# only the last micro-batch is in the gradient
for place, (inputs, targets) in enumerate(micro_batches):
    replica.zero_grad()
    with nullcontext() if place == len(micro_batches) - 1 else replica.no_sync():
        mse_loss(replica(inputs), targets).backward()

# accumulated_without_any_sync
# the ranks hold different gradients
rows = rows_of_all(micro_batches) / dist.get_world_size()
mean = lambda outputs, targets: mse_loss(outputs, targets, reduction="sum") / rows
backward(replica, micro_batches, mean, sync=lambda place, last: False)

# accumulated_without_the_last_on_rank_0
# hangs | rank 0 has returned | rank 1 is at line 55: loss_of
rows = rows_of_all(micro_batches)
if dist.get_rank() == 0:
    micro_batches = [(inputs, targets) for inputs, targets in micro_batches if len(inputs) != 2]
backward(replica, micro_batches, mse_loss, sync=lambda place, last: place == 2)
""",
}
