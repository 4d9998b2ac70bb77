"""How a learner's functions are checked: called on real ranks, and their results explained."""
