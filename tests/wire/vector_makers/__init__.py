"""The parts of make_vectors.py: a file for a few keys of vectors.json."""
