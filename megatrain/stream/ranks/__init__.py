"""What one rank of several does otherwise in a step than one that is alone."""
