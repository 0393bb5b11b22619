"""The model written out slowly and readably: one module a component, one function an equation."""
