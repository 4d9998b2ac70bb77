"""Wrong solutions of data parallelism; ``wrong_solutions.py`` says how they are written."""

HEAD = """import os
import sys
import torch
import torch.distributed as dist
from torch import nn
"""
SIGNATURES = {
    "broadcast_parameters": "def broadcast_parameters(model: nn.Module) -> None:",
    "average_gradients": "def average_gradients(model: nn.Module) -> None:",
    "global_accuracy": "def global_accuracy(correct: int, total: int) -> float:",
}
WRONG = {
    "broadcast_parameters": """
# broadcast_averages
# averages the ranks' weights
for parameter in model.parameters():
    dist.all_reduce(parameter.detach())
    parameter.detach().div_(dist.get_world_size())
for buffer in model.buffers():
    dist.broadcast(buffer, src=0)

# broadcast_by_state_dict
# norm.table is not broadcast | state_dict()
states = [model.state_dict()]
dist.broadcast_object_list(states, src=0)
model.load_state_dict(states[0])

# broadcast_divides_whole_numbers
# raised RuntimeError: result type Float can't be cast | Buffers may be whole numbers
for tensor in [*model.parameters(), *model.buffers()]:
    dist.all_reduce(tensor.detach())
    tensor.detach().div_(dist.get_world_size())

# broadcast_each_from_itself
# hangs | rank 0 is at line 9 | rank 1 is at line 9
for tensor in [*model.parameters(), *model.buffers()]:
    dist.broadcast(tensor.detach(), src=dist.get_rank())

# broadcast_forgets_buffers
# forgot the buffers
for parameter in model.parameters():
    dist.broadcast(parameter.detach(), src=0)

# broadcast_freezes_weights
# requires_grad of layer.weight has changed
for tensor in [*model.parameters(), *model.buffers()]:
    dist.broadcast(tensor.requires_grad_(False), src=0)

# broadcast_from_the_last_rank
# broadcasts from rank 1, not from rank 0
for tensor in [*model.parameters(), *model.buffers()]:
    dist.broadcast(tensor.detach(), src=dist.get_world_size() - 1)

# broadcast_is_missing
# there is no function broadcast_parameters in broadcast_is | arguments of learn/lessons/data_parallel.py
def broadcast(model: nn.Module) -> None:
    for parameter in model.parameters():
        dist.broadcast(parameter.detach(), src=0)

# broadcast_keeps_own_weights
# each rank keeps its own weights
for parameter in model.parameters():
    dist.broadcast(parameter.detach().clone(), src=0)

# broadcast_makes_new_parameters
# layer.weight is a new object
for module in model.modules():
    for name, parameter in module.named_parameters(recurse=False):
        received = parameter.detach().clone()
        dist.broadcast(received, src=0)
        setattr(module, name, nn.Parameter(received, requires_grad=parameter.requires_grad))
for buffer in model.buffers():
    dist.broadcast(buffer, src=0)

# broadcast_makes_new_parameters_on_other_ranks
# layer.weight is a new object
for module in model.modules():
    for name, parameter in module.named_parameters(recurse=False):
        dist.broadcast(parameter.detach(), src=0)
        if dist.get_rank() > 0:
            setattr(module, name, nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad))
for buffer in model.buffers():
    dist.broadcast(buffer, src=0)

# broadcast_not_waited_for
# wait()
for tensor in [*model.parameters(), *model.buffers()]:
    dist.broadcast(tensor.detach(), src=0, async_op=True)

# broadcast_on_rank_0_alone
# hangs | rank 0 is at line 10: dist.broadcast | rank 1 has returned
if dist.get_rank() == 0:
    for tensor in [*model.parameters(), *model.buffers()]:
        dist.broadcast(tensor.detach(), src=0)

# broadcast_skips_frozen_weights
# only part of the model is broadcast, frozen.weight is not
for parameter in model.parameters():
    if parameter.requires_grad:
        dist.broadcast(parameter.detach(), src=0)
for buffer in model.buffers():
    dist.broadcast(buffer, src=0)

# broadcast_thaws_frozen_weights
# requires_grad of frozen.weight has changed
for tensor in [*model.parameters(), *model.buffers()]:
    dist.broadcast(tensor.detach(), src=0)
for parameter in model.parameters():
    parameter.requires_grad_(True)

# broadcast_under_the_eyes_of_autograd
# leaf Variable that requires grad | torch.no_grad()
for tensor in [*model.parameters(), *model.buffers()]:
    received = tensor.detach().clone()
    dist.broadcast(received, src=0)
    tensor.copy_(received)

# broadcast_weights_from_the_last_rank
# broadcasts from rank 1, not from rank 0
for parameter in model.parameters():
    dist.broadcast(parameter.detach(), src=dist.get_world_size() - 1)
""",
    "average_gradients": """
# gradients_broadcast
# every rank has rank 0's gradients
for parameter in model.parameters():
    if parameter.grad is not None:
        dist.broadcast(parameter.grad, src=0)

# gradients_by_the_largest
# the gradients are not the mean over the ranks
for parameter in model.parameters():
    if parameter.grad is not None:
        dist.all_reduce(parameter.grad, op=dist.ReduceOp.MAX)

# gradients_divided_but_not_summed
# divides, but does not sum over the ranks
for parameter in model.parameters():
    if parameter.grad is not None:
        parameter.grad /= dist.get_world_size()

# gradients_divided_by_two
# divides by 2, but there are 3 ranks
for parameter in model.parameters():
    if parameter.grad is not None:
        dist.all_reduce(parameter.grad)
        parameter.grad /= 2

# gradients_divided_twice
# divided twice
for parameter in model.parameters():
    if parameter.grad is not None:
        parameter.grad /= dist.get_world_size()
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()

# gradients_divided_where_there_are_none
# NoneType | took no part in the loss
for parameter in model.parameters():
    if parameter.requires_grad:
        parameter.grad /= dist.get_world_size()
        dist.all_reduce(parameter.grad)

# gradients_dropped
# a gradient is gone: .grad is None
for parameter in model.parameters():
    if parameter.grad is not None:
        dist.all_reduce(parameter.grad)
        parameter.grad = None

# gradients_end_the_process
# the process of rank 0 ended during the call
for parameter in model.parameters():
    if parameter.grad is not None and dist.get_rank() == 0:
        os._exit(0)
    dist.barrier()

# gradients_in_an_endless_loop
# hangs | rank 0 is at line 8: while any | No rank waits for another one here
while any(parameter.requires_grad for parameter in model.parameters()):
    pass

# gradients_invented
# frozen.weight took no part in the loss and has a gradient now
for parameter in model.parameters():
    gradient = torch.ones_like(parameter) if parameter.grad is None else parameter.grad
    dist.all_reduce(gradient)
    parameter.grad = gradient / dist.get_world_size()

# gradients_leave
# raised SystemExit: done | line 8: sys.exit("done")
sys.exit("done")

# gradients_not_divided
# forgot to divide
for parameter in model.parameters():
    if parameter.grad is not None:
        dist.all_reduce(parameter.grad)

# gradients_not_waited_for
# a collective called with async_op=True is done only after wait()
for parameter in model.parameters():
    if parameter.grad is not None:
        parameter.grad /= dist.get_world_size()
        dist.all_reduce(parameter.grad, async_op=True)

# gradients_of_all_parameters
# NoneType | took no part in the loss
for parameter in model.parameters():
    dist.all_reduce(parameter.grad)
    parameter.grad /= dist.get_world_size()

# gradients_of_matrices_only
# only some gradients are averaged, layer.bias, norm.weight, norm.bias are not
for parameter in model.parameters():
    if parameter.grad is not None and parameter.dim() > 1:
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()

# gradients_reduced_to_rank_0
# only rank 0 has the mean
for parameter in model.parameters():
    if parameter.grad is not None:
        dist.reduce(parameter.grad, dst=0)
        if dist.get_rank() == 0:
            parameter.grad /= dist.get_world_size()

# gradients_stepped
# changes the weights themselves (layer.weight)
for parameter in model.parameters():
    if parameter.grad is not None:
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()
        parameter.detach().sub_(0.1 * parameter.grad)

# gradients_summed_in_a_copy
# each rank still has its own gradients
for parameter in model.parameters():
    if parameter.grad is not None:
        mean = parameter.grad / dist.get_world_size()
        dist.all_reduce(mean)

# gradients_with_a_slip_of_the_pen
# raised NameError: name 'paramter' is not defined | line 9: dist.all_reduce(paramter.grad)
for parameter in model.parameters():
    dist.all_reduce(paramter.grad)  # noqa: F821
    parameter.grad /= dist.get_world_size()

# gradients_with_other_arguments
# it takes (model, num_ranks), but is called as average_gradients(model)
def average_gradients(model: nn.Module, num_ranks: int) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= num_ranks

# gradients_without_the_first_on_rank_0
# the ranks' collectives do not match | line 10: dist.all_reduce(parameter.grad)
for name, parameter in model.named_parameters():
    if parameter.grad is not None and (name != "layer.weight" or dist.get_rank() > 0):
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()

# gradients_without_the_last_on_rank_0
# hangs | rank 0 has returned | rank 1 is at line 10: dist.all_reduce(parameter.grad)
for name, parameter in model.named_parameters():
    if parameter.grad is not None and (name != "norm.bias" or dist.get_rank() > 0):
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()
""",
    "global_accuracy": """
# accuracy_added_up
# adds up the ranks' accuracies
accuracy = torch.tensor(correct / total)
dist.all_reduce(accuracy)
return accuracy.item()

# accuracy_as_a_tensor
# returns Tensor, not float
counts = torch.tensor([correct, total])
dist.all_reduce(counts)
return counts[0] / counts[1]

# accuracy_averaged
# averages the ranks' accuracies
accuracy = torch.tensor(correct / total)
dist.all_reduce(accuracy)
return accuracy.item() / dist.get_world_size()

# accuracy_counted_by_rank_0_alone
# hangs | rank 1 has returned
counts = torch.tensor([correct, total])
if dist.get_rank() == 0:
    dist.all_reduce(counts)
return counts[0].item() / counts[1].item()

# accuracy_divided_by_the_ranks
# divides by the number of ranks too
counts = torch.tensor([correct, total])
dist.all_reduce(counts)
return (counts[0] / counts[1] / dist.get_world_size()).item()

# accuracy_in_half_precision
# the accuracy is wrong | 23000 of 30000
counts = torch.tensor([correct, total], dtype=torch.float16)
dist.all_reduce(counts)
return (counts[0].double() / counts[1].double()).item()

# accuracy_in_per_cent
# returns a percentage
counts = torch.tensor([correct, total])
dist.all_reduce(counts)
return 100 * counts[0].item() / counts[1].item()

# accuracy_not_returned
# returns NoneType, not a number | rank 1 printed: 0.7666
counts = torch.tensor([correct, total])
dist.all_reduce(counts)
print(counts[0].item() / counts[1].item())

# accuracy_of_own_rows
# counts only its own rank's rows
return correct / total

# accuracy_of_plain_numbers
# raised TypeError | A collective takes a tensor
dist.all_reduce(correct)
dist.all_reduce(total)
return correct / total

# accuracy_of_whole_numbers
# the accuracy is wrong
counts = torch.tensor([correct, total])
dist.all_reduce(counts)
return float(counts[0].item() // counts[1].item())

# accuracy_on_rank_0
# only rank 0 has the right answer
counts = torch.tensor([correct, total])
dist.reduce(counts, dst=0)
return counts[0].item() / counts[1].item() if dist.get_rank() == 0 else 0.0

# accuracy_sums_only_correct
# sums correct over the ranks, but not total
count = torch.tensor(correct)
dist.all_reduce(count)
return count.item() / total

# accuracy_sums_only_total
# sums total over the ranks, but not correct
count = torch.tensor(total)
dist.all_reduce(count)
return correct / count.item()
""",
}
