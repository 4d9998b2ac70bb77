"""How a learner's three functions are checked: they are called on real ranks, and the results are explained."""
