"""The compute node's side of the launcher: start the ranks of one attempt, watch them, and decide what their end means."""
