"""The nn.Modules that replace a model's own; each is an instance of the class that it replaces."""
