"""How a learner's functions are checked: they are called on real ranks, and the results are explained."""
