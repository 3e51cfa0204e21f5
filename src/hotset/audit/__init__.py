"""What a run wrote about itself, held against the plan and against what the kernel says of its process."""
