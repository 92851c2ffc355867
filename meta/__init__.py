"""Fakes: the shapes, dtypes and strides each op returns. One function an op; no kernel is imported here."""
