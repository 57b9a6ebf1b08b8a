"""Writes pages that answer without a server: a forecast with the table of those around it, and what draws
them in a browser."""

from foretrain.web.page import write_page
from foretrain.web.plans import plan_table
from foretrain.web.table import ForecastTable, forecast_table

__all__ = ["ForecastTable", "forecast_table", "plan_table", "write_page"]
