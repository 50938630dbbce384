"""The batch side: sharding, labels, positions, losses, degrees per micro-batch."""
