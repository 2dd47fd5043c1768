"""The objective of a run: the loss of its steps and evaluations, and the reference of judged answers."""
