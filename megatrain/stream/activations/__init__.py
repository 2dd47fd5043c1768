"""What stays of a layer until its backward."""
