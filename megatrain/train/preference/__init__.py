"""What a run learns from: the loss of its steps and evaluations, and the reference of judged answers."""
