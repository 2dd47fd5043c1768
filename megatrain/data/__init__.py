"""Text becomes micro-batches: it is read, tokenised, packed to one length and served in a resumable order."""
