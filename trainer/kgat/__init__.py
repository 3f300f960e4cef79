"""A recommender on interactions and a knowledge graph, from the paper KGAT."""
