"""The ground floor: types, trees, matrices, proximal operators, errors, durable files. It imports no other room."""
