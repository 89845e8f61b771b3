"""Products of rows with the matrices of their groups, such as the experts of a layer."""
