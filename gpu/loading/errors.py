"""The one error of loading: the user named something that is no model, or a damaged one."""


class ModelError(ValueError):
    """A model cannot be loaded; the message names the file, the tensor or key, and the fault."""
