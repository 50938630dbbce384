"""Host arithmetic: layouts, documents, masks, and the tiles that each rank computes."""
