"""Wrong solutions of the pipeline; ``wrong_solutions.py`` says how they are written."""

HEAD = """import torch
import torch.distributed as dist
import torch.nn.functional as F

class Stage:
    def __init__(self, module, inputs, targets):
        self.module, self.inputs, self.targets = module, inputs, targets
        self.rank, self.last = dist.get_rank(), dist.get_world_size() - 1
        self.kept, self.sends = {}, []

    def run(self, order):
        for kind, index in order:
            self.forward(index) if kind == "F" else self.backward(index)
        for send in self.sends:
            send.wait()

    def forward(self, index):
        x = self.receive(index)
        y = self.module(x)
        if self.rank == self.last:
            y = self.loss(y, index)
        self.kept[index] = x, y
        if self.rank < self.last:
            self.send(y.detach(), self.rank + 1)

    def receive(self, index):
        x = self.inputs[index]
        if self.rank > 0:
            x = torch.empty_like(x)
            dist.recv(x, self.rank - 1)
            x.requires_grad_()
        return x

    def loss(self, y, index):
        return F.mse_loss(y, self.targets[index]) / len(self.targets)

    def backward(self, index):
        x, y = self.kept.pop(index)
        gradient = None
        if self.rank < self.last:
            gradient = torch.empty_like(y)
            dist.recv(gradient, self.rank + 1)
        y.backward(gradient)
        if self.rank > 0:
            self.send(x.grad, self.rank - 1)

    def send(self, tensor, to):
        self.sends.append(dist.isend(tensor, to))
"""
SIGNATURES = {
    "one_forward_one_backward": "def one_forward_one_backward(stage, num_stages, num_micro_batches):",
    "run_stage": "def run_stage(module, inputs, targets, order):",
}
# Each begins with these lists, and the phases of 1F1B.
_LISTS = """forwards, backwards = ([(kind, i) for i in range(num_micro_batches)] for kind in "FB")
def phases(num_first):
    num_first = min(num_first, num_micro_batches)
    pairs = [action for pair in zip(forwards[num_first:], backwards) for action in pair]
    return forwards[:num_first] + pairs + backwards[num_micro_batches - num_first :]
"""
WRONG = {
    "one_forward_one_backward": f"""
# order_of_gpipe
# all forward passes come first: stage 0 keeps the activations of 4 micro-batches
{_LISTS}return forwards + backwards

# order_without_warm_up
# the stages wait | of the time, not
{_LISTS}return phases(0)

# order_with_one_forward_too_many
# stage 0 keeps the activations of
{_LISTS}return phases(num_stages - stage)

# order_with_the_warm_up_of_the_first_stage_everywhere
# stage 1 keeps the activations of
{_LISTS}return phases(num_stages - 1)

# order_with_the_warm_up_of_the_other_end
# the stages wait for each other forever | stage 0 cannot begin B0: stage 1 has not done it
{_LISTS}return phases(stage)

# order_that_begins_backward
# B0 comes before F0 on stage 0
{_LISTS}return [action for pair in zip(backwards, forwards) for action in pair]

# order_of_more_forward_passes_than_micro_batches
# B0 is missing on stage 1 of 5 with 2 micro-batches
{_LISTS}warm_up = num_stages - 1 - stage
pairs = [action for pair in zip(forwards[warm_up:], backwards) for action in pair]
return forwards[:warm_up] + pairs + backwards[num_micro_batches - warm_up :]

# order_without_the_last_backward_passes
# is missing on stage 0
{_LISTS}return phases(num_stages - 1 - stage)[: 2 * num_micro_batches - (num_stages - 1 - stage)]

# order_for_enough_micro_batches_only
# ('F', 1) is not an action of stage 0 | with 1 micro-batch
{_LISTS}num_first = num_stages - stage
pairs = [action for i in range(num_first, num_micro_batches) for action in (("B", i - num_first), ("F", i))]
return [("F", i) for i in range(num_first)] + pairs + backwards[max(0, num_micro_batches - num_first) :]

# order_counted_from_one
# ('F', 4) is not an action of stage 0
{_LISTS}return [(kind, i + 1) for kind, i in phases(num_stages - 1 - stage)]

# order_in_words
# 'F0' is not an action
{_LISTS}return [f"{{kind}}{{i}}" for kind, i in phases(num_stages - 1 - stage)]

# order_that_repeats_the_warm_up
# comes twice on stage 0
{_LISTS}return forwards[: num_stages - 1 - stage] + phases(0)

# order_with_the_last_micro_batch_first_on_the_last_stage
# the stages take the micro-batches in different orders
{_LISTS}if stage == num_stages - 1:
    return [(kind, num_micro_batches - 1 - i) for kind, i in phases(0)]
return phases(num_stages - 1 - stage)

# order_as_a_generator
# not a list
{_LISTS}return (action for action in phases(num_stages - 1 - stage))
""",
    "run_stage": """
# run_with_blocking_sends
# hangs | rank 0 is at line 53: dist.send(tensor, to) | rank 1 is at line 53: dist.send(tensor, to)
class Blocking(Stage):
    def send(self, tensor, to):
        dist.send(tensor, to)
Blocking(module, inputs, targets).run(order)

# run_with_sends_that_are_waited_for_at_once
# hangs | rank 0 is at line 53: dist.isend(tensor, to).wait()
class Waiting(Stage):
    def send(self, tensor, to):
        dist.isend(tensor, to).wait()
Waiting(module, inputs, targets).run(order)

# run_with_a_loss_that_is_not_divided
# the loss is not divided by the number of micro-batches
class Undivided(Stage):
    def loss(self, y, index):
        return F.mse_loss(y, self.targets[index])
Undivided(module, inputs, targets).run(order)

# run_with_a_loss_that_is_divided_twice
# divides by the number of micro-batches twice
class Twice(Stage):
    def loss(self, y, index):
        return super().loss(y, index) / len(self.targets)
Twice(module, inputs, targets).run(order)

# run_with_zeroed_gradients
# has the gradients of the last micro-batch only
class Zeroed(Stage):
    def backward(self, index):
        self.module.zero_grad()
        super().backward(index)
Zeroed(module, inputs, targets).run(order)

# run_without_backward
# stage 0 has no gradients
Stage(module, inputs, targets).run([action for action in order if action[0] == "F"])

# run_without_requires_grad
# NoneType | received tensors do not
class Unwatched(Stage):
    def receive(self, index):
        return super().receive(index).detach()
Unwatched(module, inputs, targets).run(order)

# run_in_the_order_of_gpipe
# runs in another order than it was given | stage 0 ran: | F0 F1 F2 F3 F4 F5
Stage(module, inputs, targets).run(sorted(order, key=lambda action: action[0], reverse=True))

# run_that_never_frees
# the activations are never freed
class Keeping(Stage):
    def backward(self, index):
        kept = self.kept[index]
        super().backward(index)
        self.kept[index] = kept
Keeping(module, inputs, targets).run(order)

# run_that_keeps_what_it_has_sent
# the activations are never freed | The handle of an isend
Stage(module, inputs, targets).run(order)

# run_with_one_buffer
# a stage before the last has wrong gradients
class OneBuffer(Stage):
    buffer = None
    def receive(self, index):
        x = super().receive(index)
        if self.buffer is None:
            self.buffer = x
        if self.rank < self.last:
            return x
        self.buffer.detach().copy_(x.detach())
        return self.buffer
OneBuffer(module, inputs, targets).run(order)

# run_with_the_inputs_on_every_stage
# the last stage computes with the batch's inputs
class Inputs(Stage):
    def receive(self, index):
        x = super().receive(index).detach().clone()
        return x.copy_(self.inputs[index]).requires_grad_()
Inputs(module, inputs, targets).run(order)

# run_without_the_next_stages_gradient
# stage 0 does not use the gradient that the next stage sends
class Ones(Stage):
    def backward(self, index):
        x, y = self.kept.pop(index)
        if self.rank < self.last:
            dist.recv(torch.empty_like(y), self.rank + 1)
        y.sum().backward()
        if self.rank > 0:
            self.send(x.grad, self.rank - 1)
Ones(module, inputs, targets).run(order)

# run_on_rank_0_alone
# hangs | rank 0 is at line 42: dist.recv(gradient, self.rank + 1) | rank 1 has returned
if dist.get_rank() == 0:
    Stage(module, inputs, targets).run(order)
""",
}
