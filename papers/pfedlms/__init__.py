"""The tables and figures of the pFedLMS paper, measured beside printed, and its convergence theorem.

python -m papers.pfedlms table1 --data-dir DIR
"""
