"""Where every byte of a step is: tracker, oracle, malloc policy, resident memory."""
