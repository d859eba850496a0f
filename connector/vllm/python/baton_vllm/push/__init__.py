"""`BatonPushConnector`: the prefill engine writes the blocks, and reports each write that will not come."""
