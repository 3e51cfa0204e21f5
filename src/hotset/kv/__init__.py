"""Cache memory: blocks with exact accounts, a prefix tree over full blocks, one table per sequence."""
