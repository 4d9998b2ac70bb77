"""Wrong solutions of ZeRO-1; ``wrong_solutions.py`` says how they are written."""

HEAD = """import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

def flatten(tensors):
    flat = torch.cat([tensor.detach().flatten() for tensor in tensors])
    return F.pad(flat, (0, -len(flat) % dist.get_world_size()))

def share_of(flat):
    return flat.chunk(dist.get_world_size())[dist.get_rank()].clone()

def mean_gradient(parameters):
    flat = flatten([parameter.grad for parameter in parameters])
    dist.all_reduce(flat)
    return flat / dist.get_world_size()

def gather(share):
    parts = [torch.empty_like(share) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, share.detach())
    return torch.cat(parts)

def write(parameters, flat):
    sizes = [parameter.numel() for parameter in parameters]
    for parameter, values in zip(parameters, flat[: sum(sizes)].split(sizes)):
        parameter.detach().copy_(values.view_as(parameter))
"""
SIGNATURES = {
    "create_sharded_adam": "def create_sharded_adam(parameters, learning_rate):",
    "reduce_scatter_gradients": "def reduce_scatter_gradients(parameters):",
    "zero1_step": "def zero1_step(parameters, optimizer):",
}
WRONG = {
    "create_sharded_adam": """
# adam_of_all_weights
# the optimizer of each rank holds all weights
return torch.optim.Adam(parameters, lr=learning_rate)

# adam_of_a_flat_copy_of_all_weights
# the optimizer of each rank holds all weights
return torch.optim.Adam([nn.Parameter(flatten(parameters))], lr=learning_rate)

# adam_of_a_view
# the share is a view of all weights | keeps
share = flatten(parameters).chunk(dist.get_world_size())[dist.get_rank()]
return torch.optim.Adam([nn.Parameter(share)], lr=learning_rate)

# adam_of_whole_parameters
# tensors, not one share
return torch.optim.Adam(parameters[dist.get_rank() :: dist.get_world_size()], lr=learning_rate)

# adam_of_rank_0s_share
# every rank takes rank 0's share
share = flatten(parameters).chunk(dist.get_world_size())[0].clone()
return torch.optim.Adam([nn.Parameter(share)], lr=learning_rate)

# adam_of_shares_in_reverse
# the shares are assigned in reverse order
share = flatten(parameters).chunk(dist.get_world_size())[-1 - dist.get_rank()].clone()
return torch.optim.Adam([nn.Parameter(share)], lr=learning_rate)

# adam_without_padding
# the shares have different sizes
flat = torch.cat([parameter.detach().flatten() for parameter in parameters])
return torch.optim.Adam([nn.Parameter(share_of(flat))], lr=learning_rate)

# adam_without_the_rest
# of 23 weights are in no share
flat = torch.cat([parameter.detach().flatten() for parameter in parameters])
size = len(flat) // dist.get_world_size()
share = flat[dist.get_rank() * size : (dist.get_rank() + 1) * size].clone()
return torch.optim.Adam([nn.Parameter(share)], lr=learning_rate)

# adam_padded_at_the_front
# pads at the front
flat = torch.cat([parameter.detach().flatten() for parameter in parameters])
flat = F.pad(flat, (-len(flat) % dist.get_world_size(), 0))
return torch.optim.Adam([nn.Parameter(share_of(flat))], lr=learning_rate)

# adam_of_every_nth_weight
# takes every | th weight
share = flatten(parameters)[dist.get_rank() :: dist.get_world_size()].clone()
return torch.optim.Adam([nn.Parameter(share)], lr=learning_rate)

# adam_with_its_own_learning_rate
# the learning rate is 0.001, not 0.25
return torch.optim.Adam([nn.Parameter(share_of(flatten(parameters)))])

# adam_with_weight_decay
# weight_decay is not its default
return torch.optim.Adam([nn.Parameter(share_of(flatten(parameters)))], lr=learning_rate, weight_decay=0.1)

# adam_replaced_by_sgd
# returns SGD, not a torch.optim.Adam
return torch.optim.SGD([nn.Parameter(share_of(flatten(parameters)))], lr=learning_rate)
""",
    "reduce_scatter_gradients": """
# reduced_to_a_sum
# sums the gradients instead of averaging them
return share_of(mean_gradient(parameters) * dist.get_world_size())

# reduced_and_divided_twice
# divides twice
return share_of(mean_gradient(parameters) / dist.get_world_size())

# reduced_from_own_rows
# takes only its own gradients
return share_of(flatten([parameter.grad for parameter in parameters]))

# reduced_without_a_sum
# divides, but does not sum over the ranks
return share_of(flatten([parameter.grad for parameter in parameters])) / dist.get_world_size()

# reduced_without_waiting
# done only after wait()
flat = flatten([parameter.grad for parameter in parameters]) / dist.get_world_size()
dist.all_reduce(flat, async_op=True)
return share_of(flat)

# reduced_to_rank_0s_share
# every rank takes the gradient of rank 0's share
return mean_gradient(parameters).chunk(dist.get_world_size())[0].clone()

# reduced_to_another_share
# takes the gradient of another rank's share
return mean_gradient(parameters).chunk(dist.get_world_size())[-1 - dist.get_rank()].clone()

# reduced_whole
# returns the whole gradient
return mean_gradient(parameters)

# reduced_without_padding
# the padding is missing
flat = torch.cat([parameter.grad.flatten() for parameter in parameters])
dist.all_reduce(flat)
return share_of(flat / dist.get_world_size())

# reduced_to_rank_0
# only rank 0 has the right gradient
flat = flatten([parameter.grad for parameter in parameters])
dist.reduce(flat, dst=0)
return share_of(flat) / dist.get_world_size() if dist.get_rank() == 0 else share_of(flat)

# reduced_and_forgotten
# returns NoneType, not a tensor
share = share_of(mean_gradient(parameters))

# reduced_on_rank_0_alone
# hangs | rank 0 is at line 15: dist.all_reduce(flat) | rank 1 has returned
if dist.get_rank() == 0:
    return share_of(mean_gradient(parameters))
return torch.zeros(1)
""",
    "zero1_step": """
# step_with_a_sum
# the share's gradient is wrong: sums the gradients
(share,) = optimizer.param_groups[0]["params"]
share.grad = share_of(mean_gradient(parameters) * dist.get_world_size())
optimizer.step()
write(parameters, gather(share))

# step_with_own_gradients
# the share's gradient is wrong: takes only its own
(share,) = optimizer.param_groups[0]["params"]
share.grad = share_of(flatten([parameter.grad for parameter in parameters]))
optimizer.step()
write(parameters, gather(share))

# step_with_another_share
# the share's gradient is wrong: every rank takes the gradient of rank 0's share
(share,) = optimizer.param_groups[0]["params"]
share.grad = mean_gradient(parameters).chunk(dist.get_world_size())[0]
optimizer.step()
write(parameters, gather(share))

# step_with_old_gradients
# adds the new gradient to the old one
(share,) = optimizer.param_groups[0]["params"]
gradient = share_of(mean_gradient(parameters))
share.grad = gradient if share.grad is None else share.grad + gradient
optimizer.step()
write(parameters, gather(share))

# step_without_a_gradient
# the share has no gradient
(share,) = optimizer.param_groups[0]["params"]
optimizer.step()
write(parameters, gather(share))

# step_twice
# stepped 2 times, not once
(share,) = optimizer.param_groups[0]["params"]
for _ in range(2):
    share.grad = share_of(mean_gradient(parameters))
    optimizer.step()
write(parameters, gather(share))

# step_by_a_new_adam
# stepped 0 times, not once
(share,) = optimizer.param_groups[0]["params"]
share.grad = share_of(mean_gradient(parameters))
torch.optim.Adam([share], lr=0.25).step()
write(parameters, gather(share))

# step_of_all_weights
# the optimizer keeps moments of
(share,) = optimizer.param_groups[0]["params"]
if len(optimizer.param_groups) == 1:
    optimizer.add_param_group({"params": parameters})
share.grad = share_of(mean_gradient(parameters))
optimizer.step()
write(parameters, gather(share))

# step_of_the_share_alone
# the parameters keep their old weights
(share,) = optimizer.param_groups[0]["params"]
share.grad = share_of(mean_gradient(parameters))
optimizer.step()

# step_into_new_parameters
# the parameters keep their old weights
(share,) = optimizer.param_groups[0]["params"]
share.grad = share_of(mean_gradient(parameters))
optimizer.step()
flat = gather(share)
for i, parameter in enumerate(parameters):
    parameters[i] = nn.Parameter(flat[: parameter.numel()].view_as(parameter))
    flat = flat[parameter.numel() :]

# step_not_gathered
# each rank has new weights for its own share only
(share,) = optimizer.param_groups[0]["params"]
share.grad = share_of(mean_gradient(parameters))
optimizer.step()
flat = flatten(parameters)
flat.chunk(dist.get_world_size())[dist.get_rank()].copy_(share.detach())
write(parameters, flat)

# step_after_gathering
# the weights are one step behind
(share,) = optimizer.param_groups[0]["params"]
share.grad = share_of(mean_gradient(parameters))
write(parameters, gather(share))
optimizer.step()

# step_with_own_share_everywhere
# each rank writes its own share everywhere
(share,) = optimizer.param_groups[0]["params"]
share.grad = share_of(mean_gradient(parameters))
optimizer.step()
write(parameters, share.detach().repeat(dist.get_world_size()))

# step_joined_in_reverse
# the shares are put together in reverse order
(share,) = optimizer.param_groups[0]["params"]
share.grad = share_of(mean_gradient(parameters))
optimizer.step()
write(parameters, torch.cat(gather(share).chunk(dist.get_world_size())[::-1]))

# step_written_in_another_order
# the new weights are in the wrong places
(share,) = optimizer.param_groups[0]["params"]
share.grad = share_of(mean_gradient(parameters))
optimizer.step()
write(parameters[::-1], gather(share))

# step_gathered_on_rank_0
# only rank 0 has the new weights
(share,) = optimizer.param_groups[0]["params"]
share.grad = share_of(mean_gradient(parameters))
optimizer.step()
parts = [torch.empty_like(share) for _ in range(dist.get_world_size())] if dist.get_rank() == 0 else None
dist.gather(share.detach(), parts, dst=0)
if parts:
    write(parameters, torch.cat(parts))

# step_written_into_parameters_under_autograd
# leaf Variable that requires grad | torch.no_grad()
(share,) = optimizer.param_groups[0]["params"]
share.grad = share_of(mean_gradient(parameters))
optimizer.step()
parameters[0].copy_(gather(share)[:12].view(4, 3))

# step_on_rank_0_alone
# hangs | rank 0 is at line 20: dist.all_gather(parts, share.detach()) | rank 1 is at line 15
(share,) = optimizer.param_groups[0]["params"]
share.grad = share_of(mean_gradient(parameters))
optimizer.step()
if dist.get_rank() == 0:
    write(parameters, gather(share))
""",
}
