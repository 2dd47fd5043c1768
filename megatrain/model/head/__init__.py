"""The head and the loss of a step: over all of its tokens, in chunks of them, and as one linear layer."""
