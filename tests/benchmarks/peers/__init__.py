"""Other quantisers on the same float graph: each writes a QDQ file, in a process of its own."""
