"""Forecasts of time series, as a project of one's own."""
