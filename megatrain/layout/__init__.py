"""Where bytes lie in a flat buffer, and how many a plane or a buffer takes."""
