"""Experiments: settings, problems, runs and studies. Public names are in `pfedlms`."""
