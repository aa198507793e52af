"""x"""


class ModelAdapterContract:
    """x"""
