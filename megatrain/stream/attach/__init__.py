"""A model begins to stream: it is loaded or given, planned for its job, and bound to host state."""
