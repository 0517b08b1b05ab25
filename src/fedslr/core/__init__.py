"""The foundation of all other rooms: types, trees, matrices, proximal operators, options, errors, durable files."""
