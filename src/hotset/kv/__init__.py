"""Cache memory: blocks with exact accounts, frontiers and snapshots, the prefix tree, tables, session files."""
