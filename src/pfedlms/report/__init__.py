"""What people read of runs: tables, figures and the page. All of it takes runs as `RunLike` and trains nothing."""
