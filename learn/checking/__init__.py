"""How a learner's three functions are checked: called on real ranks, and what came of it is explained."""
