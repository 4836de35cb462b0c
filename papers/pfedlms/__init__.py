"""The tables and figures of the pFedLMS paper, measured beside printed, and its convergence theorem."""
