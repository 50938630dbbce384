"""How keys, values, queries and heads travel."""
