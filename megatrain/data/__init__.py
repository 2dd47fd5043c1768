"""Text files in, micro-batches out: read, tokenise, pack to one length, and hand out in a resumable order."""
