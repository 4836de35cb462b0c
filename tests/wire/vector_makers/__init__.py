"""The parts of make_vectors.py; each file makes a few keys of vectors.json."""
