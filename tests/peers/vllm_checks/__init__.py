"""The checks of ../vllm_pair.py. Standard library only."""
