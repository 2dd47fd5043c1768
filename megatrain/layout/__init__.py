"""The places of bytes in a flat buffer, and the sizes of planes and buffers."""
