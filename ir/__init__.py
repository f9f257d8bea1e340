"""What a graph may say: the operations, the graph builder and the weight formats."""
