"""Forecasts of an optimizer step on other machines: time, bytes, memory and balance."""
