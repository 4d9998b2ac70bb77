"""Wrong solutions of tensor parallelism; ``wrong_solutions.py`` says how they are written."""

HEAD = """import torch
import torch.distributed as dist
from torch.nn.functional import linear

class Both(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, forward, backward):
        ctx.function = backward
        return forward(x)

    @staticmethod
    def backward(ctx, gradient):
        return ctx.function(gradient), None, None

def same(x):
    return x.view_as(x)

def total(x):
    x = x.clone()
    dist.all_reduce(x)
    return x

def mean(x):
    return total(x) / dist.get_world_size()

def broadcast(x):
    x = x.clone()
    dist.broadcast(x, src=0)
    return x

def on_rank_0(x):
    reduced = x.clone()
    dist.reduce(reduced, dst=0)
    return reduced if dist.get_rank() == 0 else x.clone()

def in_place(x):
    dist.all_reduce(x)
    return x.clone()

def begin(x):
    x = x.clone()
    dist.all_reduce(x, async_op=True)
    return x.clone()

def f(x):
    return Both.apply(x, same, total)

def g(x):
    return Both.apply(x, total, same)

def part(tensor, dim=0, rank=None):
    return tensor.chunk(dist.get_world_size(), dim)[dist.get_rank() if rank is None else rank]
"""
SIGNATURES = {
    "copy_to_ranks": "def copy_to_ranks(x):",
    "sum_over_ranks": "def sum_over_ranks(x):",
    "parallel_feed_forward": "def parallel_feed_forward(x, first, second):",
}
WRONG = {
    "copy_to_ranks": """
# copy_without_a_sum
# the backward pass does not sum over the ranks
return x.view_as(x)

# copy_as_g
# sums x in the forward pass
return g(x)

# copy_summed_in_both_directions
# sums x in the forward pass
return Both.apply(x, total, total)

# copy_averaged
# averages the gradients
return Both.apply(x, same, mean)

# copy_summed_twice
# sums the gradients twice
return Both.apply(x, same, lambda gradient: total(total(gradient)))

# copy_broadcast
# every rank has rank 0's gradient
return Both.apply(x, same, broadcast)

# copy_reduced_to_rank_0
# only rank 0 has the right gradient
return Both.apply(x, same, on_rank_0)

# copy_in_place
# overwrites the arriving gradient
return Both.apply(x, same, in_place)

# copy_not_waited_for
# done only after wait()
return Both.apply(x, same, begin)

# copy_detached
# x gets no gradient
return x.detach()

# copy_not_returned
# returns NoneType, not a tensor
y = Both.apply(x, same, total)

# copy_on_rank_0_alone
# hangs | rank 0 is at line 20: dist.all_reduce(x) | rank 1 has returned
return f(x) if dist.get_rank() == 0 else x
""",
    "sum_over_ranks": """
# sum_not_summed
# the result is this rank's x, not the sum
return x.view_as(x)

# sum_summed_in_both_directions
# the backward pass sums over the ranks too
return Both.apply(x, total, total)

# sum_of_torch_distributed_nn
# the backward pass sums over the ranks too
import torch.distributed.nn.functional
return torch.distributed.nn.functional.all_reduce(x)

# sum_averaged
# averages instead of summing
return Both.apply(x, mean, same)

# sum_divided_backward
# the backward pass divides by the number of ranks
return Both.apply(x, total, lambda gradient: gradient / dist.get_world_size())

# sum_gathered
# the result has the shape
parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
dist.all_gather(parts, x.detach())
return torch.cat(parts)

# sum_on_rank_0
# only rank 0 has the sum
return Both.apply(x, on_rank_0, same)

# sum_in_place
# overwrites x
return Both.apply(x, in_place, same)

# sum_detached
# x gets no gradient
return total(x.detach())

# sum_under_no_grad
# x gets no gradient
with torch.no_grad():
    return total(x)

# sum_not_waited_for
# done only after wait()
return Both.apply(x, begin, same)

# sum_without_ctx_in_backward
# raised TypeError | takes 1 positional argument but 2 were given
class Slip(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return total(x)
    @staticmethod
    def backward(gradient):
        return gradient
return Slip.apply(x)

# sum_on_some_ranks
# hangs | rank 0 has returned | rank 1 is at line 20: dist.all_reduce(x)
return x if dist.get_rank() == 0 else g(x)
""",
    "parallel_feed_forward": """
# feed_bias_on_every_rank
# adds the second bias on every rank
hidden = torch.relu(linear(f(x), part(first.weight), part(first.bias)))
return g(linear(hidden, part(second.weight, 1), second.bias))

# feed_bias_divided
# the gradient of second.bias is 1/
hidden = torch.relu(linear(f(x), part(first.weight), part(first.bias)))
return g(linear(hidden, part(second.weight, 1), second.bias / dist.get_world_size()))

# feed_without_the_second_bias
# forgets the second bias
return g(linear(torch.relu(linear(f(x), part(first.weight), part(first.bias))), part(second.weight, 1)))

# feed_without_the_first_bias
# forgets the first bias
return g(linear(torch.relu(linear(f(x), part(first.weight))), part(second.weight, 1))) + second.bias

# feed_without_f
# the gradient of x is incomplete
hidden = torch.relu(linear(x, part(first.weight), part(first.bias)))
return g(linear(hidden, part(second.weight, 1))) + second.bias

# feed_with_a_sum_in_both_directions
# times too large | Which collectives run in the backward pass
hidden = torch.relu(linear(f(x), part(first.weight), part(first.bias)))
return Both.apply(linear(hidden, part(second.weight, 1)), total, total) + second.bias

# feed_without_g
# each rank returns only its own part
hidden = torch.relu(linear(f(x), part(first.weight), part(first.bias)))
return linear(hidden, part(second.weight, 1)) + second.bias

# feed_averaged
# averages the parts
hidden = torch.relu(linear(f(x), part(first.weight), part(first.bias)))
return Both.apply(linear(hidden, part(second.weight, 1)), mean, same) + second.bias

# feed_of_rank_0s_part
# every rank computes rank 0's part
hidden = torch.relu(linear(f(x), part(first.weight, 0, 0), part(first.bias, 0, 0)))
return g(linear(hidden, part(second.weight, 1, 0))) + second.bias

# feed_of_crossed_parts
# the parts of the two layers do not fit together
hidden = torch.relu(linear(f(x), part(first.weight), part(first.bias)))
return g(linear(hidden, part(second.weight, 1, dist.get_world_size() - 1 - dist.get_rank()))) + second.bias

# feed_cut_along_the_inputs
# applies the activation to parts of a sum
hidden = torch.relu(linear(part(f(x), 1), part(first.weight, 1), first.bias))
return g(linear(hidden, second.weight)) + second.bias

# feed_without_activation
# forgets the activation
hidden = linear(f(x), part(first.weight), part(first.bias))
return g(linear(hidden, part(second.weight, 1))) + second.bias

# feed_activated_at_the_end
# applies the activation to the output
hidden = linear(f(x), part(first.weight), part(first.bias))
return torch.relu(g(linear(hidden, part(second.weight, 1))) + second.bias)

# feed_of_whole_layers
# every rank computes with all of both layers
return second(torch.relu(first(x)))

# feed_of_a_gathered_hidden_layer
# every rank computes with all of second.weight
hidden = torch.relu(linear(f(x), part(first.weight), part(first.bias)))
padded = [torch.zeros_like(hidden) for _ in range(dist.get_world_size())]
padded[dist.get_rank()] = hidden
return linear(Both.apply(torch.cat(padded, 1), total, same), second.weight, second.bias)

# feed_sums_whole_outputs
# sums whole outputs
return g(linear(torch.relu(first(f(x))), second.weight)) + second.bias

# feed_with_copied_weights
# first.weight gets no gradient
hidden = torch.relu(linear(f(x), part(first.weight.data), part(first.bias)))
return g(linear(hidden, part(second.weight, 1))) + second.bias

# feed_with_the_wrong_dimension
# raised RuntimeError: mat1 and mat2 shapes | line 56: return
hidden = torch.relu(linear(f(x), part(first.weight), part(first.bias)))
return g(linear(hidden, part(second.weight, 0))) + second.bias

# feed_summed_on_rank_0_alone
# hangs | rank 0 is at line 20: dist.all_reduce(x)
hidden = torch.relu(linear(x, part(first.weight), part(first.bias)))
output = linear(hidden, part(second.weight, 1))
return (g(output) if dist.get_rank() == 0 else output) + second.bias
""",
}
