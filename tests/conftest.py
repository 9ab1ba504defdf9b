"""Lies here so that this folder is on the import path of all tests (``plan_factory``)."""
