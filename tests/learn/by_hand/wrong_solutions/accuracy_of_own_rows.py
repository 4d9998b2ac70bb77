"""global_accuracy: counts only the own rank's rows"""


def global_accuracy(correct: int, total: int) -> float:
    return correct / total
