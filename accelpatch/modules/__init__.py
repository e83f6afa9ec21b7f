"""The nn.Modules that move into a model; each is an instance of the class that it replaces."""
